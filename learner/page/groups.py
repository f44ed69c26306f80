"""Owns one group on the page: which of its leaves fit, its block of trees, and its card for the lists."""

from collections.abc import Iterator, Sequence
from math import fsum, sqrt
from typing import NamedTuple

import msgspec

from core.ids import NodeId
from core.nodes import Node, Tree
from core.tree import Group
from learner.batch import Taken
from learner.page.derive import Derived, LeafKey, member_block
from learner.page.model import GroupBlock, GroupCard, LeafCard, MemberBlock, TreeBlock
from learner.page.turns import NAME, Inks, cut, node_block, pack

CARD_TEXT = 8_192
"""Characters of a question that the page holds."""


class Shown(NamedTuple):
    """One group as the page holds it."""

    card: GroupCard
    block: GroupBlock


class _Told(NamedTuple):
    """What a group's parts are made from."""

    taken: Taken
    step: int
    derived: Derived | None
    inks: Inks


class _Grown(NamedTuple):
    """One tree with the leaves that fit: its nodes, parents first, and where each one is."""

    tree: Tree
    nodes: list[Node]
    places: dict[NodeId, int]


def show_group(taken: Taken, step: int, derived: Derived | None, inks: Inks, leaves: int) -> Shown:
    """Return a step's group with at most `leaves` of its ended leaves, the first in (tree, node) order."""
    told = _Told(taken, step, derived, inks)
    group = taken.group
    grown = list(_grow(group, leaves))
    cards = [card for place, one in enumerate(grown) for card in _cards(told, place, one)]
    prompt = pack(group.asked.prompt, inks)
    block = GroupBlock(
        uid=group.uid,
        prompt=prompt.text,
        prompt_cut=prompt.cut,
        prompt_count=prompt.total,
        trees=[_tree_block(told, one) for one in grown],
        members=_members(told, cards, grown),
        kl_beta=derived.settings.kl_beta if derived else 0.0,
        params=_params(group),
    )
    return Shown(_group_card(told, cards), block)


def _grow(group: Group, leaves: int) -> Iterator[_Grown]:
    left = leaves
    for tree in group.trees.values():
        ended = [node.node for node in _preorder(tree) if node.answer is not None]
        kept = ended[: max(left, 0)]
        left -= len(ended)
        wanted = {step.node for leaf in kept for step in tree.path(leaf)} if len(kept) < len(ended) else None
        nodes = [node for node in _preorder(tree) if wanted is None or node.node in wanted]
        if nodes or tree.unborn:
            yield _Grown(tree, nodes, {node.node: place for place, node in enumerate(nodes)})


def _preorder(tree: Tree) -> Iterator[Node]:
    """Yield a node before what was sampled after it, siblings in node order."""
    below: dict[NodeId | None, list[Node]] = {}
    for node in tree.nodes.values():
        below.setdefault(node.parent, []).append(node)
    waiting = list(reversed(below.get(None, [])))
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(reversed(below.get(node.node, [])))


def _tree_block(told: _Told, grown: _Grown) -> TreeBlock:
    derived, blocks = told.derived, []
    for node in grown.nodes:
        parent = -1 if node.parent is None else grown.places[node.parent]
        key: LeafKey = (told.taken.group.uid, grown.tree.index, node.node)
        credit = derived.nodes.get(key) if derived else None
        kl = derived is not None and derived.settings.kl_beta > 0
        blocks.append(node_block(node, (parent, node.turn), credit, told.inks, kl))
    unborn = [
        (str(node), ended.outcome.value, cut(ended.detail, told.inks.limits.text))
        for node, ended in grown.tree.unborn.items()
    ]
    return TreeBlock(index=grown.tree.index, nodes=blocks, unborn=unborn)


def _cards(told: _Told, place: int, grown: _Grown) -> Iterator[LeafCard]:
    for node in grown.nodes:
        if node.answer is not None:
            key: LeafKey = (told.taken.group.uid, grown.tree.index, node.node)
            yield LeafCard(
                tree=place,
                node=grown.places[node.node],
                name=f"{grown.tree.index}/{node.node}",
                reward=node.reward.value if node.reward else None,
                outcome=node.answer.outcome.value,
                answer=cut(node.answer.answer or "", NAME),
                advantage=told.derived.advantage(key) if told.derived else None,
            )


def _members(told: _Told, cards: Sequence[LeafCard], grown: Sequence[_Grown]) -> list[MemberBlock]:
    if told.derived is None:
        return []
    result = []
    for card in cards:
        one = grown[card.tree]
        key: LeafKey = (told.taken.group.uid, one.tree.index, one.nodes[card.node].node)
        if key in told.derived.positions:
            result.append(member_block(told.derived, key, (card.tree, card.node)))
    return result


def _group_card(told: _Told, cards: list[LeafCard]) -> GroupCard:
    group, asked = told.taken.group, told.taken.group.asked
    rewards = [
        float(member.reward)
        for member in (told.derived.batch.members if told.derived else ())
        if member.group.uid == asked.uid and member.reward is not None
    ]
    mean = fsum(rewards) / len(rewards) if rewards else None
    std = None
    if mean is not None and len(rewards) > 1:
        std = sqrt(fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return GroupCard(
        uid=asked.uid,
        step=told.step,
        question=cut(asked.question, min(CARD_TEXT, told.inks.limits.text)),
        references=[cut(reference, NAME) for reference in asked.references[:20]],
        source=cut(asked.data_source, NAME),
        example=cut(asked.example_id, NAME),
        mode=asked.plan.mode,
        leaves=cards,
        mean=mean,
        std=std,
        staleness=told.step - told.taken.opened_at_step,
        policy_version=asked.policy_version,
        hidden_leaves=sum(len(tree.leaves()) for tree in group.trees.values()) - len(cards),
    )


def _params(group: Group) -> list[tuple[str, str]]:
    asked = group.asked
    plan = {name: str(value) for name, value in msgspec.structs.asdict(asked.plan).items()}
    params = {name: str(value) for name, value in msgspec.structs.asdict(asked.params).items()}
    return [
        ("policy version", str(asked.policy_version)),
        ("weights", cut(asked.weights_uri, NAME) or "the base model"),
        ("protocol", cut(asked.protocol, NAME)),
        *((name, cut(value, NAME)) for name, value in (plan | params).items()),
    ]
