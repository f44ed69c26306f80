"""What rollouts cost, by hand."""

import msgspec
import pytest

from core.accounting import (
    Cost,
    TreeBudget,
    call_budget,
    cost_metrics,
    generated_budget,
    group_cost,
    total_cost,
)
from core.arrays import pack_tokens
from core.events import Answered, GroupEvent, Observed, Outcome, TurnSampled
from tests.rollout.support import CHAIN, asked, chosen, ended, folded, sampled, step, tree_plan

# The prompt has 5 tokens, a turn 2, an observation 3: contexts of 5, 10, 15 tokens.
CHAIN_A = [*step("0.0.0", None), *step("0.0.1", "0.0.0"), sampled("0.0.2", "0.0.1"), *ended("0.0.2")]
CHAIN_B = [*step("0.0.0", None), sampled("0.0.1", "0.0.0"), *ended("0.0.1")]


def test_chains_read_the_first_prompt_once() -> None:
    """One request for the first turns (5), then 10 + 15 and 10: nothing is shared beyond that."""
    cost = group_cost(folded(asked(CHAIN), [CHAIN_A, CHAIN_B]))
    assert cost == Cost(
        groups=1,
        generated=10,
        prefilled=40,
        tool_calls=3,
        requests=4,
        leaves=2,
        unshared=10,
        unshared_calls=3,
    )


def test_tree_counts_shared_turns_once() -> None:
    """0.0.0 is below all leaves but one; a request with two samples reads its prompt once."""
    events = [*CHAIN_B, chosen(1, "0.0.0", "0.0.0", None)]
    events += [sampled("1.0.1", "0.0.0"), *ended("1.0.1"), sampled("1.1.1", "0.0.0"), *ended("1.1.1")]
    events += [sampled("1.2.0", None), *ended("1.2.0")]
    # The two expansions of 0.0.0 are request 1, as recorded by the worker.
    events = [_with_request(event) for event in events]
    cost = group_cost(folded(asked(tree_plan(n=3)), [events]))
    # Generated: 0.0.0, 0.0.1, 1.0.1, 1.1.1, 1.2.0. Read: 5, 10, 10, 5. As chains: three of 4 tokens, one of 2.
    assert cost == Cost(
        groups=1,
        generated=10,
        prefilled=30,
        tool_calls=1,
        requests=4,
        leaves=4,
        unshared=14,
        unshared_calls=3,
    )


def _with_request(event: GroupEvent) -> GroupEvent:
    if isinstance(event, TurnSampled) and event.node.startswith("1."):
        return msgspec.structs.replace(event, request=1)
    return event


def test_void_trajectories_cost_but_are_no_leaves() -> None:
    """What was sampled before a failure was paid for."""
    events = [*step("0.0.0", None), Answered(leaf="0.0.1", outcome=Outcome.VOID_ENGINE, answer=None, text="")]
    cost = group_cost(folded(asked(CHAIN), [CHAIN_B, events]))
    assert (cost.generated, cost.tool_calls, cost.leaves) == (6, 2, 1)


def test_paper_budget_beside_the_measured_one() -> None:
    """M = 2, N = 2, L = 1, B = 5: the printed formula gives 2B + 2·B/2, per tree it is 2B + 4·B/2."""
    group = folded(asked(tree_plan(m=2, n=2)), [CHAIN_A, CHAIN_B])
    assert generated_budget([group]) == TreeBudget(chain=5.0, paper=15.0, expected=20.0, measured=10.0)
    assert call_budget([group]) == TreeBudget(chain=1.5, paper=4.5, expected=6.0, measured=3.0)


def test_chains_expect_what_they_measure() -> None:
    """For chains both budgets are G·B."""
    group = folded(asked(CHAIN), [CHAIN_A, CHAIN_B])
    assert generated_budget([group, group]) == TreeBudget(5.0, 10.0, 10.0, 10.0)


def test_metrics_per_group_and_per_leaf() -> None:
    """Totals and both quotients; nothing is divided by zero."""
    group = folded(asked(CHAIN), [CHAIN_A, CHAIN_B])
    metrics = cost_metrics([group, group])
    assert metrics["budget/generated_tokens"] == 20
    assert metrics["budget/generated_tokens_per_group"] == 10
    assert metrics["budget/tool_calls_per_leaf"] == pytest.approx(1.5)
    assert metrics["budget/saved_by_sharing"] == 0
    assert set(cost_metrics([]).values()) == {0.0}
    assert total_cost([]) == Cost()


def test_rewritten_prompt_counts_as_read() -> None:
    """After a prompt_reset the next request reads the new prompt."""
    turn, call, seen = step("0.0.0", None)
    assert isinstance(seen, Observed)
    seen = msgspec.structs.replace(seen, prompt_reset=pack_tokens([1] * 7))
    group = folded(asked(CHAIN), [[turn, call, seen, sampled("0.0.1", "0.0.0"), *ended("0.0.1")]])
    assert group_cost(group).prefilled == 5 + 7


def test_each_tree_pays_for_its_own_expansion_of_the_root() -> None:
    """Only the first turn is one request for all trees: two trees that begin anew read the prompt twice more."""
    anew = [chosen(1, None), _with_request(sampled("1.0.0", None)), *ended("1.0.0")]
    group = folded(asked(tree_plan(m=2, n=1)), [[*CHAIN_B, *anew], [*CHAIN_B, *anew]])
    # 5 for the first turns, 10 per second turn, 5 per expansion.
    assert (group_cost(group).requests, group_cost(group).prefilled) == (5, 5 + 2 * 10 + 2 * 5)


def test_the_budget_counts_every_round() -> None:
    """M = 2, N = 3, L = 4: 2 + 12/2 chains by the printed formula, 2 + 2·12/2 per tree."""
    budget = generated_budget([folded(asked(tree_plan(m=2, n=3, l=4)), [CHAIN_A, CHAIN_A])])
    assert (budget.chain, budget.paper, budget.expected) == (6.0, 6.0 * 8, 6.0 * 14)
