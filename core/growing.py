"""Owns the rules by which one tree grows from events, and refuses events that contradict each other.

Turns may arrive in any order in which each follows its parent's observation.
"""

from typing import NoReturn, assert_never

from core.errors import FoldError
from core.events import (
    VOID_OUTCOMES,
    Answered,
    GroupAsked,
    NodesChosen,
    Observed,
    ReferenceScored,
    Rewarded,
    ToolCalled,
    TurnSampled,
)
from core.ids import NodeId, NodeParts, parse_node
from core.nodes import NUMBER_BYTES, Node, Tree

TreeEvent = TurnSampled | ToolCalled | Observed | Answered | Rewarded | NodesChosen | ReferenceScored
"""What may stand in a tree's stream."""


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
        """Whether a turn may follow: there is something to read, and the policy did not end here."""
        seen = self.observation
        if seen is None or not (seen.tokens or seen.prompt_reset):
            return False
        return self.answer is None or self.answer.outcome in VOID_OUTCOMES

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


class Growing:
    """One tree while it is folded."""

    def __init__(self, tree: Tree) -> None:
        self.index = tree.index
        self.expansions = list(tree.expansions)
        self.unborn: dict[str, Answered] = {str(node): end for node, end in tree.unborn.items()}
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

    def add(self, event: TreeEvent) -> None:
        """Take one more event in; raises FoldError when it contradicts an earlier one."""
        match event:
            case TurnSampled():
                self._add_sample(event)
            case ToolCalled():
                self._add_call(event)
            case Observed():
                self._add_observation(event)
            case Answered():
                self._add_answer(event)
            case Rewarded():
                self._add_reward(event)
            case NodesChosen():
                self._add_expansion(event)
            case ReferenceScored():
                self._add_reference(event)
            case _:
                assert_never(event)

    def _refuse(self, node: str | None, rule: str) -> NoReturn:
        raise FoldError(f"tree {self.index} node {node!r}: {rule}")

    def _draft(self, node: str, event: TreeEvent) -> _Draft:
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
            self._refuse(event.node, f"parent {event.parent!r} has nothing to go on from, or has ended")
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

    def _add_call(self, event: ToolCalled) -> None:
        draft = self._draft(event.node, event)
        if draft.tool_call is not None or draft.observation is not None or draft.answer is not None:
            self._refuse(event.node, "a tool call after the turn's call, observation or end")
        draft.tool_call = event

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

    def _add_reference(self, event: ReferenceScored) -> None:
        draft = self._draft(event.node, event)
        if draft.reference is not None or len(event.logprobs) != len(draft.sample.tokens):
            self._refuse(event.node, "reference logprobs twice, or not one per sampled token")
        draft.reference = event

    def _add_expansion(self, event: NodesChosen) -> None:
        last = self.expansions[-1].round if self.expansions else 0
        if event.round <= last:
            self._refuse(None, f"expansion round {event.round} after round {last}")
        if event.scores and len(event.scores) != len(event.candidates):
            self._refuse(None, f"{len(event.scores)} scores for {len(event.candidates)} candidates")
        for node in event.nodes:
            if node is not None and not self._draft(node, event).may_continue:
                self._refuse(node, "chosen for expansion, but it has nothing to go on from, or has ended")
        self.expansions.append(event)
