"""Owns every random choice of a run: counter-based draws keyed by what is chosen, never by when.

A draw is Philox-4x64 output under a key made of the run seed and of names for the choice. Only the
generator's raw words are used, whose values its algorithm fixes, so that no release of numpy can change
a choice.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from core.arrays import Float64, Int64


def draw(seed: int, *names: str | int, count: int) -> Float64:
    """Return float64 [count] in [0, 1), fixed by seed and names; longer draws extend shorter ones."""
    text = "\0".join(("rolltape.choice.v1", str(seed), *(str(name) for name in names)))
    key = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], dtype="<u8").astype(np.uint64)
    words = np.asarray(np.random.Philox(key=key).random_raw(count), dtype=np.uint64)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def order(draws: Float64) -> Int64:
    """Return int64 [n]: a uniform permutation, the order that sorts the draws (equal ones keep theirs)."""
    return np.argsort(draws, kind="stable").astype(np.int64)


def subset(draws: Float64, count: int) -> tuple[int, ...]:
    """Return `count` of the positions 0..n-1 without replacement, ascending; all of them when fewer."""
    return tuple(sorted(int(position) for position in order(draws)[:count]))


def uniform(draws: Float64, things: int) -> Int64:
    """Return int64 [n]: one position in 0..things-1 per draw, with replacement."""
    return np.minimum((draws * things).astype(np.int64), things - 1)


def weighted(draws: Float64, log_weights: Sequence[float]) -> tuple[int, ...]:
    """Return one position per draw, with replacement, with probability ∝ exp(log_weight)."""
    logs = np.asarray(log_weights, dtype=np.float64)
    cumulative = np.cumsum(np.exp(logs - logs.max()))
    places = np.searchsorted(cumulative, draws * cumulative[-1], side="right")
    return tuple(int(place) for place in np.minimum(places, len(logs) - 1))
