"""Owns the groups' records over LMDB: who may write them, appending, closing with sealing, fetching."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio.to_thread

from core.errors import Conflict, GroupClosed, StoreError
from core.events import ChosenLeaf, GroupAborted, GroupEvent, ToolCalled, TurnSampled
from core.events import GroupClosed as GroupClosedEvent
from store import keys
from store.checking import check_writes
from store.claims import Claimant, adopt, check_owner, claim_job
from store.codec import Prepared, finish, prepare_events
from store.environment import Environment
from store.journal import encode_all, journal_changes, views_of
from store.keys import MAX_INDEX, Table
from store.locks import Locks
from store.ports import Admission, Bundle, Claim, GroupFate, GroupRecord, NoClaim, StreamWrite
from store.records import RawRecord
from store.rows import FATES
from store.sealing import Sealed, decode_records, load, seal_changes, seal_group
from store.snapshot import Rows, Snapshot
from store.views import Views
from store.writer import Job, Plan, Writer

SMALL = 256
"""Bytes by which a request without a payload counts in the queue."""


class Stream(NamedTuple):
    """A StreamWrite after encoding."""

    tree: int
    expect: int | None
    records: tuple[Prepared, ...]


class Ending(NamedTuple):
    """What closes or aborts a group, made before the write lock is taken."""

    event: GroupClosedEvent | GroupAborted
    sealed: Sealed


class LmdbGroups:
    """The Groups port over an environment."""

    def __init__(self, environment: Environment, writer: Writer, locks: Locks) -> None:
        self._environment = environment
        self._writer = writer
        self._locks = locks
        self._orphans: dict[str, set[str]] = {}

    async def claim(self, worker: str, admission: Admission, now: float) -> Claim | NoClaim:
        """See Groups. `worker` holds locks/<worker> from the first call on."""
        claimant = self._claimant(worker)
        return await self._writer.run(claim_job(claimant, admission, now), SMALL, _lost(claimant))

    def claim_sync(self, worker: str, admission: Admission, now: float) -> Claim | NoClaim:
        """As `claim`, blocking."""
        return self._writer.run_sync(claim_job(self._claimant(worker), admission, now), SMALL)

    def take_over_sync(self, uid: str, worker: str, now: float) -> Claim:
        """Adopt an open group although its owner lives, whose later appends then fail with OwnerLost.

        This is how the learner closes a group that is late. Raises GroupClosed when it is not open.
        """
        self._locks.take(worker)
        return self._writer.run_sync(
            lambda snapshot: adopt(snapshot, views_of(snapshot), uid, worker, now), SMALL
        )

    async def append(self, claim: Claim, writes: Sequence[StreamWrite]) -> None:
        """See Groups. Also raises StoreError for records that must not be stored (store.checking)."""
        streams, size = _encode(claim.uid, writes)
        await self._writer.run(_append_job(claim, streams), size)

    def append_sync(self, claim: Claim, writes: Sequence[StreamWrite]) -> None:
        """As `append`, blocking."""
        streams, size = _encode(claim.uid, writes)
        self._writer.run_sync(_append_job(claim, streams), size)

    async def close(self, claim: Claim, chosen: Sequence[ChosenLeaf], now: float) -> str:
        """See Groups; sealing happens on a worker thread."""
        while True:
            ending = await anyio.to_thread.run_sync(self._closing, claim, tuple(chosen), now)
            if await self._writer.run(_end_job(claim, ending), SMALL + ending.sealed.size):
                return ending.sealed.digest

    def close_sync(self, claim: Claim, chosen: Sequence[ChosenLeaf], now: float) -> str:
        """As `close`, blocking."""
        while True:
            ending = self._closing(claim, tuple(chosen), now)
            if self._writer.run_sync(_end_job(claim, ending), SMALL + ending.sealed.size):
                return ending.sealed.digest

    async def abort(self, claim: Claim, reason: str, now: float, *, final: bool = False) -> None:
        """See Groups; safe to repeat."""
        while True:
            ending = await anyio.to_thread.run_sync(self._aborting, claim, reason, now, final)
            if await self._writer.run(_end_job(claim, ending), SMALL + ending.sealed.size):
                return

    def abort_sync(self, claim: Claim, reason: str, now: float, *, final: bool = False) -> None:
        """As `abort`, blocking."""
        while True:
            ending = self._aborting(claim, reason, now, final)
            if self._writer.run_sync(_end_job(claim, ending), SMALL + ending.sealed.size):
                return

    def fetch_raw(self, uid: str) -> list[RawRecord]:
        """Return a group's records before decoding, in key order; raises LogDamaged or StoreError."""
        with self._environment.read() as snapshot:
            stored = load(snapshot, keys.group_prefix(uid))
            if not (stored.parts or stored.rows) and views_of(snapshot).group(uid) is None:
                raise StoreError(f"this log has no group {uid!r}")
        return stored.records()

    def fetch(self, uid: str) -> Bundle:
        """See Groups; a group without records yet gives an empty bundle."""
        records = self.fetch_raw(uid)
        return Bundle(uid, decode_records(records), tuple(record.schema for record in records))

    def _claimant(self, worker: str) -> Claimant:
        self._locks.take(worker)
        return Claimant(worker, self._locks.is_dead, self._orphans.setdefault(worker, set()))

    def _closing(self, claim: Claim, chosen: tuple[ChosenLeaf, ...], now: float) -> Ending:
        sealed, records = self._sealed(claim)
        sampled, searches = spent(records)
        event = GroupClosedEvent(
            uid=claim.uid,
            chosen=chosen,
            records=len(records),
            digest=sealed.digest,
            tokens_sampled=sampled,
            search_calls=searches,
            at=now,
        )
        return Ending(event, sealed)

    def _aborting(self, claim: Claim, reason: str, now: float, final: bool) -> Ending:
        sealed, records = self._sealed(claim)
        sampled, searches = spent(records)
        event = GroupAborted(
            uid=claim.uid,
            reason=reason,
            final=final,
            records=len(records),
            tokens_sampled=sampled,
            search_calls=searches,
            at=now,
        )
        return Ending(event, sealed)

    def _sealed(self, claim: Claim) -> tuple[Sealed, Sequence[GroupRecord]]:
        with self._environment.read() as snapshot:
            records = load(snapshot, keys.group_prefix(claim.uid)).records()
        return seal_group(records), decode_records(records)


