"""Owns events as stored bytes: encoding, decoding with upcasts, checksums, the journal's chain, digests.

A stored value is `crc32 u32 LE | schema u16 LE | payload`. The checksum covers the table's name, schema and
payload, and then the key, so a record found under another key is as damaged as one with a flipped bit; all
but the key is summed before the write lock is taken.
A group record's payload is the event's MessagePack bytes; a journal record's is the SHA-256 of its
predecessor (key and value) and then those bytes.
"""

import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from core.errors import LogDamaged, LogTooNew
from core.events import SCHEMA_VERSION, GroupEvent, JournalEvent
from store.keys import Table

Upcast = Callable[[dict[str, object]], dict[str, object]]

UPCASTS: Mapping[tuple[str, int], Upcast] = {}
"""(tag, schema) -> what turns an event of that schema into one of schema + 1. Empty while schema 1 is the
only one; a tag without an entry is unchanged between two schemas."""

_HEAD = struct.Struct("<IH")
_SCHEMA = struct.Struct("<H")
_OUR_SCHEMA = _SCHEMA.pack(SCHEMA_VERSION)
HEAD_SIZE = _HEAD.size
CHAIN_SIZE = 32
CHAIN_START = hashlib.sha256(b"rolltape.journal.v1").digest()
"""What stands for the predecessor in journal record 0."""

_encode = msgspec.msgpack.Encoder().encode
_decode_journal = msgspec.msgpack.Decoder(JournalEvent).decode
_decode_group = msgspec.msgpack.Decoder(GroupEvent).decode
NOT_READABLE = (msgspec.MsgspecError, RecursionError)
"""What decoding raises: the second for lists in lists that go deeper than the stack."""
_SEEDS = {table: zlib.crc32(table.value) for table in Table}


class Payload(NamedTuple):
    """A stored value whose checksum was right."""

    schema: int
    body: bytes


Prepared: TypeAlias = tuple[int, bytes]
"""A stored value that lacks only its key's part of the checksum: the sum so far, and all that follows it."""


def encode(event: JournalEvent | GroupEvent) -> bytes:
    """Return the event's MessagePack bytes."""
    return _encode(event)


def decode_journal(raw: bytes, schema: int = SCHEMA_VERSION) -> JournalEvent:
    """Return a journal event; raises LogDamaged when the bytes are not one, LogTooNew for a newer schema."""
    try:
        if schema == SCHEMA_VERSION:
            event: JournalEvent = _decode_journal(raw)
        else:
            event = msgspec.convert(upcast(raw, schema), JournalEvent)
    except NOT_READABLE as exc:
        raise LogDamaged(f"not a journal event: {raw[:40]!r}… ({exc}), schema {schema}") from exc
    return event


def decode_all(raws: Sequence[bytes], schemas: Sequence[int]) -> list[GroupEvent]:
    """Return the events of a group's records; as `decode_group`, but with one call for all of them."""
    if any(schema != SCHEMA_VERSION for schema in schemas):
        return list(map(decode_group, raws, schemas))
    try:
        return list(map(_decode_group, raws))
    except NOT_READABLE as exc:
        raise LogDamaged(f"a record is not a group's event ({exc})") from exc


def decode_group(raw: bytes, schema: int = SCHEMA_VERSION) -> GroupEvent:
    """Return a group's event; raises LogDamaged when the bytes are not one, LogTooNew for a newer schema."""
    try:
        if schema == SCHEMA_VERSION:
            event: GroupEvent = _decode_group(raw)
        else:
            event = msgspec.convert(upcast(raw, schema), GroupEvent)
    except NOT_READABLE as exc:
        raise LogDamaged(f"not a group's event: {raw[:40]!r}… ({exc}), schema {schema}") from exc
    return event


def upcast(
    raw: bytes,
    schema: int,
    table: Mapping[tuple[str, int], Upcast] = UPCASTS,
    current: int = SCHEMA_VERSION,
) -> dict[str, object]:
    """Return the plain form of an older event, brought to schema `current` one step at a time."""
    if schema > current:
        raise LogTooNew(f"a record of schema {schema}, this release reads up to {current}: upgrade rolltape")
    plain = msgspec.msgpack.decode(raw, type=dict[str, object])
    for version in range(schema, current):
        step = table.get((str(plain.get("type")), version))
        plain = step(plain) if step else plain
    return plain


def prepare(table: Table, body: bytes, schema: int = SCHEMA_VERSION) -> Prepared:
    """Return `body` ready to be stored in a table, under a key that is not known yet."""
    tail = _SCHEMA.pack(schema) + body
    return zlib.crc32(tail, _SEEDS[table]), tail


def prepare_events(events: Sequence[GroupEvent]) -> tuple[Prepared, ...]:
    """Return a group's events encoded and ready to be stored; as `prepare`, at half its cost."""
    encode, crc32, seed = _encode, zlib.crc32, _SEEDS[Table.GROUPS]
    tails = [_OUR_SCHEMA + encode(event) for event in events]
    return tuple([(crc32(tail, seed), tail) for tail in tails])


def finish(key: bytes, prepared: Prepared) -> bytes:
    """Return the stored value of what was prepared under `key`."""
    return zlib.crc32(key, prepared[0]).to_bytes(4, "little") + prepared[1]


def pack(table: Table, key: bytes, body: bytes, schema: int = SCHEMA_VERSION) -> bytes:
    """Return the stored value of `body` under `key`."""
    return finish(key, prepare(table, body, schema))


def unpack(table: Table, key: bytes, value: bytes) -> Payload:
    """Return the body of a stored value; raises LogDamaged when its checksum is wrong."""
    if len(value) >= HEAD_SIZE:
        crc, schema = _HEAD.unpack_from(value)
        if zlib.crc32(key, zlib.crc32(value[4:], _SEEDS[table])) == crc:
            return Payload(schema, value[HEAD_SIZE:])
    raise LogDamaged(
        f"damaged record in table {table.value.decode()!r} at key {key.hex()}: its checksum is wrong. "
        "Run `verify`, and restore the log from a backup or an export"
    )


def chain(key: bytes, value: bytes) -> bytes:
    """Return what the journal record after this one carries: SHA-256 over key and stored value."""
    return hashlib.sha256(key + value).digest()
