"""Owns the estimators: pure functions from a table of leaves to credit, defined in docs/estimators.md.

float64 throughout. A set is tested for equal rewards on the rewards themselves, so that a set without
signal gives exactly 0 and never the residue of a rounded mean.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from core.arrays import Bool, Float64, Int64
from core.errors import EstimatorError, RewardError
from core.ids import NodeId
from core.sets import Sets, all_equal, make_sets, set_means, set_sums
from core.tree import Trajectory

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it (Tree-GRPO, veRL)."""

ROOT = -1
"""`node_parent` of a first turn."""


class LeafTable(NamedTuple):
    """What an estimator sees: the members of a step in training order, and the shape of their trees."""

    rewards: Float64
    """float64 [n]."""
    uid: Int64
    """int64 [n]: which question's group a leaf belongs to."""
    tree: Int64
    """int64 [n]: which tree; unique over the whole step, not only inside a group."""
    path_starts: Int64
    """int64 [n + 1]: leaf i's path is path_nodes[path_starts[i] : path_starts[i + 1]]."""
    path_nodes: Int64
    """int64 [p]: node numbers from the root to the leaf. Leaves that share a prefix share its numbers."""
    node_parent: Int64
    """int64 [m]: parent of each node, -1 for a first turn. Only nodes above members are numbered."""
    names: tuple[str, ...] = ()
    """`<uid>/t<tree>/<leaf>` per leaf, for messages."""
    recorded: Float64 | None = None
    """float64 [n]: the rewards before shaping, where `rewards` are shaped."""
    node_rewards: Float64 | None = None
    """float64 [m]: what the scorer gave each node (scope `node`), NaN where nothing; None if none has any."""

    def ids(self, group_by: str) -> Int64:
        """Return int64 [n]: the ids that gather a question's leaves, `uid` or (tree_uid) `tree`."""
        return self.tree if group_by == "tree_uid" else self.uid

    def without_signal(self, sets: Sets) -> Bool:
        """Return bool [n]: leaves in sets whose rewards, as recorded, are all equal (sets of one too).

        Shaping sees the shape of a tree: it makes different numbers of rewards that say nothing.
        """
        return all_equal(self.rewards if self.recorded is None else self.recorded, sets)[sets.of]

    def name(self, leaf: int) -> str:
        """Return how messages call a leaf."""
        return self.names[leaf] if self.names else f"number {leaf}"


class EstimatorOptions(NamedTuple):
    """The parameters that every estimator gets."""

    singleton: Literal["zero", "raw"] = "zero"
    """What a set of one is worth: 0, or what veRL and Tree-GRPO give it."""
    group_by: Literal["uid", "tree_uid"] = "uid"


Estimator = Callable[[LeafTable, EstimatorOptions], Float64]
"""Returns float64 [n], one number per leaf, or float64 [p], one per node of each leaf's path."""


class Advantages(NamedTuple):
    """What an estimator found, per leaf and spread over its path."""

    leaf: Float64
    """float64 [n]; for an estimator that credits nodes, the mean over the nodes of the path."""
    entries: Float64
    """float64 [p]: one per node of each leaf's path."""
    starts: Int64
    """int64 [n + 1]: leaf i's values are entries[starts[i] : starts[i + 1]]."""

    def path(self, leaf: int) -> Float64:
        """Return float64 [depth]: the advantage of each node on the leaf's path, root first."""
        return self.entries[self.starts[leaf] : self.starts[leaf + 1]]


