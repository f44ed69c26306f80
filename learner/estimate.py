"""Owns the estimate of what more steps will cost, before anything is bought."""

from collections.abc import Iterable

import msgspec

from core.budget import Spent, add, money
from core.closing import TREE, most_members
from core.config import Config
from core.events import GroupClosed, JournalEvent, Plan, StepCommitted


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a number of steps is expected to cost, or costs at most."""

    steps: int
    groups: int
    trajectories: int
    """At most."""
    tokens_sampled: int
    tokens_trained: int
    search_calls: int
    money: float
    """At the prices of budget.price_*."""
    measured: bool
    """True: from what this run's groups and steps have cost so far. False: the most that its limits allow."""


def estimate(config: Config, plan: Plan, steps: int, history: Iterable[JournalEvent] = ()) -> Estimate:
    """Return the estimate for `steps` more steps; measured as soon as a step is committed."""
    spent, closed, trained = Spent(), 0, 0
    for event in history:
        spent = add(spent, event)
        closed += isinstance(event, GroupClosed)
        trained += isinstance(event, StepCommitted)
    groups = steps * config.learner.groups_per_step
    per_group = most_members(plan)
    if closed and trained:
        expected = Spent(
            tokens_sampled=round(spent.tokens_sampled / closed * groups),
            tokens_trained=round(spent.tokens_trained / trained * steps),
            search_calls=round(spent.search_calls / closed * groups),
        )
    else:
        expected = _most(config, plan, groups)
    return Estimate(
        steps=steps,
        groups=groups,
        trajectories=groups * per_group,
        tokens_sampled=expected.tokens_sampled,
        tokens_trained=expected.tokens_trained,
        search_calls=expected.search_calls,
        money=money(expected, config.budget),
        measured=bool(closed and trained),
    )


def _most(config: Config, plan: Plan, groups: int) -> Spent:
    """Return what the limits allow at most."""
    rollout = config.rollout
    leaves = plan.m * (1 + plan.l * plan.n) if plan.mode == TREE else plan.group_size
    sampled = min(rollout.max_turns * rollout.max_assistant_tokens, rollout.max_trajectory_tokens)
    return Spent(
        tokens_sampled=groups * leaves * sampled,
        tokens_trained=groups * most_members(plan) * rollout.max_trajectory_tokens,
        search_calls=groups * leaves * rollout.max_search_calls,
    )


def estimate_lines(found: Estimate) -> list[str]:
    """Return the estimate for a terminal."""
    basis = "from this run so far" if found.measured else "at most, by the limits of its configuration"
    price = f", {found.money:,.2f} at the configured prices" if found.money else ""
    head = f"{found.steps} steps, {found.groups} groups, up to {found.trajectories} trajectories ({basis}):"
    counts = (
        f"  {found.tokens_sampled:,} tokens sampled, {found.tokens_trained:,} tokens trained, "
        f"{found.search_calls:,} searches{price}"
    )
    return [head, counts]