def _lost(claimant: Claimant) -> Callable[[Claim | NoClaim], None]:
    def lost(result: Claim | NoClaim) -> None:
        if isinstance(result, Claim):
            claimant.orphans.add(result.uid)

    return lost


def spent(records: Sequence[GroupRecord]) -> tuple[int, int]:
    """Return tokens sampled and tool calls made."""
    events: list[GroupEvent] = [record.event for record in records]
    sampled = sum(len(event.tokens) // 4 for event in events if isinstance(event, TurnSampled))
    return sampled, sum(isinstance(event, ToolCalled) for event in events)


def _encode(uid: str, writes: Sequence[StreamWrite]) -> tuple[tuple[Stream, ...], int]:
    check_writes(uid, writes)
    streams = tuple([Stream(tree, expect, prepare_events(events)) for tree, expect, events in writes])
    return streams, SMALL + sum([len(tail) for stream in streams for _, tail in stream.records])


def _append_job(claim: Claim, streams: Sequence[Stream]) -> Job[None]:
    prefix = keys.group_prefix(claim.uid)
    owned = (claim.uid, claim.owner)

    def job(snapshot: Snapshot) -> Plan[None]:
        if owned not in snapshot.owners:
            check_owner(views_of(snapshot), claim)
            snapshot.owners.add(owned)
        ends: dict[int, int] = {}
        rows: dict[bytes, bytes] = {}
        for stream in streams:
            start = prefix + stream.tree.to_bytes(2, "big")
            end = ends.get(stream.tree)
            if end is None:
                end = _stream_end(snapshot, start)
            size = len(rows)
            _add_stream(snapshot, claim.uid, start, stream, end, rows)
            ends[stream.tree] = end + len(rows) - size
        return Plan((Rows(Table.GROUPS, list(rows.items())),), None)

    return job


def _stream_end(snapshot: Snapshot, start: bytes) -> int:
    """Return how many records the stream whose keys begin with `start` has."""
    last = snapshot.last_key(Table.GROUPS, below=keys.after(start))
    if last is None or not last.startswith(start):
        return 0
    return keys.parse_group_key(last).position + 1


def _add_stream(
    snapshot: Snapshot, uid: str, start: bytes, stream: Stream, end: int, rows: dict[bytes, bytes]
) -> None:
    """Add to `rows`, the request's so far, all of a write, or nothing where it stands there already."""
    expect = end if stream.expect is None else stream.expect
    if not 0 <= expect <= end or expect + len(stream.records) > MAX_INDEX:
        raise Conflict(
            f"position {expect} of group {uid}, tree {stream.tree} is beyond the end: it has {end} records"
        )
    if expect == end:
        for position, record in enumerate(stream.records, end):
            key = start + position.to_bytes(4, "big")
            rows[key] = finish(key, record)
        return
    for position, record in enumerate(stream.records, expect):
        key = start + position.to_bytes(4, "big")
        if (rows.get(key) or snapshot.get(Table.GROUPS, key)) != finish(key, record):
            raise Conflict(
                f"position {position} of group {uid}, tree {stream.tree} holds another record than the one "
                f"to be written there (its stream has {end}): fetch the group and decide anew"
            )


def _end_job(claim: Claim, ending: Ending) -> Job[bool]:
    """Return the job that ends a group; its result is False when records were added since it was sealed."""
    prefix = keys.group_prefix(claim.uid)
    encoded = encode_all([ending.event])

    def job(snapshot: Snapshot) -> Plan[bool]:
        views = views_of(snapshot)
        try:
            check_owner(views, claim)
        except GroupClosed:
            if _ended_so(views, ending.event):
                return Plan((), result=True)
            raise
        changes = seal_changes(snapshot, prefix, ending.sealed)
        if changes is None:
            return Plan((), result=False)
        return Plan([*changes, *journal_changes(snapshot, encoded)], result=True)

    return job


def _ended_so(views: Views, event: GroupClosedEvent | GroupAborted) -> bool:
    """Return whether the group has already ended just as `event` says."""
    group = views.group(event.uid)
    assert group is not None
    if isinstance(event, GroupAborted):
        return FATES[group.fate] is GroupFate.ABORTED and (group.reason, group.final) == (
            event.reason,
            event.final,
        )
    return group.digest == event.digest and group.chosen == tuple(
        (leaf.tree, leaf.leaf) for leaf in event.chosen
    )
