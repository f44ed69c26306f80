"""Owns the way from advantages per node to advantages per token: prefix weight, then KL term."""

from typing import Literal, NamedTuple

import numpy as np

from core.advantage import LeafTable
from core.arrays import Bool, Float32, Float64, view_logprobs
from core.errors import EstimatorError
from core.segments import Segment
from core.sets import make_sets, set_means, set_sums
from core.tree import Trajectory


class Credit(NamedTuple):
    """Per node of each member's path (the p entries of a leaf table): what its tokens are trained with."""

    advantages: Float64
    """float64 [p]; 0 where not trained."""
    kl_weights: Float64
    """float64 [p]: how many members' KL terms its tokens carry; 0 where not trained."""
    trained: Bool
    """bool [p]."""

    def part(self, start: int, stop: int) -> "Credit":
        """Return the entries from `start` to `stop`, as of one member."""
        return Credit(self.advantages[start:stop], self.kl_weights[start:stop], self.trained[start:stop])


def assign_credit(
    table: LeafTable, entries: Float64, prefix_weight: Literal["each", "once_sum", "once"]
) -> Credit:
    """Return who trains the nodes that several members share, and with what.

    "each": every member, with its own advantage. "once_sum" / "once": the first member in node order alone,
    with the sum / the mean of the members' advantages (and of their equal KL terms).
    """
    if prefix_weight == "each":
        return Credit(entries, np.ones(len(entries)), np.ones(len(entries), dtype=np.bool_))
    sharing = make_sets(table.path_nodes)
    owners = sharing.order[sharing.starts]
    trained = np.zeros(len(entries), dtype=np.bool_)
    trained[owners] = True
    advantages = np.zeros(len(entries))
    kl_weights = np.zeros(len(entries))
    if prefix_weight == "once_sum":
        advantages[owners] = set_sums(entries, sharing)
        kl_weights[owners] = sharing.sizes
    else:
        advantages[owners] = set_means(entries, sharing)
        kl_weights[owners] = 1.0
    return Credit(advantages, kl_weights, trained)


def token_advantages(segment: Segment, member: Trajectory, credit: Credit, kl_beta: float) -> Float64:
    """Return float64 [n]: A_t − w β (sampled_logprob_t − ref_logprob_t) on sampled tokens, 0 elsewhere.

    `credit` is the member's own, one entry per node of its path. Raises EstimatorError when β > 0 and a
    node has no reference logprobs.
    """
    values = np.zeros(len(segment.tokens))
    for turn in segment.turns:
        part = slice(turn.start, turn.stop)
        values[part] = credit.advantages[turn.step]
        if kl_beta:
            gaps = segment.logprobs[part].astype(np.float64) - _reference(member, turn.step)
            values[part] -= credit.kl_weights[turn.step] * kl_beta * gaps
    return values


def _reference(member: Trajectory, step: int) -> Float32:
    """Return float32 [tokens of the turn]: the base model's logprobs of a node's sampled tokens."""
    node = member.path[step]
    if node.reference is None:
        raise EstimatorError(
            f"{member.tree_uid} node {node.node!r} has no reference logprobs, needed by kl_beta > 0"
        )
    values = view_logprobs(node.reference.logprobs)
    if not np.isfinite(values).all():
        raise EstimatorError(f"{member.tree_uid} node {node.node!r}: a reference logprob is not finite")
    return values
