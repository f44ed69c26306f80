"""Owns how a group grows: which requests, expansions and tips are next, from its recorded nodes alone.

The first turn of all trees is one request. After it every tree is on its own: its round 0 is one chain; each
of L later rounds chooses N nodes, asks once per chosen node for as many continuations as it was chosen, and
waits for its branches to end before the next round. A branch is (round, expansion); its tip is its deepest
turn. Nothing here waits, samples or writes.
"""

from collections.abc import Callable
from typing import NamedTuple

from core.choice import draw
from core.closing import TREE, tree_count
from core.errors import ConfigError
from core.events import GroupAsked, NodesChosen
from core.ids import GROUP_STREAM, NodeId, make_node, parse_node
from core.nodes import Node, Tree
from core.segments import next_prompt
from core.tree import Group
from rollout.expand import ExpandPolicy
from rollout.seeds import request_seed


class Place(NamedTuple):
    """A turn's place in its group."""

    tree: int
    node: NodeId


class Request(NamedTuple):
    """One sampling request: the j-th sample goes to the j-th child."""

    tree: int
    """0: the first turn, which serves every tree."""
    parent: NodeId | None
    children: tuple[Place, ...]
    ordinal: int
    """Among the requests made for the parent, from 0."""

    def seed(self, run_seed: int, uid: str) -> int:
        """Return the request's seed: the same whenever and by whomever it is made."""
        return request_seed(run_seed, uid, self.tree, self.parent, self.ordinal)


class Growth(NamedTuple):
    """What may go on in a tree now, all of it at once."""

    requests: tuple[Request, ...]
    tips: tuple[NodeId, ...]
    """Tips of branches that have not ended."""


class Policy(NamedTuple):
    """What the growth of a tree depends on besides its nodes."""

    run_seed: int
    expand: ExpandPolicy
    is_finished: Callable[[Group, int, NodeId], bool]
    """Whether nothing is left to do at a branch's tip."""


def first_request(asked: GroupAsked) -> Request:
    """Return the request for the first turn of every tree."""
    trees = range(1, tree_count(asked.plan) + 1)
    return Request(GROUP_STREAM, None, tuple(Place(tree, make_node(0, 0, 0)) for tree in trees), 0)


def continuation(tree: Tree, tip: NodeId) -> Request:
    """Return the request for the turn after a branch's tip, of which it is the first."""
    round_, expansion, depth = parse_node(tip)
    return Request(tree.index, tip, (Place(tree.index, make_node(round_, expansion, depth + 1)),), 0)


def next_in_tree(policy: Policy, group: Group, index: int) -> Growth | NodesChosen | None:
    """Return what tree `index` does next: grow, choose the next round's nodes, or (None) nothing more.

    The first turn must be recorded, or its place be recorded as void.
    """
    tree = group.trees[index]
    if not tree.nodes:
        return None
    round_ = tree.expansions[-1].round if tree.expansions else 0
    tips = tuple(tip for tip in branch_tips(tree) if not policy.is_finished(group, index, tip))
    requests = _missing_requests(tree, round_)
    if tips or requests:
        return Growth(requests, tips)
    plan = group.asked.plan
    if plan.mode != TREE or round_ >= plan.l or not plan.n:
        return None
    return choose_nodes(policy, group, tree, round_ + 1)


def branch_tips(tree: Tree) -> tuple[NodeId, ...]:
    """Return the deepest turn of each branch, in node order, without branches whose next turn is void."""
    tips = {parse_node(node)[:2]: node for node in tree.nodes}
    for void in tree.unborn:
        tips.pop(parse_node(void)[:2], None)
    return tuple(tips.values())


def candidates(group: Group, tree: Tree) -> tuple[NodeId | None, ...]:
    """Return the nodes that may be expanded, the root first, then in node order.

    A node may when its observation is complete and not void, it has not ended, and a generation is left
    by turns and by tokens.
    """
    params = group.asked.params
    found: list[NodeId | None] = [None]
    for node in tree.nodes.values():
        if node.answer is None and not lacks_observation(node) and node.turn + 1 < params.max_turns:
            prompt = next_prompt(group, tree.index, node.node)
            if len(prompt) < params.max_trajectory_tokens:
                found.append(node.node)
    return tuple(found)


def choose_nodes(policy: Policy, group: Group, tree: Tree, round_: int) -> NodesChosen:
    """Return the choice of one round, checked; the draws are keyed by (run seed, uid, tree, round)."""
    plan = group.asked.plan
    among = candidates(group, tree)
    draws = draw(policy.run_seed, group.uid, tree.index, round_, count=plan.n + len(among))
    nodes, scores = policy.expand(tree, among, plan.n, draws)
    if len(nodes) != plan.n or not set(nodes) <= set(among) or len(scores) not in (0, len(among)):
        raise ConfigError(
            f"expansion policy {plan.expand!r} chose {nodes!r} with {len(scores)} scores, expected "
            f"{plan.n} of the candidates {among!r} and one score per candidate or none"
        )
    nodes = tuple(among[among.index(node)] for node in nodes)  # a user's string may be of another type
    return NodesChosen(round=round_, nodes=nodes, policy=plan.expand, candidates=among, scores=tuple(scores))


def lacks_observation(node: Node) -> bool:
    """Tell whether nothing can be sampled after a node: no observation, or the void one of a failed tool."""
    seen = node.observation
    return seen is None or (not seen.tokens and seen.prompt_reset is None)


def _missing_requests(tree: Tree, round_: int) -> tuple[Request, ...]:
    """Return the requests of one round that are not recorded yet, in order of their children."""
    if not round_:
        return ()
    chosen = next(expansion for expansion in tree.expansions if expansion.round == round_)
    children: dict[NodeId | None, list[Place]] = {}
    for expansion, name in enumerate(chosen.nodes):
        parent = None if name is None else NodeId(name)
        depth = 0 if parent is None else parse_node(parent).depth + 1
        child = make_node(round_, expansion, depth)
        if child not in tree.nodes and child not in tree.unborn:
            children.setdefault(parent, []).append(Place(tree.index, child))
    return tuple(
        Request(tree.index, parent, tuple(places), _earlier_requests(tree, parent, round_))
        for parent, places in children.items()
    )


def _earlier_requests(tree: Tree, parent: NodeId | None, round_: int) -> int:
    """Return how many requests were made for `parent` before round `round_`."""
    chosen = sum(1 for expansion in tree.expansions if expansion.round < round_ and parent in expansion.nodes)
    if parent is None:
        return chosen + 1
    own_round, expansion, depth = parse_node(parent)
    own = make_node(own_round, expansion, depth + 1)
    return chosen + (own in tree.nodes or own in tree.unborn)
