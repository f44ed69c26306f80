"""Owns when a group is complete and which of its leaves are its members: the closing rule, as pure functions.

A worker closes a group when all its trajectories have ended, the learner one that is late; both by this rule.
"""

from collections.abc import Sequence
from typing import NamedTuple

from core.choice import draw, subset
from core.events import Answered, ChosenLeaf, Plan
from core.tree import Group, trajectories

ALL_VOID = "all_void"
TOO_FEW = "too_few_members"

CHAIN, TREE = "chain", "tree"
"""Plan.mode."""


class Close(NamedTuple):
    """The group may close with these members."""

    chosen: tuple[ChosenLeaf, ...]
    """In (tree, node) order."""


class GiveUp(NamedTuple):
    """The group has too few members to be trained on."""

    reason: str


def tree_count(plan: Plan) -> int:
    """Return how many trees a group of this plan has; in chain mode every trajectory is one."""
    return plan.m if plan.mode == TREE else plan.group_size


def most_members(plan: Plan) -> int:
    """Return the members of a group in which every trajectory ended well."""
    return plan.m * min(plan.k, plan.l * plan.n + 1) if plan.mode == TREE else plan.group_size


def choose_members(group: Group, run_seed: int) -> tuple[ChosenLeaf, ...]:
    """Return the members in (tree, node) order: every scored leaf, or K random ones per tree.

    The K are drawn by (run seed, uid, tree, "leaves") over the scored leaves in node order.
    """
    chosen: list[ChosenLeaf] = []
    for tree in group.trees.values():
        leaves = [leaf.node for leaf in tree.leaves() if leaf.reward is not None]
        kept: Sequence[int] = range(len(leaves))
        if group.asked.plan.mode == TREE:
            draws = draw(run_seed, group.uid, tree.index, "leaves", count=len(leaves))
            kept = subset(draws, group.asked.plan.k)
        chosen += [ChosenLeaf(tree=tree.index, leaf=leaves[position]) for position in kept]
    return tuple(chosen)


def close_or_give_up(group: Group, run_seed: int) -> Close | GiveUp:
    """Return how a group ends whose trajectories have ended (or may wait no longer)."""
    chosen = choose_members(group, run_seed)
    if len(chosen) >= max(1, group.asked.plan.min_group):
        return Close(chosen)
    voids = _void_ends(group)
    if not chosen and voids:
        detail = f" ({voids[0].detail})" if voids[0].detail else ""
        return GiveUp(f"{ALL_VOID}: {voids[0].outcome.value}{detail}")
    return GiveUp(f"{TOO_FEW}: {len(chosen)}, expected at least {group.asked.plan.min_group}")


def _void_ends(group: Group) -> list[Answered]:
    """Return the void ends of a group, those of turns that were never sampled last."""
    sampled = [ended.ended for ended in trajectories(group) if ended.is_void]
    return sampled + [end for tree in group.trees.values() for end in tree.unborn.values()]
