"""Owns bundles: a group's records as one block, with token and logprob bytes cut out into columns.

Layout: header | zstd(splice table, remainder) | zstd(tokens) | logprobs raw. The remainder is the records
without the spans, end to end. The table says per record its tree, position, schema and how many pieces it
has, and per piece how much of the remainder and then of which column it takes: unsealing is pure splicing
and knows nothing of events. Tokens are u16 low halves and then 2-bit high parts, or int32 where an id needs
more than 18 bits. A bundle holds no position in a log and no path, so it is also the unit of exchange.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from core.errors import LogDamaged
from core.events import GroupAsked, GroupEvent, Observed, ReferenceScored, TurnSampled
from store.codec import decode_group
from store.compression import compress, decompress
from store.records import RawRecord

MAGIC = b"RTB1"
MIN_SPAN = 8
"""Bytes; shorter ones cost more in the table than they save."""

TOKENS, LOGPROBS = 0, 1
"""Kinds of spans."""

_HEADER = struct.Struct("<4sIIIIII")
"""Magic, flags, records, pieces, token count, bytes of the first block, bytes of the second."""
_WIDE = 1


_HIGH_PARTS = (np.arange(256, dtype="<u4")[:, None] >> np.array([0, 2, 4, 6], dtype="<u4") & 3) << 16
"""u32 [256, 4]: the high parts of the four tokens that share a byte."""


class Span(NamedTuple):
    """Bytes to be cut out of one record."""

    kind: int
    offset: int
    size: int


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
    pieces: list[tuple[int, int, int]] = []
    counts: list[int] = []
    for record in records:
        spans = find_spans(record.raw, decode_group(record.raw, record.schema))
        end = 0
        for kind, offset, size in (*spans, Span(TOKENS, len(record.raw), 0)):
            rest.append(record.raw[end:offset])
            columns[kind].append(record.raw[offset : offset + size])
            pieces.append((kind, offset - end, size))
            end = offset + size
        counts.append(len(spans) + 1)
    trees, positions, schemas, _ = zip(*records, strict=True)
    table = _table((trees, positions, schemas, counts)) + _table(zip(*pieces, strict=True))
    tokens = np.frombuffer(b"".join(columns[TOKENS]), dtype="<u4")
    wide = bool(tokens.size) and int(tokens.max()) >= 1 << 18
    first = compress(table + b"".join(rest))
    second = compress(tokens.tobytes() if wide else _narrow(tokens))
    header = _HEADER.pack(
        MAGIC, _WIDE * wide, len(records), len(pieces), tokens.size, len(first), len(second)
    )
    return b"".join((header, first, second, *columns[LOGPROBS]))


def unseal(blob: bytes) -> list[RawRecord]:
    """Return the records of a bundle, byte for byte; raises LogDamaged when it is not one."""
    try:
        return _splice(blob)
    except (struct.error, zstandard.ZstdError, ValueError, IndexError, MemoryError) as exc:
        raise LogDamaged(f"not a bundle: {blob[:16].hex()}… of {len(blob)} bytes ({exc})") from exc


def seal_checked(records: Sequence[RawRecord]) -> bytes | None:
    """Return the bundle, or None when there is nothing to seal or unsealing would not give the originals."""
    if not records:
        return None
    blob = seal(records)
    return blob if unseal(blob) == list(records) else None


def _splice(blob: bytes) -> list[RawRecord]:
    magic, flags, n_records, n_pieces, n_tokens, first, second = _HEADER.unpack_from(blob)
    if magic != MAGIC:
        raise ValueError(f"starts with {magic!r}, expected {MAGIC!r}")
    start = _HEADER.size
    rest = decompress(blob[start : start + first])
    packed = decompress(blob[start + first : start + first + second])
    tokens = packed if flags & _WIDE else _widen(packed, n_tokens)
    columns = (tokens, blob[start + first + second :])
    numbers = 4 * n_records + 3 * n_pieces
    table = struct.unpack_from(f"<{numbers}I", rest)
    at, taken = 4 * numbers, [0, 0]
    trees, positions, schemas, counts = _columns(table[: 4 * n_records], 4)
    pieces = zip(*_columns(table[4 * n_records :], 3), strict=True)
    raws: list[bytes] = []
    for count in counts:
        parts: list[bytes] = []
        for kind, gap, size in islice(pieces, count):
            parts.append(rest[at : at + gap])
            at += gap
            if size:
                offset = taken[kind]
                parts.append(columns[kind][offset : offset + size])
                taken[kind] = offset + size
        raws.append(b"".join(parts) if count > 1 else parts[0])
    if at != len(rest) or taken != [len(columns[TOKENS]), len(columns[LOGPROBS])]:
        raise ValueError(f"its pieces end at {at} of {len(rest)} bytes, its columns at {taken}")
    return list(map(RawRecord, trees, positions, schemas, raws))


def _columns(numbers: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    count = len(numbers) // width
    return [numbers[count * column : count * (column + 1)] for column in range(width)]


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


def _table(columns: Iterable[Sequence[int]]) -> bytes:
    """Return u32 columns, one after another."""
    return np.asarray(list(columns), dtype="<u4").tobytes()


def _narrow(tokens: NDArray[np.uint32]) -> bytes:
    high = np.zeros(-(-tokens.size // 4) * 4, dtype=np.uint8)
    high[: tokens.size] = tokens >> 16
    quarters = high.reshape(-1, 4)
    packed = quarters[:, 0] | quarters[:, 1] << 2 | quarters[:, 2] << 4 | quarters[:, 3] << 6
    return (tokens & 0xFFFF).astype("<u2").tobytes() + packed.tobytes()


def _widen(packed: bytes, count: int) -> bytes:
    tokens = np.frombuffer(packed, dtype="<u2", count=count).astype("<u4")
    high = np.frombuffer(packed, dtype=np.uint8, offset=2 * count)
    tokens |= _HIGH_PARTS[high].reshape(-1)[:count]
    return tokens.tobytes()
