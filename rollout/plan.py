"""Owns what a new group asks: from the configuration, a claim and a question to its `group` record."""

import msgspec

from core.arrays import pack_tokens
from core.closing import CHAIN, TREE, most_members
from core.config import RolloutSettings
from core.events import GroupAsked, Plan, SamplingParams
from rollout.chat import Chat
from rollout.data import Example
from store.ports import Claim


def make_plan(settings: RolloutSettings) -> Plan:
    """Return the shape of the groups of a run; min_group is never more than a group can have."""
    if settings.mode == TREE:
        tree = settings.tree
        plan = Plan(
            mode=TREE,
            m=tree.m,
            n=tree.n,
            l=tree.l,
            k=tree.k,
            expand=tree.expand,
            tau=tree.temperature,
            min_group=settings.min_group,
        )
    else:
        plan = Plan(mode=CHAIN, group_size=settings.group_size, min_group=settings.min_group)
    return msgspec.structs.replace(plan, min_group=min(plan.min_group, most_members(plan)))


def make_params(settings: RolloutSettings) -> SamplingParams:
    """Return how the policy is sampled and what ends a trajectory."""
    return SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_search_calls=settings.max_search_calls,
        max_turns=settings.max_turns,
        max_trajectory_tokens=settings.max_trajectory_tokens,
        max_assistant_tokens=settings.max_assistant_tokens,
        max_tool_tokens=settings.max_tool_tokens,
        final_turn=settings.final_turn,
    )


def ask(
    chat: Chat, plan: Plan, params: SamplingParams, claim: Claim, example: Example, now: float
) -> GroupAsked:
    """Return the first record of a claimed group."""
    return GroupAsked(
        uid=claim.uid,
        ticket=claim.ticket,
        attempt=claim.attempt,
        example_id=example.id,
        question=example.question,
        references=example.answers,
        data_source=example.data_source,
        prompt=pack_tokens(chat.first_prompt(example.question)),
        plan=plan,
        policy_version=claim.policy_version,
        weights_uri=claim.weights_uri,
        params=params,
        protocol=chat.protocol.name,
        at=now,
    )
