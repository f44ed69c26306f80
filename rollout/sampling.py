"""Owns what rollouts ask of a sampler, and how its continuations become recorded turns."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from core.arrays import Float32, Int32, pack_logprobs, pack_tokens
from core.errors import EngineError
from core.events import TurnSampled
from core.ids import parse_node
from rollout.chat import Chat
from rollout.trees import Place, Request


class Continuation(Protocol):
    """One sampled continuation (engine.client.Sampled)."""

    @property
    def tokens(self) -> Int32:
        """int32 [n]."""
        ...

    @property
    def logprobs(self) -> Float32:
        """float32 [n], of the policy that sampled."""
        ...

    @property
    def stop_reason(self) -> str:
        """How the turn ended: "stop" or "length"."""
        ...


class Sampler(Protocol):
    """What rollouts ask of a session (engine.client.Session)."""

    async def sample(  # noqa: PLR0913 the session's own signature
        self,
        weights_uri: str,
        prompt: Int32,
        *,
        num_samples: int,
        seed: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop: Sequence[str],
    ) -> Sequence[Continuation]:
        """Return num_samples continuations of `prompt`."""
        ...

    async def compute_logprobs(self, weights_uri: str, tokens: Int32) -> Float32:
        """Return float32 [n], 0 for the first token."""
        ...

    def fingerprints(self) -> dict[str, str]:
        """Return what identifies the SDK, the base model (`base_model`) and the tokenizer."""
        ...


class Asked(NamedTuple):
    """A request as it was sent."""

    request: Request
    seed: int
    policy_version: int
    seconds: float


def check_continuations(turns: Sequence[Continuation], expected: int) -> None:
    """Raise EngineError unless there is one usable continuation per child."""
    if len(turns) != expected:
        raise EngineError(f"the sampler returned {len(turns)} continuations, expected {expected}")
    for index, turn in enumerate(turns):
        if len(turn.tokens) != len(turn.logprobs):
            raise EngineError(
                f"continuation {index} has {len(turn.tokens)} tokens and {len(turn.logprobs)} logprobs, "
                "expected as many"
            )
        good = np.isfinite(turn.logprobs) & (turn.logprobs <= 0)
        if not good.all():
            place = int(np.argmin(good))
            raise EngineError(
                f"logprob {place} of continuation {index} is {float(turn.logprobs[place])!r}, "
                "expected a finite number <= 0"
            )


def turn_event(chat: Chat, asked: Asked, index: int, turn: Continuation) -> TurnSampled:
    """Return the event of the index-th continuation of a request.

    Where the protocol ends a turn with its first action, tokens that the sampler wrote after it are left out.
    """
    place: Place = asked.request.children[index]
    tokens, text, stop_reason = turn.tokens, chat.text(turn.tokens), turn.stop_reason
    kept = len(tokens)
    if chat.protocol.corrects_invalid:
        kept = chat.kept_tokens(tokens, text, chat.parse(text, stop_reason))
    if kept < len(tokens):
        tokens, text, stop_reason = tokens[:kept], chat.text(tokens[:kept]), "stop"
    return TurnSampled(
        node=place.node,
        parent=asked.request.parent,
        turn=parse_node(place.node).depth,
        tokens=pack_tokens(tokens),
        sampled_logprobs=pack_logprobs(turn.logprobs[:kept]),
        text=text,
        stop_reason=stop_reason,
        seed=asked.seed,
        sample_index=index,
        policy_version=asked.policy_version,
        request=asked.request.ordinal,
        seconds=asked.seconds,
    )
