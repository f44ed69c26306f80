"""Owns the stored form of the views' rows (arrays, small) and their translation into the ports' values."""

import hashlib

import msgspec

from core.events import ChosenLeaf, StepPlanned
from core.ids import make_uid
from store.ports import GroupFate, GroupRow, PolicyRow, RunState, StepRow

FATES = tuple(GroupFate)
"""A fate is stored as its place in this tuple."""


class Counters(msgspec.Struct, frozen=True, array_like=True):
    """The one row of counters; the fields mean what RunState says."""

    journal_length: int = 0
    next_ticket: int = 0
    live_tickets: int = 0
    committed_steps: int = 0
    planned_step: int | None = None
    max_steps: int | None = None
    policy_version: int = 0
    weights_uri: str = ""
    checkpoint_index: int | None = None
    fates: tuple[int, ...] = (0,) * len(FATES)


class GroupEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One group; ticket and attempt are in the key."""

    owner: int
    worker: str
    policy_version: int
    weights_uri: str
    opened_at_step: int
    opened_at: float
    fate: int = FATES.index(GroupFate.OPEN)
    reason: str = ""
    final: bool = False
    step: int | None = None
    records: int = 0
    digest: str = ""
    chosen: tuple[tuple[int, str], ...] = ()

    def leaves(self) -> tuple[ChosenLeaf, ...]:
        """Return the members."""
        return tuple(ChosenLeaf(tree=tree, leaf=leaf) for tree, leaf in self.chosen)


class OpenEntry(msgspec.Struct, frozen=True, array_like=True):
    """Who may write an open group."""

    owner: int
    worker: str


class StepEntry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One step."""

    planned_index: int
    mark: bytes
    """What `plan_mark` says of its plan."""
    groups: tuple[str, ...]
    committed_index: int | None = None
    skipped: bool = False
    policy_version: int = 0


class PolicyEntry(msgspec.Struct, frozen=True, array_like=True):
    """One published policy version."""

    weights_uri: str
    step: int
    index: int


def plan_mark(event: StepPlanned) -> bytes:
    """Return what two plans of the same content share: SHA-256 over the plan without its time."""
    plain = _plain(msgspec.structs.replace(event, at=0.0))
    return hashlib.sha256(msgspec.msgpack.encode(plain, order="sorted")).digest()


def _plain(value: object) -> object:
    """Return plain data in which a field that equals its default is left out.

    The encoder leaves a field out only when it *is* the default object, so its bytes are not canonical.
    """
    if isinstance(value, msgspec.Struct):
        fields = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
        return {field.encode_name: _plain(item) for field, item in fields if item != field.default}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def to_state(counters: Counters) -> RunState:
    """Return the counters as the ports show them."""
    return RunState(
        journal_length=counters.journal_length,
        next_ticket=counters.next_ticket,
        live_tickets=counters.live_tickets,
        committed_steps=counters.committed_steps,
        planned_step=counters.planned_step,
        max_steps=counters.max_steps,
        policy_version=counters.policy_version,
        weights_uri=counters.weights_uri,
        checkpoint_index=counters.checkpoint_index,
        fates={fate.value: count for fate, count in zip(FATES, counters.fates, strict=True)},
    )


def to_group_row(ticket: int, attempt: int, entry: GroupEntry) -> GroupRow:
    """Return a group's row as the ports show it."""
    return GroupRow(
        uid=make_uid(ticket, attempt),
        ticket=ticket,
        attempt=attempt,
        owner=entry.owner,
        worker=entry.worker,
        policy_version=entry.policy_version,
        weights_uri=entry.weights_uri,
        opened_at_step=entry.opened_at_step,
        fate=FATES[entry.fate],
        reason=entry.reason,
        final=entry.final,
        step=entry.step,
        records=entry.records,
        digest=entry.digest,
        chosen=entry.leaves(),
        opened_at=entry.opened_at,
    )


def to_step_row(step: int, entry: StepEntry) -> StepRow:
    """Return a step's row as the ports show it."""
    return StepRow(
        step=step,
        planned_index=entry.planned_index,
        committed_index=entry.committed_index,
        skipped=entry.skipped,
        policy_version=entry.policy_version,
    )


def to_policy_row(version: int, entry: PolicyEntry) -> PolicyRow:
    """Return a policy version's row as the ports show it."""
    return PolicyRow(
        policy_version=version, weights_uri=entry.weights_uri, step=entry.step, index=entry.index
    )
