"""Exact statistics over sets."""

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.sets import VECTOR_LIMIT, all_equal, make_sets, set_means, set_sums

VALUES = st.lists(
    st.tuples(st.integers(-3, 3), st.floats(-1e12, 1e12) | st.sampled_from([1.0, -0.1, 0.2, 1e-300])),
    max_size=60,
)


def by_id(pairs: list[tuple[int, float]]) -> dict[int, list[float]]:
    """Gather the values of each id with a plain dict, in ascending order of id."""
    gathered = defaultdict(list)
    for name, value in pairs:
        gathered[name].append(value)
    return dict(sorted(gathered.items()))


@given(VALUES)
def test_sums_are_fsum_to_the_bit(pairs: list[tuple[int, float]]) -> None:
    """Every set's sum is what math.fsum gives."""
    sets = make_sets(np.array([name for name, _ in pairs], dtype=np.int64))
    sums = set_sums(np.array([value for _, value in pairs]), sets)
    assert sums.tolist() == [math.fsum(values) for values in by_id(pairs).values()]


@given(VALUES)
def test_sets_partition_in_order(pairs: list[tuple[int, float]]) -> None:
    """Sets are numbered by ascending id, and hold each position once, in its given order."""
    ids = [name for name, _ in pairs]
    sets = make_sets(np.array(ids, dtype=np.int64))
    names = sorted(set(ids))
    assert sets.of.tolist() == [names.index(name) for name in ids]
    parts = [
        sets.order[start : start + size].tolist() for start, size in zip(sets.starts, sets.sizes, strict=True)
    ]
    assert parts == [[i for i, name in enumerate(ids) if name == wanted] for wanted in names]


@given(VALUES)
def test_means_and_equality(pairs: list[tuple[int, float]]) -> None:
    """A mean is fsum/n; where all values are equal it is the value, and the set says so."""
    sets = make_sets(np.array([name for name, _ in pairs], dtype=np.int64))
    values = np.array([value for _, value in pairs])
    for values_, mean, equal in zip(
        by_id(pairs).values(), set_means(values, sets), all_equal(values, sets), strict=True
    ):
        assert equal == (len(set(values_)) == 1)
        assert mean == (values_[0] if equal else math.fsum(values_) / len(values_))


def test_mean_of_equal_values_has_no_residue() -> None:
    """Eight times −0.1 has the mean −0.1, which sum/n misses by an ulp."""
    values = np.full(8, -0.1)
    assert sum(values.tolist()) / 8 != -0.1
    assert set_means(values, make_sets(np.zeros(8, dtype=np.int64))).tolist() == [-0.1]


@pytest.mark.parametrize("size", [VECTOR_LIMIT, VECTOR_LIMIT + 1, 500])
def test_large_sets_are_summed_like_small_ones(size: int) -> None:
    """Above the limit of the vectorised way the result is still fsum, beside small sets too."""
    numbers = np.random.default_rng(1).normal(size=size) * 10.0 ** np.arange(size).clip(max=20)
    values = np.concatenate([[0.1, 0.2], numbers])
    sums = set_sums(values, make_sets(np.array([9, 9] + [4] * size)))
    assert sums.tolist() == [math.fsum(numbers.tolist()), 0.1 + 0.2]


def test_sums_whose_error_terms_round_fall_back() -> None:
    """Three magnitudes at once cannot be held in two numbers; the exact sum is found all the same."""
    values = [1e100, 1.0, 1e-100, -1e100, 1e-100]
    assert set_sums(np.array(values), make_sets(np.zeros(5, dtype=np.int64))).tolist() == [math.fsum(values)]


def test_overflow_is_said() -> None:
    """A sum beyond the largest float raises, as math.fsum does."""
    with pytest.raises(OverflowError):
        set_sums(np.array([1e308, 1e308]), make_sets(np.zeros(2, dtype=np.int64)))
