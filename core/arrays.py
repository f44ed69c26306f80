"""Owns the one way in which numbers stand inside events: raw little-endian bytes, viewed by numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

TOKEN_DTYPE = np.dtype("<i4")
LOGPROB_DTYPE = np.dtype("<f4")


def pack_tokens(tokens: Sequence[int] | Int32 | Int64) -> bytes:
    """Return int32 little-endian bytes; raises OverflowError when an id does not fit."""
    array = np.asarray(tokens)
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise OverflowError(f"token ids out of range: {array.min()!r}..{array.max()!r}")
    return array.astype(TOKEN_DTYPE).tobytes()


def pack_logprobs(logprobs: Sequence[float] | Float32) -> bytes:
    """Return float32 little-endian bytes, exact for float32 input; raises OverflowError past its range."""
    try:
        with np.errstate(over="raise"):
            return np.asarray(logprobs, dtype=LOGPROB_DTYPE).tobytes()
    except FloatingPointError as error:
        raise OverflowError("a logprob is beyond what a float32 holds") from error


def view_tokens(raw: bytes) -> Int32:
    """Return a read-only int32 [n] view of stored token bytes."""
    return np.frombuffer(raw, dtype=TOKEN_DTYPE)


def view_logprobs(raw: bytes) -> Float32:
    """Return a read-only float32 [n] view of stored logprob bytes."""
    return np.frombuffer(raw, dtype=LOGPROB_DTYPE)
