"""Owns the journal over LMDB: appending with `expect` and the chain, reading in snapshots, following."""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

from core.errors import Conflict, LogDamaged, StoreError
from core.events import JournalEvent
from store import codec, keys
from store.environment import Environment
from store.keys import Table
from store.ports import JournalRecord
from store.projections import PROJECTION_VERSION, apply
from store.snapshot import Change, Snapshot
from store.views import Views
from store.watching import Watcher
from store.writer import Job, Plan, Writer

READ_RECORDS, READ_BYTES = 256, 1 << 20
"""What one snapshot copies at most before it is let go."""


class Encoded(NamedTuple):
    """A journal event with its bytes, made before the write lock is taken."""

    event: JournalEvent
    raw: bytes


def encode_all(events: Sequence[JournalEvent]) -> tuple[Encoded, ...]:
    """Return the events with their bytes."""
    return tuple(Encoded(event, codec.encode(event)) for event in events)


def views_of(snapshot: Snapshot) -> Views:
    """Return the views as they stand in a snapshot."""

    def read(key: bytes) -> bytes | None:
        value = snapshot.get(Table.VIEWS, key)
        return None if value is None else codec.unpack(Table.VIEWS, key, value).body

    return Views(read)


def pack_view(key: bytes, body: bytes) -> bytes:
    """Return the stored value of a view row."""
    return codec.pack(Table.VIEWS, key, body, PROJECTION_VERSION)


def journal_length(snapshot: Snapshot) -> int:
    """Return how many records the journal has."""
    last = snapshot.last(Table.JOURNAL)
    return 0 if last is None else keys.parse_journal_key(last[0]) + 1


def journal_changes(snapshot: Snapshot, events: Sequence[Encoded]) -> list[Change]:
    """Return what appending `events` writes: the records, and the views that they change."""
    last = snapshot.last(Table.JOURNAL)
    index = 0 if last is None else keys.parse_journal_key(last[0]) + 1
    link = codec.CHAIN_START if last is None else codec.chain(*last)
    views = views_of(snapshot)
    if views.counters().journal_length != index:
        raise LogDamaged(
            f"the views hold {views.counters().journal_length} journal records, the journal {index}: "
            "run `verify`, then `rebuild`"
        )
    changes: list[Change] = []
    for event, raw in events:
        apply(views, index, event)
        key = keys.journal_key(index)
        value = codec.pack(Table.JOURNAL, key, link + raw)
        changes.append(Change(Table.JOURNAL, key, value))
        link = codec.chain(key, value)
        index += 1
    for key, body in views.changes.items():
        changes.append(Change(Table.VIEWS, key, None if body is None else pack_view(key, body)))
    return changes


def stored_event(key: bytes, value: bytes) -> tuple[int, bytes]:
    """Return schema and event bytes of a stored journal record; raises LogDamaged."""
    schema, body = codec.unpack(Table.JOURNAL, key, value)
    return schema, body[codec.CHAIN_SIZE :]


def to_record(key: bytes, value: bytes) -> JournalRecord:
    """Return a stored journal record decoded; raises LogDamaged."""
    schema, raw = stored_event(key, value)
    return JournalRecord(keys.parse_journal_key(key), codec.decode_journal(raw, schema), raw)


class LmdbJournal:
    """The Journal port over an environment."""

    def __init__(self, environment: Environment, writer: Writer) -> None:
        self._environment = environment
        self._writer = writer
        self._watcher = Watcher(self.length)

    def append_sync(self, events: Sequence[JournalEvent], expect: int | None = None) -> int:
        """See Journal. Also raises GroupClosed or StoreError when an event contradicts the books."""
        encoded = encode_all(events)
        return self._writer.run_sync(_append_job(encoded, expect), _size(encoded))

    async def append(self, events: Sequence[JournalEvent], expect: int | None = None) -> int:
        """See Journal."""
        encoded = encode_all(events)
        return await self._writer.run(_append_job(encoded, expect), _size(encoded))

    def length(self) -> int:
        """Return how many records there are."""
        with self._environment.read() as snapshot:
            return journal_length(snapshot)

    def head(self) -> str:
        """Return the hash of the newest record, which vouches for all before it (SHA-256 hex)."""
        with self._environment.read() as snapshot:
            last = snapshot.last(Table.JOURNAL)
        return (codec.CHAIN_START if last is None else codec.chain(*last)).hex()

    def get(self, index: int) -> JournalRecord:
        """Return record `index`; raises StoreError when there is none."""
        return to_record(keys.journal_key(index), self._stored(index))

    def schema(self, index: int) -> int:
        """Return the schema number of record `index`; raises StoreError when there is none."""
        key = keys.journal_key(index)
        return stored_event(key, self._stored(index))[0]

    def is_linked(self, index: int) -> bool | None:
        """Return whether the record after `index` holds its hash; None while there is no record after it.

        Says that record `index` is as it was written, not that either is sound: that is what `verify` is for.
        """
        key, value, after = keys.journal_key(index), self._stored(index), keys.journal_key(index + 1)
        with self._environment.read() as snapshot:
            follower = snapshot.get(Table.JOURNAL, after)
        if follower is None:
            return None
        return codec.unpack(Table.JOURNAL, after, follower).body[: codec.CHAIN_SIZE] == codec.chain(
            key, value
        )

    def _stored(self, index: int) -> bytes:
        with self._environment.read() as snapshot:
            value = snapshot.get(Table.JOURNAL, keys.journal_key(index))
        if value is None:
            raise StoreError(f"no journal record at position {index}, there are {self.length()}")
        return value

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[JournalRecord]:
        """See Journal; ends at what was there when the last snapshot was taken."""
        while True:
            batch = self._batch(start, stop)
            if not batch:
                return
            yield from batch
            start = batch[-1].index + 1

    async def follow(self, after: int = 0) -> AsyncIterator[JournalRecord]:
        """See Journal."""
        while True:
            for record in self.read(after):
                yield record
                after = record.index + 1
            await self._watcher.longer(after)

    def wait_sync(self, length: int, timeout: float) -> bool:
        """See Journal."""
        return self._watcher.longer_sync(length, timeout)

    def close(self) -> None:
        """End the watch; whoever still follows hears StoreError."""
        self._watcher.close()

    def _batch(self, start: int, stop: int | None) -> list[JournalRecord]:
        limit = start + READ_RECORDS if stop is None else min(stop, start + READ_RECORDS)
        found: list[tuple[bytes, bytes]] = []
        size = 0
        with self._environment.read() as snapshot:
            for key, value in snapshot.scan(Table.JOURNAL, keys.journal_key(start), keys.journal_key(limit)):
                found.append((key, value))
                size += len(value)
                if size > READ_BYTES:
                    break
        return [to_record(key, value) for key, value in found]


def _size(encoded: Sequence[Encoded]) -> int:
    return sum(len(raw) for _, raw in encoded)


def _append_job(encoded: Sequence[Encoded], expect: int | None) -> Job[int]:
    def job(snapshot: Snapshot) -> Plan[int]:
        length = journal_length(snapshot)
        if expect is None or expect == length:
            return Plan(journal_changes(snapshot, encoded), length)
        if expect > length:
            raise Conflict(f"journal position {expect} is beyond the end, the journal has {length} records")
        for index, (_, raw) in enumerate(encoded, expect):
            key = keys.journal_key(index)
            value = snapshot.get(Table.JOURNAL, key)
            if value is None or stored_event(key, value)[1] != raw:
                raise Conflict(
                    f"journal position {index} holds another record than the one to be written there "
                    f"(the journal has {length}): read it and decide anew"
                )
        return Plan((), expect)

    return job
