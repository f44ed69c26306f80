"""Owns how a group's records stand in the tables: one by one while it is open, as a bundle in parts after.

A bundle is cut so that it wastes little of LMDB's pages: as many whole pages as it fills, and the rest in
parts small enough that several fit into one leaf page.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from store import codec, keys
from store.bundle import seal_checked, unseal
from store.keys import Table
from store.ports import GroupRecord
from store.records import RawRecord, group_digest
from store.snapshot import Change, Snapshot

PAGE, PAGE_HEAD = 4096, 16
INLINE = 1000
"""Bytes of a small part, its checksum included. A page that is full leaves less than one of them free."""

MAX_SMALL = 3
"""A remainder of more small parts than this fills a page of its own nearly as well."""


class Stored(NamedTuple):
    """What a snapshot holds of one group; records come out of it after the snapshot is let go."""

    parts: tuple[bytes, ...]
    rows: tuple[RawRecord, ...]

    def records(self) -> list[RawRecord]:
        """Return the records in key order; raises LogDamaged."""
        return unseal(b"".join(self.parts)) if self.parts else list(self.rows)


class Sealed(NamedTuple):
    """A group's records ready to be stored for good."""

    parts: tuple[bytes, ...]
    """Empty when they must stay as they are."""
    records: tuple[RawRecord, ...]
    digest: str

    @property
    def size(self) -> int:
        """Bytes that will be written."""
        return sum(map(len, self.parts))


def load(snapshot: Snapshot, prefix: bytes) -> Stored:
    """Return what there is of the group with this key prefix; raises LogDamaged on a wrong checksum."""
    stop = keys.after(prefix)
    parts = tuple(
        codec.unpack(Table.BUNDLES, key, value).body
        for key, value in snapshot.scan(Table.BUNDLES, prefix, stop)
    )
    return Stored(parts, () if parts else tuple(_rows(snapshot, prefix, stop)))


def _rows(snapshot: Snapshot, prefix: bytes, stop: bytes) -> Iterator[RawRecord]:
    for key, value in snapshot.scan(Table.GROUPS, prefix, stop):
        _, _, tree, index = keys.parse_group_key(key)
        schema, raw = codec.unpack(Table.GROUPS, key, value)
        yield RawRecord(tree, index, schema, raw)


def decode_records(records: Sequence[RawRecord]) -> tuple[GroupRecord, ...]:
    """Return the records with their events; raises LogDamaged."""
    if not records:
        return ()
    trees, positions, schemas, raws = zip(*records, strict=True)
    return tuple(map(GroupRecord, trees, positions, codec.decode_all(raws, schemas), raws))


def seal_group(records: Sequence[RawRecord]) -> Sealed:
    """Return the group sealed, compared with the originals, and cut into parts."""
    blob = seal_checked(records)
    return Sealed(cut(blob) if blob else (), tuple(records), group_digest(records))


def cut(blob: bytes) -> tuple[bytes, ...]:
    """Return the parts in which a bundle is stored."""
    room = codec.HEAD_SIZE + PAGE_HEAD
    pages = (len(blob) + room) // PAGE
    whole = pages * PAGE - room if pages else 0
    count = -(-(len(blob) - whole) // (INLINE - codec.HEAD_SIZE))
    if count > MAX_SMALL:
        return (blob,)
    sizes = [(len(blob) - whole + number) // count for number in range(count)]
    ends = list(itertools.accumulate(sizes, initial=whole))
    parts = [blob[start:end] for start, end in itertools.pairwise(ends)]
    return (blob[:whole], *parts) if whole else tuple(parts)


def seal_changes(snapshot: Snapshot, prefix: bytes, sealed: Sealed) -> list[Change] | None:
    """Return what puts the bundle in the records' place, or None when records were added meanwhile."""
    found = snapshot.keys(Table.GROUPS, prefix, keys.after(prefix))
    if len(found) != len(sealed.records):
        return None
    if not sealed.parts:
        return []
    return [*(Change(Table.GROUPS, key, None) for key in found), *part_changes(prefix, sealed)]


def part_changes(prefix: bytes, sealed: Sealed) -> list[Change]:
    """Return what writes a bundle."""
    changes: list[Change] = []
    for number, part in enumerate(sealed.parts):
        key = keys.bundle_key(prefix, number)
        changes.append(Change(Table.BUNDLES, key, codec.pack(Table.BUNDLES, key, part)))
    return changes
