"""Owns the expansion policies: which nodes of a tree are continued once more.

A policy is a pure function of the tree, so that the same recorded tree always grows in the same way. It
sees a tree whose branches have all ended and been scored.
"""

from collections.abc import Callable, Collection, Sequence
from math import fsum
from typing import NamedTuple, cast

from core.arrays import Float64, view_logprobs
from core.choice import order, uniform, weighted
from core.errors import ConfigError
from core.ids import NodeId
from core.nodes import Tree
from rollout.usercode import load_function


class Expansion(NamedTuple):
    """What a policy chooses."""

    nodes: tuple[NodeId | None, ...]
    """One per expansion, with repeats; None is the root."""
    scores: tuple[float, ...] = ()
    """One per candidate, recorded so that the choice can be audited; may be empty."""


ExpandPolicy = Callable[[Tree, Sequence[NodeId | None], int, Float64], Expansion]
"""(tree, candidates in node order with the root first, number of expansions, draws) -> Expansion.

Draws are float64 [expansions + candidates] in [0, 1): the only randomness that a policy may use.
"""


def expand_policy(spec: str, tau: float, allow_code: Collection[str] = ()) -> ExpandPolicy:
    """Return the policy `spec`: random, uncertainty, value, or a user's `module:function`.

    Raises CodeNotAllowed when user code is not allowed by name, ConfigError when it cannot be had.
    """
    if spec == "random":
        return choose_random
    if spec == "uncertainty":
        return lambda tree, candidates, count, draws: choose_uncertain(
            tree, candidates, count, draws, tau=tau
        )
    if spec == "value":
        return choose_by_value
    return _user_policy(spec, allow_code)


def choose_random(tree: Tree, candidates: Sequence[NodeId | None], count: int, draws: Float64) -> Expansion:
    """Choose uniformly, with replacement: Tree-GRPO's own way."""
    del tree
    return Expansion(tuple(candidates[place] for place in uniform(draws[:count], len(candidates))))


def choose_uncertain(
    tree: Tree, candidates: Sequence[NodeId | None], count: int, draws: Float64, *, tau: float
) -> Expansion:
    """Draw ∝ softmax(-score / τ); a score is the minimum over a node's children of the mean logprob."""
    scores = tuple(_least_confidence(tree, candidate) for candidate in candidates)
    places = weighted(draws[:count], [-score / tau for score in scores])
    return Expansion(tuple(candidates[place] for place in places), scores)


def choose_by_value(tree: Tree, candidates: Sequence[NodeId | None], count: int, draws: Float64) -> Expansion:
    """Take the nodes below which the rewards vary most, each once, then round again; ties are drawn."""
    scores = tuple(_reward_variance(tree, candidate) for candidate in candidates)
    shuffled = [int(place) for place in order(draws[count:])]
    ranked = sorted(shuffled, key=lambda place: -scores[place])
    return Expansion(tuple(candidates[ranked[i % len(ranked)]] for i in range(count)), scores)


def _least_confidence(tree: Tree, node: NodeId | None) -> float:
    return min((_mean_logprob(child.sample.sampled_logprobs) for child in tree.children(node)), default=0.0)


def _mean_logprob(raw: bytes) -> float:
    logprobs = view_logprobs(raw)
    return fsum(map(float, logprobs)) / len(logprobs) if len(logprobs) else 0.0


def _reward_variance(tree: Tree, node: NodeId | None) -> float:
    """Return the population variance of the rewards below `node`, 0 for fewer than two scored leaves."""
    rewards = [
        leaf.reward.value
        for leaf in tree.leaves()
        if leaf.reward is not None
        and (node is None or any(step.node == node for step in tree.path(leaf.node)))
    ]
    if len(rewards) < 2 or len(set(rewards)) == 1:
        return 0.0
    mean = fsum(rewards) / len(rewards)
    return fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)


def _user_policy(spec: str, allow_code: Collection[str]) -> ExpandPolicy:
    if ":" not in spec:
        raise ConfigError(
            f"unknown expansion policy {spec!r}, expected random, uncertainty, value or module:function"
        )
    function = cast("ExpandPolicy", load_function(spec, allow_code))

    def policy(tree: Tree, candidates: Sequence[NodeId | None], count: int, draws: Float64) -> Expansion:
        try:
            nodes, scores = function(tree, candidates, count, draws)
            return Expansion(tuple(nodes), tuple(map(float, scores)))
        except Exception as error:  # user code may raise anything
            raise ConfigError(f"expansion policy {spec!r} failed: {error!r}; mend it and go on") from error

    return policy