def leaf_table(members: Sequence[Trajectory]) -> LeafTable:
    """Return the table of `members`, in their order; raises RewardError for a reward that is not finite."""
    uids: dict[str, int] = {}
    trees: dict[tuple[str, int], int] = {}
    nodes: dict[tuple[str, int, NodeId], int] = {}
    parents: list[int] = []
    dense: list[float] = []
    starts = [0]
    path_nodes: list[int] = []
    for member in members:
        uid = member.group.uid
        uids.setdefault(uid, len(uids))
        trees.setdefault((uid, member.tree), len(trees))
        above = ROOT
        for step in member.path:
            key = (uid, member.tree, step.node)
            if key not in nodes:
                nodes[key] = len(parents)
                parents.append(above)
                dense.append(math.nan if step.node_reward is None else step.node_reward.value)
            above = nodes[key]
            path_nodes.append(above)
        starts.append(len(path_nodes))
    rewards = [np.nan if member.reward is None else member.reward for member in members]
    table = LeafTable(
        rewards=np.array(rewards, dtype=np.float64),
        uid=np.array([uids[member.group.uid] for member in members], dtype=np.int64),
        tree=np.array([trees[member.group.uid, member.tree] for member in members], dtype=np.int64),
        path_starts=np.array(starts, dtype=np.int64),
        path_nodes=np.array(path_nodes, dtype=np.int64),
        node_parent=np.array(parents, dtype=np.int64),
        names=tuple(f"{member.tree_uid}/{member.leaf}" for member in members),
        node_rewards=None if all(map(math.isnan, dense)) else np.array(dense, dtype=np.float64),
    )
    check_rewards(table)
    return table


def check_rewards(table: LeafTable) -> None:
    """Raise RewardError naming the first leaf whose reward is not a finite number."""
    bad = np.flatnonzero(~np.isfinite(table.rewards))
    if bad.size:
        leaf = int(bad[0])
        raise RewardError(
            f"leaf {table.name(leaf)}: reward {float(table.rewards[leaf])!r}, expected a finite number; "
            "correct the scorer, or end such a trajectory void"
        )


def estimate(
    name: str,
    table: LeafTable,
    *,
    singleton: Literal["zero", "raw"] = "zero",
    group_by: Literal["uid", "tree_uid"] = "uid",
    user: Estimator | None = None,
) -> Advantages:
    """Return the advantages that estimator `name` finds; `user` is its function when it is not one of ours.

    Raises RewardError (a reward that is not finite) or EstimatorError (an unknown name, unusable numbers).
    """
    check_rewards(table)
    function = user or ESTIMATORS.get(name)
    if function is None:
        raise EstimatorError(_unknown(name))
    lengths = np.diff(table.path_starts)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.asarray(function(table, EstimatorOptions(singleton, group_by)), dtype=np.float64)
    except OverflowError as error:
        raise EstimatorError(f"estimator {name!r}: rewards too large to be summed ({error})") from error
    except Exception as error:
        if user is None:
            raise
        raise EstimatorError(f"estimator {name!r} failed: {error!r}; mend it and go on") from error
    if found.shape not in {table.rewards.shape, table.path_nodes.shape}:
        raise EstimatorError(
            f"estimator {name!r} returned shape {found.shape!r}, expected {table.rewards.shape!r} (per leaf) "
            f"or {table.path_nodes.shape!r} (per node of each path)"
        )
    per_leaf = found.shape == table.rewards.shape
    entries = np.repeat(found, lengths) if per_leaf else found
    owner = np.repeat(np.arange(len(lengths)), lengths)
    bad = np.flatnonzero(~np.isfinite(entries))
    if bad.size:
        raise EstimatorError(
            f"estimator {name!r} gave leaf {table.name(int(owner[bad[0]]))} the advantage "
            f"{float(entries[bad[0]])!r}, expected a finite number"
        )
    leaf = found if per_leaf else set_means(entries, make_sets(owner))
    return Advantages(leaf, entries, table.path_starts)


def stretch_starts(table: LeafTable) -> Bool:
    """Return bool [p]: whether a stretch begins at this node of a path.

    One begins at a first turn and after every node that several members' paths leave differently.
    """
    below = np.bincount(table.node_parent[table.node_parent != ROOT], minlength=len(table.node_parent))
    parent = table.node_parent[table.path_nodes]
    return np.asarray((parent == ROOT) | (below[parent] > 1))


def check_estimator(name: str) -> None:
    """Raise EstimatorError unless `name` is one of ours or names user code (`module:function`)."""
    if name not in ESTIMATORS and ":" not in name:
        raise EstimatorError(_unknown(name))


