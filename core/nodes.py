"""Owns Node and Tree: the turns of one tree in node order, and the way through them."""

from typing import NamedTuple

import msgspec

from core.errors import FoldError
from core.events import (
    Answered,
    NodesChosen,
    Observed,
    ReferenceScored,
    Rewarded,
    ToolCalled,
    TurnSampled,
)
from core.ids import NodeId

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


class Tree(msgspec.Struct, frozen=True):
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

    def path(self, node: NodeId) -> tuple[Node, ...]:
        """Return the nodes from the root down to `node`; raises FoldError when there is no such node."""
        if node not in self.nodes:
            raise FoldError(f"tree {self.index} has no node {node!r}, it has {sorted(self.nodes)}")
        steps = [self.nodes[node]]
        while (parent := steps[-1].parent) is not None:
            steps.append(self.nodes[parent])
        return tuple(reversed(steps))
