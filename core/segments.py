"""Owns how the tokens of a path come together: segments of one growing prefix, and the next prompt.

Tokens are only ever joined, never rendered or encoded again. A segment's arrays are built by whole-run
copies (bytes.join and numpy.repeat); nothing here touches single tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.arrays import Bool, Float32, Int32, view_logprobs, view_tokens
from core.errors import FoldError
from core.ids import NodeId
from core.nodes import NUMBER_BYTES, Node
from core.tree import Group, Trajectory

NOT_SAMPLED = -1
"""`node_index` of a token that the policy was given."""


class Segment(NamedTuple):
    """A stretch of a trajectory with one growing token prefix; nearly always the whole of it."""

    tokens: Int32
    """int32 [n], read-only."""
    sampled: Bool
    """bool [n]: the policy sampled this token (a fact; whether it is trained is decided per datum)."""
    logprobs: Float32
    """float32 [n], at sampling time; 0 where not sampled."""
    node_index: Int32
    """int32 [n]: position in the trajectory's path of the turn that sampled it, -1 elsewhere."""


class _Run(NamedTuple):
    """Consecutive tokens of one kind."""

    tokens: bytes
    logprobs: bytes | None
    node_index: int


def segments(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Return the trajectory's segments in order; together they hold every sampled token exactly once.

    A leaf's own observation is left out: nothing was sampled after it. Raises FoldError when a sampled
    logprob is not finite.
    """
    return tuple(_segment(runs, trajectory) for runs in _runs(trajectory.group.asked.prompt, trajectory.path))


def next_prompt(group: Group, tree: int, node: NodeId | None) -> Int32:
    """Return the int32 [n] prompt from which the turn after `node` (None: the first) is sampled.

    Raises FoldError when there is no such node, or when it has no observation.
    """
    if node is None:
        return view_tokens(group.asked.prompt)
    path = group.trees[tree].path(node)
    observation = path[-1].observation
    if observation is None:
        raise FoldError(f"group {group.uid} tree {tree} node {node!r} has no observation to go on from")
    if observation.prompt_reset is not None:
        return view_tokens(observation.prompt_reset)
    last = _runs(group.asked.prompt, path)[-1]
    return view_tokens(b"".join([*(run.tokens for run in last), observation.tokens]))


def _runs(prompt: bytes, path: Sequence[Node]) -> list[list[_Run]]:
    """Return, per segment, its runs of given and sampled tokens."""
    current = [_Run(prompt, None, NOT_SAMPLED)]
    result = [current]
    for index, node in enumerate(path):
        if index:
            observation = path[index - 1].observation
            assert observation is not None  # the fold lets nothing be sampled before it
            if observation.prompt_reset is None:
                current.append(_Run(observation.tokens, None, NOT_SAMPLED))
            else:
                current = [_Run(observation.prompt_reset, None, NOT_SAMPLED)]
                result.append(current)
        current.append(_Run(node.sample.tokens, node.sample.sampled_logprobs, index))
    return result


def _segment(runs: Sequence[_Run], trajectory: Trajectory) -> Segment:
    counts = [len(run.tokens) // NUMBER_BYTES for run in runs]
    indices = np.array([run.node_index for run in runs], dtype=np.int32)
    # A float32 zero is four zero bytes, so that given tokens cost one fill instead of one array each.
    logprobs = view_logprobs(
        b"".join(bytes(len(run.tokens)) if run.logprobs is None else run.logprobs for run in runs)
    )
    if not np.isfinite(logprobs).all():
        _refuse_logprob(runs, trajectory)
    return Segment(
        tokens=view_tokens(b"".join(run.tokens for run in runs)),
        sampled=np.repeat(indices != NOT_SAMPLED, counts),
        logprobs=logprobs,
        node_index=np.repeat(indices, counts),
    )


def _refuse_logprob(runs: Sequence[_Run], trajectory: Trajectory) -> None:
    for run in runs:
        if run.logprobs is not None:
            values = view_logprobs(run.logprobs)
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                raise FoldError(
                    f"{trajectory.tree_uid} node {trajectory.path[run.node_index].node!r}: logprob of token "
                    f"{bad[0]} is {float(values[bad[0]])!r}, expected a finite number"
                )
