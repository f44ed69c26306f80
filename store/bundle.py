"""Owns bundles: a group's records as one block, with token and logprob bytes cut out into columns.

Layout: header | zstd(splice table, remainder) | zstd(tokens) | logprobs raw. The remainder is the records
without the spans, end to end; the table says where they were; unsealing is pure byte splicing and knows
nothing of events. Tokens are u16 low halves and then 2-bit high parts, or int32 where an id needs more than
18 bits. A bundle holds no position in a log and no path, so it is also the unit of export and import.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from core.errors import LogDamaged
from core.events import GroupAsked, GroupEvent, Observed, ReferenceScored, TurnSampled
from store.codec import RawRecord, decode_group, group_digest

MAGIC = b"RTB1"
LEVEL = 3
MIN_SPAN = 8
"""Bytes; shorter ones cost more in the table than they save."""

TOKENS, LOGPROBS = 0, 1
"""Kinds of spans."""

_HEADER = struct.Struct("<4sIIIIII")
"""Magic, flags, records, spans, token count, bytes of the first block, bytes of the second."""
_WIDE = 1
_PER_RECORD, _PER_SPAN = 5, 3


class Span(NamedTuple):
    """Bytes to be cut out of one record."""

    kind: int
    offset: int
    size: int


class _Local(threading.local):
    """zstandard's objects may be used by one thread at a time."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_local = _Local()


def find_spans(raw: bytes, event: GroupEvent) -> list[Span]:
    """Return where the event's token and logprob bytes stand inside its stored form, in order."""
    fields: tuple[tuple[int, str, bytes | None], ...] = ()
    match event:
        case TurnSampled():
            fields = (
                (TOKENS, "tokens", event.tokens),
                (LOGPROBS, "sampled_logprobs", event.sampled_logprobs),
            )
        case Observed():
            fields = ((TOKENS, "tokens", event.tokens), (TOKENS, "prompt_reset", event.prompt_reset))
        case GroupAsked():
            fields = ((TOKENS, "prompt", event.prompt),)
        case ReferenceScored():
            fields = ((LOGPROBS, "logprobs", event.logprobs),)
        case _:
            pass
    found = [
        Span(kind, offset, len(value))
        for kind, name, value in fields
        if value is not None
        and len(value) >= MIN_SPAN
        and len(value) % 4 == 0
        and (offset := _find(raw, name, value)) >= 0
    ]
    return list(_without_overlap(sorted(found, key=lambda span: span.offset)))


def seal(records: Sequence[RawRecord]) -> bytes:
    """Return the bundle of a group's records, which stand in key order. The caller compares before use."""
    rest: list[bytes] = []
    columns: tuple[list[bytes], list[bytes]] = ([], [])
    per_record: list[tuple[int, ...]] = []
    per_span: list[tuple[int, ...]] = []
    tree = index = 0
    for record in records:
        spans = find_spans(record.raw, decode_group(record.raw, record.schema))
        end = 0
        for span in spans:
            rest.append(record.raw[end : span.offset])
            columns[span.kind].append(record.raw[span.offset : span.offset + span.size])
            per_span.append((span.kind, span.offset - end, span.size))
            end = span.offset + span.size
        rest.append(record.raw[end:])
        if record.tree != tree:
            index = 0
        row = (record.tree - tree, record.position - index, record.schema, len(spans), len(record.raw) - end)
        per_record.append(row)
        tree, index = record.tree, record.position + 1
    table = _planes(per_record, _PER_RECORD) + _planes(per_span, _PER_SPAN)
    tokens = np.frombuffer(b"".join(columns[TOKENS]), dtype="<u4")
    wide = bool(tokens.size) and int(tokens.max()) >= 1 << 18
    first = _local.compress(table + b"".join(rest))
    second = _local.compress(tokens.tobytes() if wide else _narrow(tokens))
    header = _HEADER.pack(
        MAGIC, _WIDE * wide, len(per_record), len(per_span), tokens.size, len(first), len(second)
    )
    return b"".join((header, first, second, *columns[LOGPROBS]))


def unseal(blob: bytes) -> list[RawRecord]:
    """Return the records of a bundle, byte for byte; raises LogDamaged when it is not one."""
    try:
        return list(_splice(blob))
    except (struct.error, zstandard.ZstdError, ValueError, IndexError) as exc:
        raise LogDamaged(f"not a bundle: {blob[:16].hex()}… of {len(blob)} bytes ({exc})") from exc


