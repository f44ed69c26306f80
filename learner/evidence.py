"""Owns the evidence inside a plan: marks that name an altered record, sums that name an altered value.

Two sums over a row, of v_i and of (i + 1) v_i, both modulo 2^64, are shifted by d and (i + 1) d when one
value changes by d. So they give back the offset and the original value of a single alteration, for 16
bytes a row, whatever its length. They only suggest; a recorded SHA-256 digest proves.
"""

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.arrays import Float32, Float64
from core.datum import DatumArrays
from core.events import PlanEvidence
from store.ports import GroupRecord

UInt64 = NDArray[np.uint64]
MARK_BYTES = 4
SUM_BYTES = 16
WORD = 1 << 64


class Located(NamedTuple):
    """One altered value: where it is, and what the plan's sums say it was (integer view)."""

    offset: int
    recorded: int


def record_marks(records: Iterable[GroupRecord]) -> bytes:
    """Return the marks of a group's records in key order, 4 bytes each."""
    return b"".join(hashlib.sha256(record.raw).digest()[:MARK_BYTES] for record in records)


def token_view(datum: DatumArrays) -> UInt64:
    """Return the token ids of the whole segment, uint64 [n + 1]."""
    return np.concatenate((datum.inputs[:1], datum.targets)).view(np.uint64)


def float_view(values: Float32) -> UInt64:
    """Return the bits of float32 values, uint64 [n]."""
    return values.view(np.uint32).astype(np.uint64)


def reward_view(rewards: Float64) -> UInt64:
    """Return the byte-swapped bits of float64 values, uint64 [n].

    Swapped, because round rewards differ in their highest bits only, and sums modulo 2^64 of multiples
    of 2^62 could not tell one offset from another.
    """
    return np.ascontiguousarray(rewards, dtype="<f8").view("<u8").byteswap().astype(np.uint64)


def unview_reward(value: int) -> float:
    """Return the float64 whose `reward_view` is `value`."""
    return float(np.array([value], dtype="<u8").byteswap().view("<f8")[0])


def unview_float(value: int) -> float:
    """Return the float32 whose bits are `value`, as a Python float."""
    return float(np.array([value], dtype=np.uint32).view(np.float32)[0])


def sums(values: UInt64) -> bytes:
    """Return the two sums of a row, u64 little-endian each."""
    plain = int(values.sum(dtype=np.uint64))
    weighted = int(values @ _places(len(values)))
    return plain.to_bytes(8, "little") + weighted.to_bytes(8, "little")


def _places(length: int) -> UInt64:
    """Return 1, 2 .. length, uint64."""
    return _many_places(length.bit_length())[:length]


@functools.cache
def _many_places(bits: int) -> UInt64:
    return np.arange(1, 1 << bits, dtype=np.uint64)


def collect(keys: Sequence[str], datums: Sequence[DatumArrays], rewards: Float64) -> PlanEvidence:
    """Return the evidence of a step: `keys` name the datums, `rewards` are the members' in order."""
    return PlanEvidence(
        keys=tuple(keys),
        tokens=b"".join(sums(token_view(datum)) for datum in datums),
        logprobs=b"".join(sums(float_view(datum.logprobs)) for datum in datums),
        advantages=b"".join(sums(float_view(datum.advantages)) for datum in datums),
        rewards=sums(reward_view(rewards)),
    )


def row(packed: bytes, position: int) -> bytes:
    """Return the sums of one row of a packed column."""
    return packed[position * SUM_BYTES : (position + 1) * SUM_BYTES]


def _pair(packed: bytes) -> tuple[int, int]:
    return int.from_bytes(packed[:8], "little"), int.from_bytes(packed[8:], "little")


def locate(recorded: bytes, derived: UInt64) -> list[Located]:
    """Return the single alterations of `derived` that would explain the recorded sums.

    Empty when the sums are equal, or when no change of one value explains them.
    """
    plain, weighted = (
        (old - new) % WORD for old, new in zip(_pair(recorded), _pair(sums(derived)), strict=True)
    )
    if plain == 0:
        return []
    hits = np.flatnonzero(_places(len(derived)) * np.uint64(plain) == np.uint64(weighted))
    return [Located(int(hit), (int(derived[hit]) + plain) % WORD) for hit in hits]


def constant(recorded: bytes, trained: NDArray[np.bool_]) -> int | None:
    """Return the one value that all trained places (bool [n]) had, if the recorded sums allow one.

    Untrained places are 0. None when no single value explains both sums.
    """
    places = np.flatnonzero(trained) + 1
    plain, weighted = _pair(recorded)
    if len(places) == 0 or plain % len(places):
        return None
    value = plain // len(places)
    return value if value * int(places.sum()) % WORD == weighted else None
