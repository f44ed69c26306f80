"""The expansion policies, with hand-computed scores."""

import re
from collections.abc import Sequence
from math import exp
from pathlib import Path

import numpy as np
import pytest

from core.arrays import Float64
from core.choice import draw
from core.errors import CodeNotAllowed, ConfigError
from core.events import GroupEvent
from core.ids import NodeId
from core.nodes import Tree
from rollout.expand import ExpandPolicy, Expansion, expand_policy
from tests.rollout.support import asked, chosen, ended, folded, sampled, step, tree_plan

CANDIDATES = (None, NodeId("0.0.0"))


def grown(*tail: GroupEvent) -> Tree:
    """Return a tree with two scored leaves below 0.0.0 and one below the root only."""
    events = [
        *step("0.0.0", None, logprob=-0.25),
        sampled("0.0.1", "0.0.0", logprob=-1.0),
        *ended("0.0.1", 1.0),
        chosen(1, "0.0.0", None),
        sampled("1.0.1", "0.0.0", logprob=-2.0),
        *ended("1.0.1", 0.0),
        sampled("1.1.0", None, logprob=-0.5),
        *ended("1.1.0", 1.0),
        *tail,
    ]
    return folded(asked(tree_plan(n=2, l=2)), [events]).trees[1]


def last_user_policy(
    tree: Tree, candidates: Sequence[NodeId | None], count: int, draws: Float64
) -> Expansion:
    """Choose the last candidate, as a user's own policy may."""
    return Expansion((candidates[-1],) * count, tuple(float(i) for i in range(len(candidates))))


NOT_A_POLICY = 3


def test_random_draws_uniformly_with_replacement() -> None:
    """U in [0, 1/2) is the first of two candidates, the rest the second."""
    draws = np.array([0.0, 0.49, 0.5, 0.99, 0.1, 0.1])
    choice = expand_policy("random", 1.0)(grown(), CANDIDATES, 4, draws)
    assert choice == Expansion((None, None, "0.0.0", "0.0.0"))


def test_uncertainty_scores_are_the_least_confident_child() -> None:
    """Root: min(-0.25, -0.5) = -0.5 is its child 1.1.0; node 0.0.0: min(-1, -2) = -2."""
    choice = expand_policy("uncertainty", 1.0)(grown(), CANDIDATES, 1, np.zeros(3))
    assert choice.scores == (-0.5, -2.0)


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_uncertainty_draws_by_softmax_of_minus_score_over_tau(tau: float) -> None:
    """P(root) = e^(0.5/τ) / (e^(0.5/τ) + e^(2/τ)): draws below it give the root, others 0.0.0."""
    share = exp(0.5 / tau) / (exp(0.5 / tau) + exp(2 / tau))
    draws = np.array([0.0, share - 1e-9, share + 1e-9, 1 - 1e-9])
    choice = expand_policy("uncertainty", tau)(grown(), CANDIDATES, 4, draws)
    assert choice.nodes == (None, None, "0.0.0", "0.0.0")


def test_uncertainty_survives_scores_far_apart() -> None:
    """Log-weights of a thousand do not overflow."""
    events = [
        *step("0.0.0", None, logprob=-1000.0),
        sampled("0.0.1", "0.0.0", logprob=-1.0),
        *ended("0.0.1"),
    ]
    tree = folded(asked(tree_plan()), [events]).trees[1]
    choice = expand_policy("uncertainty", 0.1)(tree, CANDIDATES, 2, np.array([0.3, 0.99]))
    assert choice.nodes == (None, None)


def test_value_takes_the_highest_reward_variance_first() -> None:
    """Below 0.0.0: rewards 1 and 0, variance 1/4; below the root: 1, 0, 1, variance 2/9."""
    choice = expand_policy("value", 1.0)(grown(), CANDIDATES, 3, draw(1, "x", count=5))
    assert choice.nodes == ("0.0.0", None, "0.0.0")
    assert choice.scores == pytest.approx((2 / 9, 0.25), abs=1e-15)


def test_value_breaks_ties_by_the_draws_alone() -> None:
    """Equal scores (one leaf each) are ordered by the draws of the candidates."""
    events = [*step("0.0.0", None), sampled("0.0.1", "0.0.0"), *ended("0.0.1")]
    tree = folded(asked(tree_plan()), [events]).trees[1]
    policy = expand_policy("value", 1.0)
    assert policy(tree, CANDIDATES, 1, np.array([0.5, 0.1, 0.2])).nodes == (None,)
    assert policy(tree, CANDIDATES, 1, np.array([0.5, 0.2, 0.1])).nodes == ("0.0.0",)


def test_value_ignores_void_leaves() -> None:
    """A leaf without a reward adds nothing to the variance."""
    tree = grown(chosen(2, "0.0.0"), sampled("2.0.1", "0.0.0"))
    assert expand_policy("value", 1.0)(tree, CANDIDATES, 1, np.zeros(3)).scores[1] == 0.25


def test_user_policy_needs_permission_by_name() -> None:
    """Code named in a setting runs only when it is allowed."""
    spec = "tests.rollout.test_trees_expand:last_user_policy"
    with pytest.raises(CodeNotAllowed, match="allow"):
        expand_policy(spec, 1.0)
    policy = expand_policy(spec, 1.0, allow_code=(spec,))
    assert policy(grown(), CANDIDATES, 2, np.zeros(4)) == Expansion(("0.0.0", "0.0.0"), (0.0, 1.0))


def odd_policy(tree: Tree, candidates: Sequence[NodeId | None], count: int, draws: Float64) -> int:
    """Return no expansion."""
    return count


def test_a_fault_of_a_users_policy_is_a_plain_error() -> None:
    """What it raises, or what it returns instead of an expansion, is told with the policy's name."""
    spec = "tests.rollout.test_trees_expand:odd_policy"
    policy = expand_policy(spec, 1.0, allow_code=(spec,))
    with pytest.raises(ConfigError, match="odd_policy' failed: TypeError"):
        policy(grown(), CANDIDATES, 2, np.zeros(4))


@pytest.mark.parametrize(
    "spec",
    [
        "nonsense",
        "no_such_module:f",
        "tests.rollout.test_trees_expand:absent",
        "tests.rollout.test_trees_expand:NOT_A_POLICY",
    ],
)
def test_unusable_policy_is_a_plain_error(spec: str) -> None:
    """An unknown name, module or function says so."""
    with pytest.raises(ConfigError, match=r"expansion policy|user code"):
        expand_policy(spec, 1.0, allow_code=(spec,))


def test_the_documented_example_works() -> None:
    """The policy that docs/rollouts.md shows runs as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, ExpandPolicy] = {}
    exec(code, names)
    choice = names["deepest"](grown(), CANDIDATES, 2, np.zeros(4))
    assert choice == Expansion(("0.0.0", "0.0.0"), (-1.0, 0.0))
