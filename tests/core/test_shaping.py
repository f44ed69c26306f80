"""Reward shaping."""

import math

import numpy as np
import pytest
from hypothesis import given

from core.advantage import leaf_table
from core.shaping import node_values, shape
from core.tree import Trajectory, members
from tests.building import bush
from tests.strategies import PLAIN, steps

REWARDS = (1.0, 0.0, 0.5, -0.5)
"""Tree mean 0.25; the shared turn 0.0.0 has three leaves below it, mean 0.5."""


def test_base_leaves_rewards_alone() -> None:
    """Without shaping the estimator sees what was recorded."""
    group, chosen = bush(REWARDS).scored()
    assert shape("base", leaf_table(members(group, chosen))).tolist() == list(REWARDS)


@pytest.mark.parametrize(
    ("margin", "bonus"),
    [
        # 0.5 − 0.25 above the tree's mean, 1 − 0.5 above the shared turn; the others are at or below it.
        (0.1, (0.15, 0.4)),
        (0.3, (0.0, 0.2)),
        (0.0, (0.25, 0.5)),
    ],
)
def test_tree_diff_by_hand(margin: float, bonus: tuple[float, float]) -> None:
    """Per node v = (m + max(m − m(parent) − margin, 0))/√leaves; a leaf gets its path's mean."""
    group, chosen = bush(REWARDS).scored()
    table = leaf_table(members(group, chosen))
    shared = (0.5 + bonus[0]) / math.sqrt(3)
    expected_nodes = [shared, 1.0 + bonus[1], 0.0, 0.5, -0.5]
    np.testing.assert_allclose(node_values(table, margin=margin), expected_nodes, rtol=0, atol=1e-15)
    expected = [(shared + 1.0 + bonus[1]) / 2, shared / 2, (shared + 0.5) / 2, -0.5]
    np.testing.assert_allclose(shape("tree_diff", table, margin=margin), expected, rtol=0, atol=1e-15)


@given(everyone=steps(PLAIN._replace(mode="chain")))
def test_tree_diff_changes_no_chain(everyone: tuple[Trajectory, ...]) -> None:
    """A chain's nodes all have its reward, so that it is unchanged to the bit, whatever its length."""
    table = leaf_table(everyone)
    assert shape("tree_diff", table).tolist() == table.rewards.tolist()
