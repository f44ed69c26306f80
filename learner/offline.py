"""Owns learning from another run's recorded groups: they are repeated in a new log, then trained as ever.

Every event is repeated as it is except the first, which gets the new ticket and says where it comes from.
The groups keep the policy version that sampled them, so the importance ratio is real. Datum digests hold no
uid, so they equal those of the source wherever estimator and settings are the same.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from core.errors import ConfigError, StoreError
from core.events import GroupAsked, GroupEvent, GroupOpened
from core.ids import make_uid, parse_uid
from store.log import Log
from store.ports import Bundle, Claim, GroupFate, GroupRow, StreamWrite

IDENTITY = ("tokenizer", "base_model")
"""Fingerprints without which tokens and logprobs mean something else."""
COPIER = "copied"
"""Stands for the worker of a repeated group."""


def check_same_model(source: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raise ConfigError when tokens or logprobs of the source mean something else for this engine."""
    for name in IDENTITY:
        if source.get(name, "") != here.get(name, ""):
            raise ConfigError(
                f"the source run has {name} {source.get(name, '')!r}, this one {here.get(name, '')!r}: "
                "recorded tokens and logprobs need the same tokenizer and base model"
            )


def trained_groups(source: Log, steps: Iterable[int]) -> Iterator[GroupRow]:
    """Yield the groups of committed steps, in training order."""
    for step in steps:
        for planned in source.plan(step).groups:
            yield source.group(planned.uid)


def copy_groups(source: Log, target: Log, steps: Iterable[int], now: float) -> int:
    """Repeat the groups that the source trained in `steps` in the target, as closed groups in ticket order.

    Returns how many there are. Safe to repeat after a crash: it goes on where it was. Raises ConfigError when
    the target has other groups, StoreError or LogDamaged.
    """
    opened = source.run_event()
    if opened is None:
        raise StoreError("the source holds no run")
    _check_target(target)
    rows = list(trained_groups(source, steps))
    for ticket, row in enumerate(rows):
        uid = make_uid(ticket, 0)
        if ticket >= target.state().next_ticket:
            target.journal.append_sync([_opening(row, uid, ticket, now)])
        if target.group(uid).fate == GroupFate.OPEN:
            claim = Claim(uid, ticket, 0, 1, row.policy_version, row.weights_uri, adopted=False)
            target.groups.append_sync(claim, _writes(source.groups.fetch(row.uid), uid, opened.run_id))
            target.groups.close_sync(claim, row.chosen, now)
    return len(rows)


def _check_target(target: Log) -> None:
    for row in target.group_rows():
        if row.worker != COPIER:
            raise ConfigError(
                f"the new run already has group {row.uid} of worker {row.worker!r}: learning from another "
                "run needs a run of its own, without `rollout`"
            )


def _opening(row: GroupRow, uid: str, ticket: int, now: float) -> GroupOpened:
    return GroupOpened(
        uid=uid,
        ticket=ticket,
        attempt=0,
        owner=1,
        worker=COPIER,
        policy_version=row.policy_version,
        weights_uri=row.weights_uri,
        committed_steps=0,
        at=now,
    )


def _writes(bundle: Bundle, uid: str, run_id: str) -> list[StreamWrite]:
    """Return a group's records as appends to the new group, one per tree."""
    streams: dict[int, list[GroupEvent]] = {}
    for record in bundle.records:
        event = record.event
        if isinstance(event, GroupAsked):
            origin = event.source or f"{run_id}/{event.uid}"
            ticket, attempt = parse_uid(uid)
            event = msgspec.structs.replace(event, uid=uid, ticket=ticket, attempt=attempt, source=origin)
        streams.setdefault(record.tree, []).append(event)
    return [StreamWrite(tree, 0, events) for tree, events in sorted(streams.items())]
