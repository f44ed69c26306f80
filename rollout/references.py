"""Owns the base model's logprobs of a group's members, for a KL term: which are missing, and as events."""

from typing import NamedTuple

import numpy as np

from core.arrays import Float32, Int32, pack_logprobs
from core.closing import choose_members
from core.events import ReferenceScored
from core.ids import NodeId
from core.segments import segments
from core.tree import Group, trajectory


class Missing(NamedTuple):
    """One request for logprobs, and the turns whose tokens it covers."""

    tree: int
    tokens: Int32
    """int32 [n]: a whole segment."""
    turns: tuple[NodeId, ...]
    node_index: Int32
    """int32 [n]: position in `turns`, -1 for other tokens."""


def missing_references(group: Group, run_seed: int, tree: int) -> Missing | None:
    """Return the first segment of a member of tree `tree` with a turn that has no reference yet.

    A turn that several members share is asked for once, in the segment of the first of them.
    """
    for member in choose_members(group, run_seed):
        if member.tree != tree:
            continue
        ended = trajectory(group, tree, member.leaf)
        for segment in segments(ended):
            covered = sorted({int(index) for index in np.unique(segment.node_index) if index >= 0})
            open_ = [index for index in covered if ended.path[index].reference is None]
            if open_:
                places = np.full(len(ended.path) + 1, -1, dtype=np.int32)  # the last one is for index -1
                places[open_] = np.arange(len(open_))
                turns = tuple(ended.path[index].node for index in open_)
                return Missing(tree, segment.tokens, turns, places[segment.node_index])
    return None


def reference_events(missing: Missing, logprobs: Float32, base_model: str) -> list[ReferenceScored]:
    """Return the answer to a request as events, one per turn."""
    return [
        ReferenceScored(
            node=turn, logprobs=pack_logprobs(logprobs[missing.node_index == place]), base_model=base_model
        )
        for place, turn in enumerate(missing.turns)
    ]