def _unknown(name: str) -> str:
    if ":" in name:
        return f"estimator {name!r} is user code that was not loaded; allow it by name"
    close = difflib.get_close_matches(name, list(ESTIMATORS), n=1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    return f"unknown estimator {name!r}{hint}; known: {', '.join(ESTIMATORS)}, or module:function"


def _group_mean(table: LeafTable, options: EstimatorOptions) -> Float64:
    """Return R_i − mean (Search-R1 on PyTRIO)."""
    return _deviations(table, make_sets(table.ids(options.group_by)))


def _grpo(table: LeafTable, options: EstimatorOptions) -> Float64:
    """Return z over the question (GRPO; Tree-GRPO's inter-tree part)."""
    return _z_scores(table.rewards, table, make_sets(table.ids(options.group_by)), options)


def _rloo(table: LeafTable, options: EstimatorOptions) -> Float64:
    """Return R_i − mean of the others, which is (R_i − mean) n/(n − 1)."""
    sets = make_sets(table.ids(options.group_by))
    sizes = sets.sizes[sets.of]
    alone = table.rewards if options.singleton == "raw" else np.zeros_like(table.rewards)
    return np.where(sizes == 1, alone, _deviations(table, sets) * (sizes / np.maximum(sizes - 1, 1)))


def _tree(table: LeafTable, options: EstimatorOptions) -> Float64:
    """Return z over the question + z over the tree (Tree-GRPO)."""
    return _grpo(table, options) + _tree_intra(table, options)


def _tree_intra(table: LeafTable, options: EstimatorOptions) -> Float64:
    """Return z over the tree."""
    return _z_scores(table.rewards, table, make_sets(table.tree), options)


def _tree_2norm(table: LeafTable, options: EstimatorOptions) -> Float64:
    """Return z over the tree, of the z over the question."""
    return _z_scores(_grpo(table, options), table, make_sets(table.tree), options)


def _node(table: LeafTable, options: EstimatorOptions) -> Float64:
    """Return V(stretch) − V(parent stretch), per node of each path."""
    sets = make_sets(table.ids(options.group_by))
    baseline = set_means(table.rewards, sets)[sets.of]
    begins = stretch_starts(table)
    lengths = np.diff(table.path_starts)
    leaf = np.repeat(np.arange(len(lengths)), lengths)[begins]
    stretches = make_sets(table.path_nodes[begins])
    values = set_means(table.rewards[leaf], stretches)[stretches.of]
    above = np.empty_like(values)
    above[1:] = values[:-1]
    at_root = np.ones(len(leaf), dtype=np.bool_)
    at_root[1:] = leaf[1:] != leaf[:-1]
    above[at_root] = baseline[leaf[at_root]]
    credit = np.where(table.without_signal(sets)[leaf], 0.0, values - above)
    return np.asarray(credit[np.cumsum(begins) - 1])


def _deviations(table: LeafTable, sets: Sets) -> Float64:
    """Return R_i − mean over its set; exactly 0 in sets without signal."""
    deviations = table.rewards - set_means(table.rewards, sets)[sets.of]
    deviations[table.without_signal(sets)] = 0.0
    return deviations


def _z_scores(values: Float64, table: LeafTable, sets: Sets, options: EstimatorOptions) -> Float64:
    """Return (v − mean)/(std + ε), std with n − 1; exactly 0 in sets without signal."""
    deviations = values - set_means(values, sets)[sets.of]
    spread = np.sqrt(set_sums(deviations * deviations, sets) / np.maximum(sets.sizes - 1, 1))
    scores = deviations / (spread + EPSILON)[sets.of]
    scores[table.without_signal(sets)] = 0.0
    if options.singleton == "raw":
        alone = (sets.sizes == 1)[sets.of]
        scores[alone] = values[alone] / (1.0 + EPSILON)
    return scores


ESTIMATORS: Mapping[str, Estimator] = {
    "group_mean": _group_mean,
    "grpo": _grpo,
    "rloo": _rloo,
    "tree": _tree,
    "tree_intra": _tree_intra,
    "tree_2norm": _tree_2norm,
    "node": _node,
}
"""Estimator name → function. Users add their own as `module:function`."""
