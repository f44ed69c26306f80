"""Owns how the tokens of a path come together: segments of one growing prefix, and the next prompt.

Tokens are only ever joined, never rendered or encoded again. A segment is joined from whole runs of bytes,
and says which runs were sampled; nothing here touches single tokens.
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


class Turn(NamedTuple):
    """Where a sampled turn stands in its segment."""

    start: int
    stop: int
    """Tokens start to stop − 1 are its own."""
    step: int
    """Position of its node in the trajectory's path."""


class Segment(NamedTuple):
    """A stretch of a trajectory with one growing token prefix; nearly always the whole of it."""

    tokens: Int32
    """int32 [n], read-only."""
    logprobs: Float32
    """float32 [n], read-only: at sampling time; 0 where not sampled."""
    turns: tuple[Turn, ...]
    """In order. All other tokens were given: prompt and observations."""

    @property
    def node_index(self) -> Int32:
        """Return int32 [n]: position in the path of the turn that sampled the token, -1 where given."""
        result = np.full(len(self.tokens), NOT_SAMPLED, dtype=np.int32)
        for turn in self.turns:
            result[turn.start : turn.stop] = turn.step
        return result

    @property
    def sampled(self) -> Bool:
        """Return bool [n]: whether the policy sampled the token. What is trained is decided per datum."""
        return np.asarray(self.node_index != NOT_SAMPLED)


class _Parts:
    """A segment before it is joined: its runs of given and of sampled tokens, in order."""

    def __init__(self, prompt: bytes) -> None:
        self.tokens: list[bytes] = []
        self.logprobs: list[bytes] = []
        self.turns: list[Turn] = []
        self.length = 0
        self.give(prompt)

    def give(self, tokens: bytes) -> None:
        """Add given tokens. A float32 zero is four zero bytes: their logprobs cost one fill."""
        self.tokens.append(tokens)
        self.logprobs.append(bytes(len(tokens)))
        self.length += len(tokens) // NUMBER_BYTES

    def sample(self, node: Node, step: int) -> None:
        """Add a sampled turn."""
        self.tokens.append(node.sample.tokens)
        self.logprobs.append(node.sample.sampled_logprobs)
        start = self.length
        self.length += len(node.sample.tokens) // NUMBER_BYTES
        self.turns.append(Turn(start, self.length, step))


def segments(trajectory: Trajectory) -> tuple[Segment, ...]:
    """Return the trajectory's segments in order; together they hold every sampled token exactly once.

    A leaf's own observation is left out: nothing was sampled after it. Raises FoldError when a sampled
    logprob is not finite.
    """
    parts = _parts(trajectory.group.asked.prompt, trajectory.path)
    return tuple(_segment(part, trajectory) for part in parts)


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
    return view_tokens(b"".join([*_parts(group.asked.prompt, path)[-1].tokens, observation.tokens]))


def _parts(prompt: bytes, path: Sequence[Node]) -> list[_Parts]:
    """Return the parts of each segment of a path, the last turn's observation left out."""
    current = _Parts(prompt)
    result = [current]
    observation = None
    for step, node in enumerate(path):
        if observation is not None:
            if observation.prompt_reset is None:
                current.give(observation.tokens)
            else:
                current = _Parts(observation.prompt_reset)
                result.append(current)
        current.sample(node, step)
        observation = node.observation
    return result


def _segment(parts: _Parts, trajectory: Trajectory) -> Segment:
    logprobs = view_logprobs(b"".join(parts.logprobs))
    finite = np.isfinite(logprobs)
    if not finite.all():
        place = int(np.argmin(finite))
        turn = next(turn for turn in parts.turns if place < turn.stop)
        raise FoldError(
            f"{trajectory.tree_uid} node {trajectory.path[turn.step].node!r}: logprob of token "
            f"{place - turn.start} is {float(logprobs[place])!r}, expected a finite number"
        )
    return Segment(view_tokens(b"".join(parts.tokens)), logprobs, tuple(parts.turns))
