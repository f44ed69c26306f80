"""Owns the shape of a group's rollouts: nodes, trees, trajectories, and the fold from events to them.

The fold is pure and refuses contradictions. Any interleaving of a group's trees gives the same Group, and
so does any order inside a tree in which a turn follows its parent's observation: nodes stand in node order,
never in arrival order. A void end may name a turn that was never sampled (the engine failed before it).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from core.errors import FoldError
from core.events import VOID_OUTCOMES, Answered, ChosenLeaf, GroupAsked, GroupEvent, Outcome
from core.growing import Growing
from core.ids import GROUP_STREAM, NodeId, TreeUid, make_tree_uid, make_uid, parse_node
from core.nodes import NUMBER_BYTES, Node, Tree

__all__ = [
    "Group",
    "Node",
    "Trajectory",
    "Tree",
    "fold_group",
    "members",
    "trajectories",
    "trajectory",
]


class Group(NamedTuple):
    """G attempts at one question, as far as they got."""

    uid: str
    asked: GroupAsked
    trees: dict[int, Tree]
    """By tree number, ascending."""


class Trajectory(NamedTuple):
    """The path from the root to an ended leaf."""

    group: Group
    tree: int
    leaf: NodeId
    path: tuple[Node, ...]

    @property
    def tree_uid(self) -> TreeUid:
        """The id shared by the leaves of one tree."""
        return make_tree_uid(self.group.uid, self.tree)

    @property
    def ended(self) -> Answered:
        """The event that ended it."""
        answer = self.path[-1].answer
        assert answer is not None
        return answer

    @property
    def outcome(self) -> Outcome:
        """How it ended."""
        return self.ended.outcome

    @property
    def reward(self) -> float | None:
        """The leaf's reward, None while it is not scored."""
        scored = self.path[-1].reward
        return None if scored is None else scored.value

    @property
    def is_void(self) -> bool:
        """Whether it ended by no doing of the policy."""
        return self.outcome in VOID_OUTCOMES


def fold_group(records: Iterable[tuple[int, GroupEvent]], onto: Group | None = None) -> Group:
    """Return the group that `records`, pairs of tree number and event, tell of.

    `onto` is what earlier records gave: fold_group(a + b) == fold_group(b, onto=fold_group(a)).
    Raises FoldError naming the node and the rule that is broken.
    """
    asked = None if onto is None else onto.asked
    growing = {} if onto is None else {index: Growing(tree) for index, tree in onto.trees.items()}
    for index, event in records:
        if isinstance(event, GroupAsked):
            if index != GROUP_STREAM or asked is not None:
                raise FoldError(f"group record of {event.uid!r} in stream {index}: expected one, in stream 0")
            asked = event
        elif index == GROUP_STREAM:
            raise FoldError(f"{type(event).__name__} in stream 0: expected it in the stream of its tree")
        else:
            if index not in growing:
                growing[index] = Growing(Tree(index, {}, (), {}))
            growing[index].add(event)
    if asked is None:
        raise FoldError("no group record: a group's own stream (tree 0) must hold what was asked")
    _check_asked(asked)
    return Group(asked.uid, asked, {index: growing[index].tree(asked) for index in sorted(growing)})


def trajectory(group: Group, tree: int, leaf: str) -> Trajectory:
    """Return the trajectory that ended at `leaf`; raises FoldError when there is none."""
    if tree not in group.trees:
        raise FoldError(f"group {group.uid} has no tree {tree!r}, it has {sorted(group.trees)}")
    path = group.trees[tree].path(NodeId(leaf))
    if path[-1].answer is None:
        raise FoldError(f"group {group.uid} tree {tree} node {leaf!r} has not ended, so it is no leaf")
    return Trajectory(group, tree, NodeId(leaf), path)


def trajectories(group: Group) -> Iterator[Trajectory]:
    """Yield every ended trajectory in (tree, node) order, void and unscored ones included."""
    for tree in group.trees.values():
        for leaf in tree.leaves():
            yield Trajectory(group, tree.index, leaf.node, tree.path(leaf.node))


def members(group: Group, chosen: Sequence[ChosenLeaf]) -> tuple[Trajectory, ...]:
    """Return the chosen trajectories in (tree, node) order.

    Raises FoldError when one is missing, void, unscored or chosen twice.
    """
    order = sorted(chosen, key=lambda choice: (choice.tree, parse_node(choice.leaf)))
    result = tuple(trajectory(group, choice.tree, choice.leaf) for choice in order)
    seen: set[tuple[int, NodeId]] = set()
    for member in result:
        where = f"group {group.uid} tree {member.tree} leaf {member.leaf!r}"
        if member.is_void:
            raise FoldError(f"{where} ended as {member.outcome.value!r}: a void trajectory is no member")
        if member.reward is None:
            raise FoldError(f"{where} was not scored: only scored trajectories can be members")
        if (member.tree, member.leaf) in seen:
            raise FoldError(f"{where} is chosen twice")
        seen.add((member.tree, member.leaf))
    return result


def _check_asked(asked: GroupAsked) -> None:
    expected = make_uid(asked.ticket, asked.attempt)
    if asked.uid != expected:
        raise FoldError(
            f"group record: uid {asked.uid!r} of ticket {asked.ticket}, attempt {asked.attempt}: "
            f"expected {expected!r}"
        )
    if not asked.prompt or len(asked.prompt) % NUMBER_BYTES:
        raise FoldError(f"group {asked.uid}: prompt of {len(asked.prompt)} bytes, expected int32 token ids")
