"""Owns exact statistics over sets of numbers, vectorised over all sets of a step.

A sum is what math.fsum gives, the exact sum rounded once, so that no order of the values can change a bit.
A mean is that sum divided by the count; the mean of equal values is the value itself.
"""

import math
from typing import NamedTuple

import numpy as np

from core.arrays import Bool, Float64, Int64

VECTOR_LIMIT = 64
"""Sets up to this size are summed position by position, all sets at once; larger ones by math.fsum."""


class Sets(NamedTuple):
    """A partition of n values into k non-empty sets, numbered by ascending id."""

    order: Int64
    """int64 [n]: value positions, set by set, in their given order inside a set."""
    starts: Int64
    """int64 [k]: where each set begins in `order`."""
    sizes: Int64
    """int64 [k]."""
    of: Int64
    """int64 [n]: the set of each value."""


def make_sets(ids: Int64) -> Sets:
    """Return the partition that gathers equal ids; `ids` is int64 [n], any values."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    firsts = np.ones(len(ids), dtype=np.bool_)
    firsts[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(firsts)
    sizes = np.diff(starts, append=len(ids))
    of = np.empty(len(ids), dtype=np.int64)
    of[order] = np.cumsum(firsts) - 1
    return Sets(order, starts, sizes, of)


def all_equal(values: Float64, sets: Sets) -> Bool:
    """Return bool [k]: whether all values of a set are equal (true for a set of one)."""
    ordered = values[sets.order]
    differs = np.zeros(len(ordered), dtype=np.int64)
    differs[1:] = ordered[1:] != ordered[:-1]
    differs[sets.starts] = 0
    running = np.cumsum(differs)
    return np.asarray(running[sets.starts + sets.sizes - 1] == running[sets.starts])


def set_means(values: Float64, sets: Sets) -> Float64:
    """Return float64 [k]: fsum/n per set, or the common value where all are equal."""
    means = set_sums(values, sets) / sets.sizes
    equal = all_equal(values, sets)
    means[equal] = values[sets.order[sets.starts[equal]]]
    return means


def set_sums(values: Float64, sets: Sets) -> Float64:
    """Return float64 [k]: math.fsum of each set. Raises OverflowError where math.fsum does.

    Running sum and error term are kept apart (Knuth's two-sum); as long as the error terms themselves add
    up without error, their one final addition is the correctly rounded sum. Other sets go to math.fsum.
    """
    ordered = values[sets.order]
    # Largest first, so that the sets which still have a value at some position are a prefix.
    by_size = np.argsort(-sets.sizes, kind="stable")
    sizes = sets.sizes[by_size]
    starts = sets.starts[by_size]
    high = np.zeros(len(sizes))
    low = np.zeros(len(sizes))
    inexact = sizes > VECTOR_LIMIT
    first = int(inexact.sum())
    with np.errstate(over="ignore", invalid="ignore"):
        for position in range(int(sizes[first]) if first < len(sizes) else 0):
            last = int(np.searchsorted(-sizes, -position, side="left"))
            part = slice(first, last)
            high[part], error = _two_sum(high[part], ordered[starts[part] + position])
            low[part], lost = _two_sum(low[part], error)
            inexact[part] |= lost != 0
        total = high + low
    for index in np.flatnonzero(inexact):
        begin = int(starts[index])
        total[index] = math.fsum(ordered[begin : begin + int(sizes[index])].tolist())
    sums = np.empty(len(sizes))
    sums[by_size] = total
    return sums


def _two_sum(left: Float64, right: Float64) -> tuple[Float64, Float64]:
    """Return left + right rounded, and exactly what the rounding lost."""
    total = left + right
    shadow = total - left
    return total, (left - (total - shadow)) + (right - shadow)
