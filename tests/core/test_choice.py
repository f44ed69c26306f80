"""Counter-based draws and what is made of them."""

import numpy as np
import pytest

from core.choice import draw, order, subset, uniform, weighted


def test_draws_are_fixed_by_their_key() -> None:
    """The same key gives the same draws; a longer draw extends a shorter one."""
    assert np.array_equal(draw(1, "a", 2, count=9)[:4], draw(1, "a", 2, count=4))
    assert not np.array_equal(draw(1, "a", 2, count=4), draw(2, "a", 2, count=4))
    assert not np.array_equal(draw(1, "a", 2, count=4), draw(1, "a2", count=4))


def test_draws_never_change_between_releases() -> None:
    """A recorded run's choices are re-derived from these numbers, so they are pinned."""
    assert draw(0, "pin", count=3).tolist() == PINNED


PINNED = [0.380017815769887, 0.9628885358379327, 0.8050157848540717]


def test_no_draws_are_an_empty_array() -> None:
    """Nothing to choose from needs no draw."""
    assert draw(1, "a", count=0).shape == (0,)
    assert subset(draw(1, "a", count=0), 3) == ()


def test_draws_look_uniform() -> None:
    """Mean 1/2 and variance 1/12 within six standard errors; the deciles are filled evenly."""
    values = draw(5, "uniform", count=100_000)
    assert values.min() >= 0
    assert values.max() < 1
    assert values.mean() == pytest.approx(0.5, abs=6 * (1 / 12 / 100_000) ** 0.5)
    assert values.var() == pytest.approx(1 / 12, abs=0.001)
    assert np.bincount((values * 10).astype(int)).min() > 9_500


def test_order_is_a_permutation() -> None:
    """Every position once, by ascending draw."""
    assert order(np.array([0.5, 0.1, 0.9, 0.1])).tolist() == [1, 3, 0, 2]


def test_subset_is_ascending_and_whole_when_fewer() -> None:
    """The lowest draws win; their positions come back in order."""
    draws = np.array([0.5, 0.1, 0.9, 0.2])
    assert subset(draws, 2) == (1, 3)
    assert subset(draws, 9) == (0, 1, 2, 3)


def test_subset_is_fair() -> None:
    """Each of five things is in a subset of two in 2/5 of the cases."""
    counts = np.zeros(5)
    for trial in range(4_000):
        counts[list(subset(draw(9, "fair", trial, count=5), 2))] += 1
    assert counts == pytest.approx(1_600, abs=6 * (4_000 * 0.4 * 0.6) ** 0.5)


def test_uniform_splits_the_unit_interval() -> None:
    """Equal stretches, the last one closed by rounding."""
    assert uniform(np.array([0.0, 0.33, 0.34, 0.999999]), 3).tolist() == [0, 0, 1, 2]


def test_weighted_splits_by_exp_of_log_weights() -> None:
    """Weights 1 and 3: the border is at 1/4."""
    assert weighted(np.array([0.0, 0.2499, 0.2501, 0.9999]), [0.0, np.log(3)]) == (0, 0, 1, 1)
