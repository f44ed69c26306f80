"""Owns the metrics of a step, a pure function of its groups and batch, so that any step's can be recomputed.

Names follow the Search-R1 recipe where it has one. Members are the chosen leaves; sampled nodes are
counted once, however many leaves share them. `trainer/*` and `time/*` are facts of the commit, not of this.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from math import fsum
from typing import NamedTuple

import numpy as np

from core.accounting import cost_metrics
from core.batch import StepBatch
from core.events import VOID_OUTCOMES, Answered, Outcome
from core.nodes import Node
from core.tree import Group, Trajectory

SEARCH = "search"
INVALID_ACTION = "invalid_action"
TIMEOUT, RATE_LIMITED = "timeout", "rate_limited"
FOUND = frozenset({"success", "empty"})

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Upper bounds, in tokens, of the classes in which trajectories are counted; one class more has no bound."""

Metrics = dict[str, float]


class GroupFacts(NamedTuple):
    """One trained group: its fold, its members, and how many steps old it was."""

    group: Group
    members: tuple[Trajectory, ...]
    staleness: int


def step_metrics(groups: Sequence[GroupFacts], batch: StepBatch) -> Metrics:
    """Return all metrics of one step, sorted by name."""
    members = [member for facts in groups for member in facts.members]
    nodes = [node for facts in groups for node in _nodes(facts.group)]
    metrics = (
        _reward(members)
        | _rollout(groups, members, nodes)
        | _outcomes(members)
        | _counts(groups, members)
        | _search(nodes)
        | _tree(groups)
        | cost_metrics(facts.group for facts in groups)
        | _train(batch)
        | _staleness(groups)
    )
    return dict(sorted(metrics.items()))


def mean(values: Iterable[float]) -> float:
    """Return the mean, 0 of nothing."""
    listed = list(values)
    return fsum(listed) / len(listed) if listed else 0.0


def _nodes(group: Group) -> list[Node]:
    return [node for tree in group.trees.values() for node in tree.nodes.values()]


def _ends(group: Group) -> list[Answered]:
    """Return how trajectories ended, those whose next turn could never be sampled included."""
    ended = [node.answer for node in _nodes(group) if node.answer is not None]
    return ended + [end for tree in group.trees.values() for end in tree.unborn.values()]


def reward_of(member: Trajectory) -> float:
    """Return a member's reward; members are scored by definition."""
    assert member.reward is not None
    return member.reward


def component(member: Trajectory, name: str) -> float:
    """Return one component of a member's score, 0 when the scorer has none of that name."""
    rewarded = member.path[-1].reward
    return rewarded.components.get(name, 0.0) if rewarded is not None else 0.0


def _reward(members: Sequence[Trajectory]) -> Metrics:
    by_source: dict[str, list[float]] = {}
    for member in members:
        by_source.setdefault(member.group.asked.data_source, []).append(reward_of(member))
    metrics = {
        "reward/mean": mean(reward_of(member) for member in members),
        "reward/correct": mean(component(member, "exact_match") for member in members),
        "reward/format": mean(component(member, "format") for member in members),
    }
    return metrics | {f"reward/{source}": mean(rewards) for source, rewards in by_source.items() if source}


