"""Owns reward shaping, which stands between leaf table and estimator and is recorded in the plan only."""

from typing import Literal

import numpy as np

from core.advantage import LeafTable
from core.arrays import Float64
from core.sets import make_sets, set_means


def shape(name: Literal["base", "tree_diff"], table: LeafTable, *, margin: float = 0.1) -> Float64:
    """Return float64 [n]: the rewards that the estimator sees.

    "base" leaves them as recorded. With "tree_diff" a leaf gets the mean of v over the nodes of its path;
    in chain mode that is the recorded reward.
    """
    if name == "base":
        return table.rewards
    lengths = np.diff(table.path_starts)
    leaf = np.repeat(np.arange(len(lengths)), lengths)
    return set_means(node_values(table, margin=margin)[table.path_nodes], make_sets(leaf))


def node_values(table: LeafTable, *, margin: float = 0.1) -> Float64:
    """Return float64 [m]: v(n) = (m(n) + max(m(n) − m(parent) − margin, 0)) / √leaves(n).

    m is the mean reward of the members below; a first turn's parent is the tree's root, whose m is the
    mean of the tree (Tree-GRPO's `tree_diff`; TreeRL's local term with a margin).
    """
    lengths = np.diff(table.path_starts)
    leaf = np.repeat(np.arange(len(lengths)), lengths)
    below = make_sets(table.path_nodes)
    means = set_means(table.rewards[leaf], below)
    trees = make_sets(table.tree)
    parents = means[table.node_parent]
    first = table.path_nodes[table.path_starts[:-1]]
    parents[first] = set_means(table.rewards, trees)[trees.of]
    return (means + np.maximum(means - parents - margin, 0.0)) / np.sqrt(below.sizes)
