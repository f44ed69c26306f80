"""Owns what a group's rollouts have cost: tokens generated and read, tool calls, per group and per leaf.

Trees and chains are compared by the same counts. A shared turn is generated once and counted once; a
sampling request reads its whole prompt once, however many samples it returns (a service that caches
prefixes reads less).
"""

from collections.abc import Callable, Iterable
from math import fsum
from typing import NamedTuple

from core.closing import TREE
from core.events import VOID_OUTCOMES, Plan
from core.ids import NodeId, parse_node
from core.nodes import NUMBER_BYTES, Node, Tree
from core.tree import Group


class Cost(NamedTuple):
    """What one group, or several, cost."""

    groups: int = 0
    generated: int = 0
    """Tokens that the policy sampled, each counted once."""
    prefilled: int = 0
    """Tokens of the prompts of all sampling requests."""
    tool_calls: int = 0
    requests: int = 0
    leaves: int = 0
    """Ended, not void."""
    unshared: int = 0
    """Tokens that would have been generated if no leaf shared a turn with another: the chains' price."""
    unshared_calls: int = 0

    def plus(self, other: "Cost") -> "Cost":
        """Return the sum of two costs."""
        return Cost(*(left + right for left, right in zip(self, other, strict=True)))


class TreeBudget(NamedTuple):
    """What was expected per group beside what was measured, in one unit (tokens, or tool calls)."""

    chain: float
    """B: the mean over the initial chains."""
    paper: float
    """M·B + L·N·B/2, Tree-GRPO's formula as printed; G·B for chains."""
    expected: float
    """M·B + M·L·N·B/2: N nodes are expanded in each of the M trees, which is what the paper's budgets
    of about 2, 4, 8 and 16 chains come from."""
    measured: float


def group_cost(group: Group) -> Cost:
    """Return what one group has cost so far, void trajectories included: they were paid for as well."""
    cost = Cost(groups=1)
    for tree in group.trees.values():
        cost = cost.plus(_tree_cost(tree))
    return cost.plus(_reading_cost(group))


def total_cost(groups: Iterable[Group]) -> Cost:
    """Return the sum over groups."""
    total = Cost()
    for group in groups:
        total = total.plus(group_cost(group))
    return total


def generated_budget(groups: Iterable[Group]) -> TreeBudget:
    """Return the paper's token budget beside the generated tokens."""
    return _budget(groups, lambda node: _count(node.sample.tokens))


def call_budget(groups: Iterable[Group]) -> TreeBudget:
    """Return the paper's tool-call budget beside the calls made."""
    return _budget(groups, lambda node: int(node.tool_call is not None))


def cost_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Return the costs by metric name, per group and per leaf; 0 where there is nothing to divide by."""
    kept = list(groups)
    cost = total_cost(kept)
    metrics = {
        "budget/generated_tokens": float(cost.generated),
        "budget/prefilled_tokens": float(cost.prefilled),
        "budget/tool_calls": float(cost.tool_calls),
        "budget/requests": float(cost.requests),
    }
    for name, value in (
        ("generated_tokens", cost.generated),
        ("prefilled_tokens", cost.prefilled),
        ("tool_calls", cost.tool_calls),
    ):
        metrics[f"budget/{name}_per_group"] = value / cost.groups if cost.groups else 0.0
        metrics[f"budget/{name}_per_leaf"] = value / cost.leaves if cost.leaves else 0.0
    metrics["budget/saved_by_sharing"] = 1.0 - cost.generated / cost.unshared if cost.unshared else 0.0
    tokens = generated_budget(kept)
    metrics["budget/chain_tokens"] = tokens.chain
    metrics["budget/paper_tokens_per_group"] = tokens.paper
    metrics["budget/expected_tokens_per_group"] = tokens.expected
    return metrics


def _count(tokens: bytes) -> int:
    return len(tokens) // NUMBER_BYTES


def _tree_cost(tree: Tree) -> Cost:
    tokens = {node: _count(step.sample.tokens) for node, step in tree.nodes.items()}
    calls = {node for node, step in tree.nodes.items() if step.tool_call is not None}
    leaves = [leaf for leaf in tree.leaves() if leaf.answer and leaf.answer.outcome not in VOID_OUTCOMES]
    along = [step.node for leaf in leaves for step in tree.path(leaf.node)]
    return Cost(
        generated=sum(tokens.values()),
        tool_calls=len(calls),
        leaves=len(leaves),
        unshared=sum(tokens[node] for node in along),
        unshared_calls=sum(node in calls for node in along),
    )


def _reading_cost(group: Group) -> Cost:
    """Count the requests and their prompts; the first turn of all trees was one request."""
    prompt = _count(group.asked.prompt)
    requests: dict[tuple[int, str | None, int], int] = {}
    for tree in group.trees.values():
        after: dict[NodeId, int] = {}
        for node in tree.nodes.values():
            before = prompt if node.parent is None else after[node.parent]
            shared = node.parent is None and parse_node(node.node).round == 0
            requests[0 if shared else tree.index, node.parent, node.sample.request] = before
            after[node.node] = _context(node, before)
    return Cost(prefilled=sum(requests.values()), requests=len(requests))


def _context(node: Node, before: int) -> int:
    """Return the length of the prompt after a node whose own prompt had `before` tokens."""
    if node.observation is None:
        return before + _count(node.sample.tokens)
    if node.observation.prompt_reset is not None:
        return _count(node.observation.prompt_reset)
    return before + _count(node.sample.tokens) + _count(node.observation.tokens)


def _budget(groups: Iterable[Group], worth: Callable[[Node], int]) -> TreeBudget:
    kept = list(groups)
    chains = [
        sum(worth(node) for node in tree.nodes.values() if parse_node(node.node).round == 0)
        for group in kept
        for tree in group.trees.values()
    ]
    if not chains:
        return TreeBudget(0.0, 0.0, 0.0, 0.0)
    measured = sum(
        worth(node) for group in kept for tree in group.trees.values() for node in tree.nodes.values()
    )
    chain = fsum(chains) / len(chains)
    paper = fsum(_whole_chains(group.asked.plan, trees=1) for group in kept)
    expected = fsum(_whole_chains(group.asked.plan, trees=group.asked.plan.m) for group in kept)
    return TreeBudget(chain, chain * paper / len(kept), chain * expected / len(kept), measured / len(kept))


def _whole_chains(plan: Plan, *, trees: int) -> float:
    """Return how many chains a group should cost if an expansion costs half of one."""
    return plan.m + trees * plan.l * plan.n / 2 if plan.mode == TREE else float(plan.group_size)
