"""Owns the shape of a group's rollouts: nodes, trees, trajectories, and the fold from events to them.

The fold is pure and refuses contradictions. Any interleaving of a group's trees gives the same Group, and
so does any order inside a tree in which a turn follows its parent's observation: nodes stand in node order,
never in arrival order. A void end may name a turn that was never sampled (the engine failed before it).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn, assert_never

from core.errors import FoldError
from core.events import (
    VOID_OUTCOMES,
    Answered,
    ChosenLeaf,
    GroupAsked,
    GroupEvent,
    NodesChosen,
    Observed,
    Outcome,
    ReferenceScored,
    Rewarded,
    ToolCalled,
    TurnSampled,
)
from core.ids import GROUP_STREAM, NodeId, NodeParts, TreeUid, make_tree_uid, parse_node, parse_uid

NUMBER_BYTES = 4
"""Bytes of one stored token id (int32) or logprob (float32)."""


class Node(NamedTuple):
    """One agent step: a sampled turn, and what came of it."""

    node: NodeId
    parent: NodeId | None
    """None is the root, the prompt itself."""
    turn: int
    sample: TurnSampled
    tool_call: ToolCalled | None = None
    observation: Observed | None = None
    answer: Answered | None = None
    reward: Rewarded | None = None
    """Of the leaf."""
    node_reward: Rewarded | None = None
    reference: ReferenceScored | None = None


class Tree(NamedTuple):
    """One tree of a group; in chain mode, one trajectory."""

    index: int
    """From 1."""
    nodes: dict[NodeId, Node]
    """In node order."""
    expansions: tuple[NodesChosen, ...]
    """In round order."""
    unborn: dict[NodeId, Answered]
    """Void ends of turns that were never sampled, in node order."""

    def children(self, node: NodeId | None) -> tuple[Node, ...]:
        """Return the turns sampled after `node` (None: after the prompt), in node order."""
        return tuple(child for child in self.nodes.values() if child.parent == node)

    def leaves(self) -> tuple[Node, ...]:
        """Return the ended nodes, void ones included, in node order."""
        return tuple(node for node in self.nodes.values() if node.answer is not None)

    def open_tips(self) -> tuple[Node, ...]:
        """Return the nodes that neither ended nor were continued, in node order."""
        continued = {node.parent for node in self.nodes.values()}
        return tuple(
            node for node in self.nodes.values() if node.answer is None and node.node not in continued
        )

    def path(self, node: NodeId) -> tuple[Node, ...]:
        """Return the nodes from the root down to `node`; raises FoldError when there is no such node."""
        if node not in self.nodes:
            raise FoldError(f"tree {self.index} has no node {node!r}, it has {sorted(self.nodes)}")
        steps = [self.nodes[node]]
        while (parent := steps[-1].parent) is not None:
            steps.append(self.nodes[parent])
        return tuple(reversed(steps))


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
    growing = {} if onto is None else {index: _Growing(tree) for index, tree in onto.trees.items()}
    for index, event in records:
        if isinstance(event, GroupAsked):
            if index != GROUP_STREAM or asked is not None:
                raise FoldError(f"group record of {event.uid!r} in stream {index}: expected one, in stream 0")
            asked = event
        elif index == GROUP_STREAM:
            raise FoldError(f"{type(event).__name__} in stream 0: expected it in the stream of its tree")
        else:
            if index not in growing:
                growing[index] = _Growing(Tree(index, {}, (), {}))
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
    if parse_uid(asked.uid) != (asked.ticket, asked.attempt):
        raise FoldError(
            f"group record: uid {asked.uid!r} does not say ticket {asked.ticket}, attempt {asked.attempt}"
        )
    if not asked.prompt or len(asked.prompt) % NUMBER_BYTES:
        raise FoldError(f"group {asked.uid}: prompt of {len(asked.prompt)} bytes, expected int32 token ids")


class _Draft:
    """One node while it is folded: what Node holds, and whether it was continued."""

    __slots__ = (
        "answer",
        "continued",
        "node_reward",
        "observation",
        "parts",
        "reference",
        "reward",
        "sample",
        "tool_call",
    )

    def __init__(self, sample: TurnSampled, parts: NodeParts) -> None:
        self.sample = sample
        self.parts = parts
        self.tool_call: ToolCalled | None = None
        self.observation: Observed | None = None
        self.answer: Answered | None = None
        self.reward: Rewarded | None = None
        self.node_reward: Rewarded | None = None
        self.reference: ReferenceScored | None = None
        self.continued = False

    @property
    def may_continue(self) -> bool:
        return self.observation is not None and (
            self.answer is None or self.answer.outcome in VOID_OUTCOMES
        )

    def node(self) -> Node:
        sample = self.sample
        parent = None if sample.parent is None else NodeId(sample.parent)
        return Node(
            NodeId(sample.node),
            parent,
            sample.turn,
            sample,
            self.tool_call,
            self.observation,
            self.answer,
            self.reward,
            self.node_reward,
            self.reference,
        )


class _Growing:
    """One tree while it is folded."""

    def __init__(self, tree: Tree) -> None:
        self.index = tree.index
        self.expansions = list(tree.expansions)
        self.unborn: dict[str, Answered] = dict(tree.unborn)
        self.drafts: dict[str, _Draft] = {}
        for node in tree.nodes.values():
            draft = self.drafts[node.node] = _Draft(node.sample, parse_node(node.node))
            for field in Node._fields[4:]:
                setattr(draft, field, getattr(node, field))
            if node.parent is not None:
                self.drafts[node.parent].continued = True

    def tree(self, asked: GroupAsked) -> Tree:
        """Return the frozen tree."""
        ordered = sorted(self.drafts.values(), key=lambda draft: draft.parts)
        for draft in ordered:
            if draft.sample.policy_version != asked.policy_version:
                self._refuse(
                    draft.sample.node,
                    f"sampled from policy version {draft.sample.policy_version}, "
                    f"but group {asked.uid} is pinned to {asked.policy_version}",
                )
        nodes = {NodeId(draft.sample.node): draft.node() for draft in ordered}
        unborn = {NodeId(node): self.unborn[node] for node in sorted(self.unborn, key=parse_node)}
        return Tree(self.index, nodes, tuple(self.expansions), unborn)

    def add(self, event: GroupEvent) -> None:
        """Take one more event in; raises FoldError when it contradicts an earlier one."""
        match event:
            case TurnSampled():
                self._add_sample(event)
            case ToolCalled():
                draft = self._draft(event.node, event)
                if draft.tool_call is not None or draft.observation is not None or draft.answer is not None:
                    self._refuse(event.node, "a tool call after the turn's call, observation or end")
                draft.tool_call = event
            case Observed():
                self._add_observation(event)
            case Answered():
                self._add_answer(event)
            case Rewarded():
                self._add_reward(event)
            case NodesChosen():
                self._add_expansion(event)
            case ReferenceScored():
                draft = self._draft(event.node, event)
                if draft.reference is not None or len(event.logprobs) != len(draft.sample.tokens):
                    self._refuse(event.node, "reference logprobs twice, or not one per sampled token")
                draft.reference = event
            case GroupAsked():
                self._refuse(event.uid, "a group record inside a tree")
            case _:
                assert_never(event)

    def _refuse(self, node: str | None, rule: str) -> NoReturn:
        raise FoldError(f"tree {self.index} node {node!r}: {rule}")

    def _draft(self, node: str, event: GroupEvent) -> _Draft:
        draft = self.drafts.get(node)
        if draft is None:
            self._refuse(node, f"{type(event).__name__} for a turn that was not sampled before it")
        return draft

    def _add_sample(self, event: TurnSampled) -> None:
        parts = parse_node(event.node)
        if event.node in self.drafts or event.node in self.unborn:
            self._refuse(event.node, "sampled twice, or after its end")
        if len(event.tokens) % NUMBER_BYTES or len(event.tokens) != len(event.sampled_logprobs):
            self._refuse(
                event.node,
                f"{len(event.tokens)} bytes of tokens and {len(event.sampled_logprobs)} of logprobs, "
                "expected equal multiples of 4",
            )
        parent = self._parent(event)
        depth = 0 if parent is None else parent.sample.turn + 1
        if not event.turn == parts.depth == depth:
            self._refuse(event.node, f"turn {event.turn} below parent {event.parent!r}, expected {depth}")
        if parent is None or parent.parts[:2] != parts[:2]:
            self._check_start(event, parts)
        if parent is not None:
            parent.continued = True
        self.drafts[event.node] = _Draft(event, parts)

    def _parent(self, event: TurnSampled) -> _Draft | None:
        if event.parent is None:
            return None
        parent = self.drafts.get(event.parent)
        if parent is None:
            self._refuse(event.node, f"an orphan: parent {event.parent!r} was not sampled before it")
        if not parent.may_continue:
            self._refuse(event.node, f"parent {event.parent!r} has no observation, or has ended")
        return parent

    def _check_start(self, event: TurnSampled, parts: NodeParts) -> None:
        """Refuse a first turn of an expansion that starts elsewhere than was chosen."""
        starts: tuple[str | None, ...] = (None,)
        if parts.round:
            starts = next((e.nodes for e in self.expansions if e.round == parts.round), ())
        if parts.expansion >= len(starts) or starts[parts.expansion] != event.parent:
            self._refuse(
                event.node,
                f"starts from {event.parent!r}, but round {parts.round} chose {list(starts)!r}",
            )

    def _add_observation(self, event: Observed) -> None:
        draft = self._draft(event.node, event)
        if draft.observation is not None or draft.answer is not None:
            self._refuse(event.node, "an observation after the turn's observation or end")
        if len(event.tokens) % NUMBER_BYTES:
            self._refuse(event.node, f"observation of {len(event.tokens)} bytes, expected int32 token ids")
        reset = event.prompt_reset
        if reset is not None and (not reset or len(reset) % NUMBER_BYTES):
            self._refuse(event.node, f"prompt_reset of {len(reset)} bytes, expected int32 token ids")
        called = "" if draft.tool_call is None else draft.tool_call.call_id
        if event.call_id not in ("", called):
            self._refuse(event.node, f"observation of call {event.call_id!r}, expected {called!r}")
        draft.observation = event

    def _add_answer(self, event: Answered) -> None:
        void = event.outcome in VOID_OUTCOMES
        if void and event.leaf not in self.drafts:
            parse_node(event.leaf)
            if event.leaf in self.unborn:
                self._refuse(event.leaf, "ended twice")
            self.unborn[event.leaf] = event
            return
        draft = self._draft(event.leaf, event)
        if draft.answer is not None or (draft.continued and not void):
            self._refuse(event.leaf, "ended twice, or after it was continued")
        draft.answer = event

    def _add_reward(self, event: Rewarded) -> None:
        draft = self._draft(event.node, event)
        if event.scope == "node":
            if draft.node_reward is not None:
                self._refuse(event.node, "scored twice as a node")
            draft.node_reward = event
            return
        if event.scope != "leaf":
            self._refuse(event.node, f"reward of scope {event.scope!r}, expected 'leaf' or 'node'")
        if draft.answer is None or draft.answer.outcome in VOID_OUTCOMES:
            self._refuse(event.node, "scored although it has not ended, or ended void")
        if draft.reward is not None:
            self._refuse(event.node, "scored twice")
        draft.reward = event

    def _add_expansion(self, event: NodesChosen) -> None:
        last = self.expansions[-1].round if self.expansions else 0
        if event.round <= last:
            self._refuse(None, f"expansion round {event.round} after round {last}")
        if event.scores and len(event.scores) != len(event.candidates):
            self._refuse(None, f"{len(event.scores)} scores for {len(event.candidates)} candidates")
        for node in event.nodes:
            if node is not None and not self._draft(node, event).may_continue:
                self._refuse(node, "chosen for expansion, but it has no observation, or has ended")
        self.expansions.append(event)
