"""Owns the counts that a rollout process shows while it works; nothing is decided by them."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from store.ports import Sink


class Progress(msgspec.Struct, kw_only=True):
    """Counts since this process started; one object, updated in place before each notice."""

    groups_open: int = 0
    groups_closed: int = 0
    groups_aborted: int = 0
    groups_lost: int = 0
    """Closed or adopted by somebody else while this process worked on them."""
    groups_adopted: int = 0
    trajectories_open: int = 0
    trajectories_ended: int = 0
    trajectories_void: int = 0
    turns: int = 0
    tokens_sampled: int = 0
    search_calls: int = 0
    search_faults: int = 0
    reward_sum: float = 0.0
    """Over the scored trajectories: those ended but not void."""
    exact_match_sum: float = 0.0
    format_sum: float = 0.0
    waiting: str = ""
    """What the claim loop waits for; "" while it does not."""

    @property
    def scored(self) -> int:
        """Trajectories that were scored."""
        return self.trajectories_ended - self.trajectories_void


Notify = Callable[[Progress], None]
"""Called after each change; must return at once."""


class Voice(NamedTuple):
    """How a process tells a person what it does."""

    progress: Progress
    notify: Notify
    say: Sink
    """For one-line notices."""


def silence() -> Voice:
    """Return a voice that nobody hears."""
    return Voice(Progress(), lambda _: None, lambda _: None)