def seal_checked(records: Sequence[RawRecord]) -> bytes | None:
    """Return the bundle, or None when there is nothing to seal or unsealing would not give the originals."""
    if not records:
        return None
    blob = seal(records)
    return blob if unseal(blob) == list(records) else None


def digest_of(blob: bytes) -> str:
    """Return the group digest of a bundle's records."""
    return group_digest(unseal(blob))


def _splice(blob: bytes) -> Iterator[RawRecord]:
    magic, flags, n_records, n_spans, n_tokens, first, second = _HEADER.unpack_from(blob)
    if magic != MAGIC:
        raise ValueError(f"starts with {magic!r}, expected {MAGIC!r}")
    start = _HEADER.size
    rest = _local.decompress(blob[start : start + first])
    packed = _local.decompress(blob[start + first : start + first + second])
    columns = (packed if flags & _WIDE else _widen(packed, n_tokens), blob[start + first + second :])
    table_size = 4 * (n_records * _PER_RECORD + n_spans * _PER_SPAN)
    per_record = _rows(rest[: 4 * n_records * _PER_RECORD], _PER_RECORD)
    spans = iter(_rows(rest[4 * n_records * _PER_RECORD : table_size], _PER_SPAN))
    at, taken = table_size, [0, 0]
    tree = index = 0
    for tree_step, index_step, schema, count, tail in per_record:
        pieces: list[bytes] = []
        for _ in range(count):
            kind, gap, size = next(spans)
            offset = taken[kind]
            pieces += (rest[at : at + gap], columns[kind][offset : offset + size])
            taken[kind] = offset + size
            at += gap
        pieces.append(rest[at : at + tail])
        at += tail
        index = index_step if tree_step else index + index_step
        tree += tree_step
        yield RawRecord(tree, index, schema, b"".join(pieces))
        index += 1
    if at != len(rest) or taken != [len(columns[TOKENS]), len(columns[LOGPROBS])]:
        raise ValueError(f"{len(rest) - at} bytes of its remainder are left over, columns read to {taken}")


def _find(raw: bytes, name: str, value: bytes) -> int:
    size = len(value)
    head = (
        b"\xc4" + size.to_bytes(1, "big")
        if size < 1 << 8
        else b"\xc5" + size.to_bytes(2, "big")
        if size < 1 << 16
        else b"\xc6" + size.to_bytes(4, "big")
    )
    label = (0xA0 | len(name)).to_bytes(1, "big") + name.encode() + head
    at = raw.find(label + value)
    return at if at < 0 else at + len(label)


def _without_overlap(spans: Sequence[Span]) -> Iterator[Span]:
    end = 0
    for span in spans:
        if span.offset >= end:
            yield span
            end = span.offset + span.size


def _planes(rows: Sequence[tuple[int, ...]], width: int) -> bytes:
    """Return u32 columns with their bytes apart, so that the many zeros and repeats stand together."""
    columns = np.asarray(rows, dtype="<u4").reshape(len(rows), width).T
    return (
        np.ascontiguousarray(columns).view(np.uint8).reshape(width, len(rows), 4).transpose(0, 2, 1).tobytes()
    )


def _rows(planes: bytes, width: int) -> list[list[int]]:
    count = len(planes) // (4 * width)
    apart = np.frombuffer(planes, dtype=np.uint8).reshape(width, 4, count)
    columns = np.ascontiguousarray(apart.transpose(0, 2, 1)).view("<u4").reshape(width, count)
    rows: list[list[int]] = columns.T.tolist()
    return rows


def _narrow(tokens: NDArray[np.uint32]) -> bytes:
    high = np.zeros(-(-tokens.size // 4) * 4, dtype=np.uint8)
    high[: tokens.size] = tokens >> 16
    quarters = high.reshape(-1, 4)
    packed = quarters[:, 0] | quarters[:, 1] << 2 | quarters[:, 2] << 4 | quarters[:, 3] << 6
    return (tokens & 0xFFFF).astype("<u2").tobytes() + packed.tobytes()


def _widen(packed: bytes, count: int) -> bytes:
    tokens = np.frombuffer(packed, dtype="<u2", count=count).astype("<u4")
    high = np.frombuffer(packed, dtype=np.uint8, offset=2 * count)
    if high.any():
        parts = np.stack([high & 3, high >> 2 & 3, high >> 4 & 3, high >> 6], axis=1).reshape(-1)
        tokens |= parts[:count].astype("<u4") << 16
    return tokens.tobytes()
