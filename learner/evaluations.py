"""Owns which evaluations may be held against each other: those that asked the same questions the same way."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from core.events import Evaluated


class Way(NamedTuple):
    """All evaluations of one set of questions under one set of settings."""

    questions: str
    """Digest of the set."""
    settings: dict[str, float | str | int | bool]
    events: dict[int, Evaluated]
    """By committed steps of the weights; of several, the newest."""


def by_way(evaluations: Sequence[tuple[int, Evaluated]]) -> list[Way]:
    """Return evaluations, pairs of committed steps and event, by their way, in the order of first use."""
    ways: dict[bytes, Way] = {}
    for steps, event in evaluations:
        key = msgspec.json.encode((event.set_digest, event.settings), order="sorted")
        way = ways.setdefault(key, Way(event.set_digest, event.settings, {}))
        way.events[steps] = event
    return list(ways.values())


def main_way(ways: Sequence[Way], steps: Collection[int] | None = None) -> Way | None:
    """Return the way in which most weights were evaluated, the first of equals; None when there is none.

    Only weights after `steps` committed steps count, where given.
    """

    def count(way: Way) -> int:
        return len(way.events if steps is None else way.events.keys() & set(steps))

    return max(ways, key=count, default=None)


def what_differs(way: Way, main: Way) -> str:
    """Return in what a way differs from another, as `name value` pairs; "" when they are one."""
    names = [
        name for name in (*main.settings, *way.settings) if main.settings.get(name) != way.settings.get(name)
    ]
    told = [f"{name} {way.settings.get(name, 'not set')}" for name in dict.fromkeys(names)]
    return ", ".join([*(["other questions"] if way.questions != main.questions else []), *told])