def _rollout(groups: Sequence[GroupFacts], members: Sequence[Trajectory], nodes: Sequence[Node]) -> Metrics:
    calls = sum(1 for node in nodes if node.tool_call is not None)
    invalid = sum(1 for node in nodes if _is_invalid(node))
    ends = [end.outcome for facts in groups for end in _ends(facts.group)]
    sampled = sum(len(node.sample.tokens) // 4 for node in nodes)
    lengths = [trajectory_tokens(member) for member in members]
    return {
        "rollout/trajectories": float(len(members)),
        "rollout/turns": mean(len(member.path) for member in members),
        "rollout/search_calls": mean(search_calls(member) for member in members),
        "rollout/trajectory_tokens": mean(lengths),
        "rollout/longest_trajectory": float(max(lengths, default=0)),
        "rollout/tokens_sampled": float(sampled),
        "rollout/valid_tool_call_rate": calls / (calls + invalid) if calls + invalid else 0.0,
        "rollout/degenerate_group_rate": mean(float(is_degenerate(facts.members)) for facts in groups),
        "rollout/void_rate": mean(float(outcome in VOID_OUTCOMES) for outcome in ends),
    }


def _is_invalid(node: Node) -> bool:
    """Tell whether a turn failed to be a call or an answer."""
    if node.observation is not None:
        return node.observation.status == INVALID_ACTION
    return node.answer is not None and node.answer.outcome is Outcome.BAD_FORMAT


def search_calls(member: Trajectory) -> int:
    """Return how many searches a trajectory ran."""
    return sum(
        1
        for node in member.path
        if node.tool_call is not None and node.tool_call.tool == SEARCH and node.observation is not None
    )


def trajectory_tokens(member: Trajectory) -> int:
    """Return the tokens of prompt, turns and observations along a path (int32 each on disk)."""
    size = len(member.group.asked.prompt)
    for node in member.path:
        size += len(node.sample.tokens)
        if node.observation is not None and node is not member.path[-1]:
            size += len(node.observation.tokens)
    return size // 4


def is_degenerate(members: Sequence[Trajectory]) -> bool:
    """Tell whether a group carries no signal: all its members' rewards are equal."""
    return len({reward_of(member) for member in members}) <= 1


def _outcomes(members: Sequence[Trajectory]) -> Metrics:
    counts = Counter(str(member.outcome) for member in members)
    return {
        f"outcome/{outcome}": counts[outcome] / len(members) if members else 0.0
        for outcome in Outcome
        if outcome not in VOID_OUTCOMES
    }


def _counts(groups: Sequence[GroupFacts], members: Sequence[Trajectory]) -> Metrics:
    """Count ends by outcome, and members by length: what a biased selection would thin out."""
    outcomes = Counter(end.outcome for facts in groups for end in _ends(facts.group))
    lengths = Counter(bisect_left(LENGTHS, trajectory_tokens(member)) for member in members)
    classes = [*(f"upto_{bound:04}" for bound in LENGTHS), f"above_{LENGTHS[-1]}"]
    return {f"count/{outcome}": float(outcomes[outcome]) for outcome in Outcome} | {
        f"length/{name}": float(lengths[place]) for place, name in enumerate(classes)
    }


def _search(nodes: Sequence[Node]) -> Metrics:
    results = [
        node.observation
        for node in nodes
        if node.observation is not None and node.tool_call is not None and node.tool_call.tool == SEARCH
    ]
    status = Counter(result.status for result in results)
    good = sum(status[name] for name in FOUND)
    limited, timeout = status[RATE_LIMITED], status[TIMEOUT]
    total = max(len(results), 1)
    return {
        "search/calls": float(len(results)),
        "search/success": float(good),
        "search/timeout": float(timeout),
        "search/429": float(limited),
        "search/error": float(len(results) - good - limited - timeout),
        "search/success_rate": good / total,
        "search/error_rate": (len(results) - good) / total,
        "search/empty_rate": status["empty"] / total,
        "search/latency": mean(result.latency for result in results if not result.cached),
        "search/cache_hit": mean(float(result.cached) for result in results),
    }


def _tree(groups: Sequence[GroupFacts]) -> Metrics:
    if all(facts.group.asked.plan.mode != "tree" for facts in groups):
        return {}
    by_tree: dict[tuple[str, int], list[float]] = {}
    for facts in groups:
        for member in facts.members:
            by_tree.setdefault((facts.group.uid, member.tree), []).append(reward_of(member))
    trees = [tree for facts in groups for tree in facts.group.trees.values()]
    return {
        "tree/leaves_per_tree": mean(len(tree.leaves()) for tree in trees),
        "tree/members_per_tree": mean(len(rewards) for rewards in by_tree.values()),
        "tree/singleton_rate": mean(float(len(rewards) == 1) for rewards in by_tree.values()),
        "tree/zero_std_rate": mean(
            float(len(rewards) > 1 and len(set(rewards)) == 1) for rewards in by_tree.values()
        ),
    }


def _train(batch: StepBatch) -> Metrics:
    lengths = [len(datum.inputs) for datum in batch.datums]
    loss_tokens = sum(int(np.count_nonzero(datum.advantages)) for datum in batch.datums)
    padded = sum(len(micro) * max(lengths[position] for position in micro) for micro in batch.micro_batches)
    return {
        "train/members": float(batch.stats.members),
        "train/datums": float(batch.stats.datums),
        "train/micro_batches": float(len(batch.micro_batches)),
        "train/tokens": float(batch.stats.datum_tokens),
        "train/loss_tokens": float(loss_tokens),
        "train/loss_tokens_per_rollout_batch": float(loss_tokens),
        "train/padded_tokens": float(padded),
        "train/update_skipped": float(not lengths),
    }


def _staleness(groups: Sequence[GroupFacts]) -> Metrics:
    ages = [facts.staleness for facts in groups]
    return {"staleness/mean": mean(ages), "staleness/max": float(max(ages, default=0))}
