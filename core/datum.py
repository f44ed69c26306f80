"""Owns the datum: the arrays that a trainer is fed for one segment. It knows no SDK."""

from typing import NamedTuple

import numpy as np

from core.arrays import Bool, Float32, Float64, Int64
from core.digests import batch_digest, datum_digest
from core.errors import FoldError
from core.segments import Segment

__all__ = ["DatumArrays", "batch_digest", "build_datum", "datum_digest"]


class DatumArrays(NamedTuple):
    """One training example: token i of `inputs` predicts token i of `targets`."""

    inputs: Int64
    """int64 [n]: the segment without its last token."""
    targets: Int64
    """int64 [n]: the segment without its first token."""
    logprobs: Float32
    """float32 [n]: of the targets, at sampling time; 0 where not trained."""
    advantages: Float32
    """float32 [n]; 0 where not trained."""


def build_datum(
    segment: Segment, token_advantages: Float64, trained: Bool | None = None, *, scale: float = 1.0
) -> DatumArrays:
    """Return the datum of a segment of n + 1 tokens, everything shifted by one place.

    `token_advantages` is float64 [n + 1]; times `scale` it is rounded to float32 here and nowhere else.
    `trained` is bool per node of the path: False leaves out turns that another datum trains. Raises
    FoldError on arrays of unequal lengths, or too short to be shifted.
    """
    length = len(segment.tokens)
    sizes = [length, len(segment.logprobs), len(token_advantages)]
    if length < 2 or len(set(sizes)) != 1:
        raise FoldError(f"datum from tokens, logprobs, advantages of lengths {sizes}: expected equal, >= 2")
    logprobs = np.zeros(length, dtype=np.float32)
    advantages = np.zeros(length, dtype=np.float32)
    for turn in segment.turns:
        if trained is None or trained[turn.step]:
            part = slice(turn.start, turn.stop)
            logprobs[part] = segment.logprobs[part]
            advantages[part] = token_advantages[part] * scale
    tokens = segment.tokens.astype(np.int64)
    return DatumArrays(tokens[:-1], tokens[1:], logprobs[1:], advantages[1:])
