"""Owns what rollout and learner see of a log: two ports and the plain values that cross them.

No caller may rely on both ports living in one environment: closing a group and its journal entry are safe
to repeat and may be seen apart. Every `append` returns only when its records are on disk.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, Protocol

import msgspec

from core.events import ChosenLeaf, GroupEvent, JournalEvent
from store.records import RawRecord, group_digest


class JournalRecord(NamedTuple):
    """One journal entry as stored."""

    index: int  # type: ignore[assignment] # the log's word, not tuple.index
    event: JournalEvent
    raw: bytes
    """The stored event bytes: the truth, never re-encoded."""


class GroupRecord(NamedTuple):
    """One record of a group as stored; (tree, index) is its identity."""

    tree: int
    index: int  # type: ignore[assignment] # the log's word, not tuple.index
    event: GroupEvent
    raw: bytes


@dataclass(frozen=True)
class Bundle:
    """All records of one group in key order."""

    uid: str
    records: tuple[GroupRecord, ...]
    schemas: tuple[int, ...]
    """Of each record: the schema under which it was written."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 hex over all records (store.records.group_digest), computed when first asked for."""
        return group_digest(
            [
                RawRecord(record.tree, record.index, schema, record.raw)
                for record, schema in zip(self.records, self.schemas, strict=True)
            ]
        )


class StreamWrite(NamedTuple):
    """Events for one tree's stream, starting at position `expect` (None: at its end)."""

    tree: int
    expect: int | None
    events: Sequence[GroupEvent]


class GroupFate(StrEnum):
    """Where a group stands in the books."""

    OPEN = "open"
    CLOSED = "closed"
    PLANNED = "planned"
    TRAINED = "trained"
    DROPPED = "dropped"
    ABORTED = "aborted"


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """The projection of one group's journal entries."""

    uid: str
    ticket: int
    attempt: int
    owner: int
    worker: str
    policy_version: int
    weights_uri: str
    opened_at_step: int
    """Committed steps when it was opened."""
    fate: GroupFate
    reason: str = ""
    final: bool = False
    step: int | None = None
    """The step that planned or trained it."""
    records: int = 0
    digest: str = ""
    chosen: tuple[ChosenLeaf, ...] = ()
    opened_at: float = 0.0


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """The projection of one step; indices are journal positions."""

    step: int
    planned_index: int
    committed_index: int | None = None
    skipped: bool = False
    policy_version: int = 0
    """After the step, once committed."""


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    """The projection of one published policy version."""

    policy_version: int
    weights_uri: str
    step: int
    index: int


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a run, from one snapshot of the journal."""

    journal_length: int
    next_ticket: int
    live_tickets: int
    """Tickets not dropped and not finally aborted, trained ones included."""
    committed_steps: int
    planned_step: int | None
    """A step planned but not committed."""
    max_steps: int | None
    """The goal; None when learn has not been started."""
    policy_version: int
    weights_uri: str
    checkpoint_index: int | None
    """Journal position of the newest checkpoint."""
    fates: dict[str, int]
    """Groups per fate."""


class Admission(NamedTuple):
    """The bound under which a new ticket may be claimed (design: admission pacing)."""

    max_staleness: int
    groups_per_step: int
    max_tickets: int | None = None


class Claim(NamedTuple):
    """A group that this worker now owns."""

    uid: str
    ticket: int
    attempt: int
    owner: int
    policy_version: int
    weights_uri: str
    adopted: bool


class NoClaim(StrEnum):
    """Why there is nothing to claim now."""

    WAIT = "wait"
    """Admission is at its bound, or enough tickets for the goal are in flight."""
    GOAL = "goal"
    """The goal is reached, or `max_tickets` have been opened: this worker will get nothing more."""


class Journal(Protocol):
    """The run's one ordered stream."""

    def append_sync(self, events: Sequence[JournalEvent], expect: int | None = None) -> int:
        """Append all or nothing; return the position of the first.

        `expect=n` succeeds without effect if the records at n… are byte-identical, else raises Conflict.
        """
        ...

    async def append(self, events: Sequence[JournalEvent], expect: int | None = None) -> int:
        """As `append_sync`, off the event loop; a cancelled call may still have been written."""
        ...

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[JournalRecord]:
        """Yield stored records in order, in short snapshots."""
        ...

    def follow(self, after: int = 0) -> AsyncIterator[JournalRecord]:
        """Yield records from position `after` on, for ever, soon after their commit."""
        ...

    def wait_sync(self, length: int, timeout: float) -> bool:
        """Block until the journal is longer than `length` or `timeout` seconds passed; tell which."""
        ...


class Groups(Protocol):
    """The groups' records and who may write them."""

    async def claim(self, worker: str, admission: Admission, now: float) -> Claim | NoClaim:
        """Adopt a dead worker's open group, re-open an aborted ticket, or open the next ticket."""
        ...

    async def append(self, claim: Claim, writes: Sequence[StreamWrite]) -> None:
        """Append to several trees of one group in one transaction.

        Raises OwnerLost, GroupClosed or Conflict; a byte-identical repeat succeeds without effect.
        """
        ...

    async def close(self, claim: Claim, chosen: Sequence[ChosenLeaf], now: float) -> str:
        """Seal the group, append `group_closed`, return the digest; safe to repeat."""
        ...

    async def abort(self, claim: Claim, reason: str, now: float, *, final: bool = False) -> None:
        """Give the group up; its ticket is opened again as attempt + 1 unless `final`."""
        ...

    def fetch(self, uid: str) -> Bundle:
        """Return all records of a group, sealed or not; raises LogDamaged or StoreError."""
        ...


Sink = Callable[[str], None]
"""Where one-line notices for a person go."""
