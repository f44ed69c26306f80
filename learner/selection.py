"""Owns which groups a step trains: the lowest tickets without a fate, never the first to finish.

Pure: rows of the log in, a decision out. Waiting for the lowest tickets keeps long trajectories in the
batch; a group that is too old or too late leaves with a recorded reason, and the next ticket moves up.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from store.ports import GroupFate, GroupRow

STALE = "stale"
DEADLINE = "group_deadline"
NO_SIGNAL = "no_signal"
RUN_ENDED = "run_ended"
SUPERSEDED = "superseded"
"""Sampled from the base model, before the state that the run was told to resume from was published."""


class Rule(NamedTuple):
    """The bounds under which groups are taken."""

    groups_per_step: int
    max_staleness: int | None
    """None: a recorded run is trained again, and age is no reason to drop anything."""
    group_deadline: float
    """Seconds."""


class Decision(NamedTuple):
    """What to do now; `ready` is complete or empty."""

    ready: tuple[GroupRow, ...]
    too_old: tuple[GroupRow, ...]
    """Closed ones to drop, open ones to give up (their ticket is opened again)."""
    late: tuple[GroupRow, ...]
    """Open ones that the step has waited for long enough."""
    waiting: tuple[GroupRow, ...]
    """What the step still waits for, tickets that are not opened yet left out."""


def staleness(row: GroupRow, step: int) -> int:
    """Return the staleness of a group that step `step` would train."""
    return step - row.opened_at_step


def decide(rows: Sequence[GroupRow], step: int, rule: Rule, waited: Mapping[str, float]) -> Decision:
    """Return what step `step` can take of `rows`: the newest attempt of each ticket without a fate.

    `waited` maps a uid to the seconds that this step has waited for it with a living worker.
    """
    ordered = sorted(rows, key=lambda row: row.ticket)
    limit = rule.max_staleness
    too_old = [
        row
        for row in ordered
        if limit is not None and row.fate != GroupFate.ABORTED and staleness(row, step) > limit
    ]
    left = [row for row in ordered if row not in too_old][: rule.groups_per_step]
    closed = tuple(row for row in left if row.fate == GroupFate.CLOSED)
    waiting = tuple(row for row in left if row.fate != GroupFate.CLOSED)
    late = tuple(
        row
        for row in waiting
        if row.fate == GroupFate.OPEN and waited.get(row.uid, 0.0) >= rule.group_deadline
    )
    complete = len(closed) == rule.groups_per_step
    return Decision(closed if complete else (), tuple(too_old), late, waiting)
