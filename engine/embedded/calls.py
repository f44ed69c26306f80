"""The plain values that cross between the embedded engine's server and its model.

Everything here is an immutable tuple of numbers, arrays and strings, so that the server can build
requests without knowing how the model computes, and the model never sees a wire format.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

IGNORED_TARGET = -100
"""Target id of a position that takes no part in any loss (the SDK's convention)."""

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


class InputError(ValueError):
    """Raised when a request holds something the model cannot compute with."""


class Example(NamedTuple):
    """One datum; every array has the same length n."""

    inputs: IntArray
    """int32 [n], token ids in [0, vocab_size)."""
    targets: IntArray
    """int32 [n], the token to predict at each position, or -100."""
    weights: FloatArray | None = None
    """float32 [n], cross_entropy only; None means 1 everywhere."""
    logprobs: FloatArray | None = None
    """float32 [n], policy losses: logprobs of the policy that sampled the targets."""
    advantages: FloatArray | None = None
    """float32 [n], policy losses: 0 where the token is not trained."""


class Totals(NamedTuple):
    """Counts over the whole logical call, which the SDK may have split into several."""

    total_samples: int
    total_active_tokens: int
    total_advantage_tokens: int


class Loss(NamedTuple):
    """A loss by the SDK's name, with its settings (see losses.py for names and defaults)."""

    name: str
    config: Mapping[str, float]


class ForwardResult(NamedTuple):
    """What one forward or forward_backward call measured."""

    logprobs: list[FloatArray]
    """float32 [n] per example: current logprob of each target, 0 where the target is -100."""
    loss_sum: float
    """Sum of the token losses before any normalisation."""
    loss_mean: float
    """loss_sum / token_count, 0 when there are no tokens."""
    token_count: int
    """Active tokens of this call, counted as the SDK counts them."""


class AdamParams(NamedTuple):
    """AdamW settings, named as in the SDK; grad_clip_norm 0 switches clipping off."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SampleRequest(NamedTuple):
    """Continue one prompt num_samples times."""

    prompt: IntArray
    """int32 [n], n >= 1."""
    max_tokens: int
    num_samples: int = 1
    seed: int = 0
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it before sampling."""
    top_p: float = 1.0
    top_k: int = -1
    """Keep the k most probable tokens; -1 or 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a sequence; they may span several tokens."""
    stop_token_ids: tuple[int, ...] = ()
    return_prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


class Sequence_(NamedTuple):  # noqa: N801 typing and collections.abc own the plain name
    """One sampled continuation."""

    tokens: list[int]
    """Sampled ids, with the token that ended the sequence (end-of-turn or stop) as the last."""
    logprobs: list[float]
    """Log probability of each token under the untempered, unfiltered distribution."""
    text: str
    """Decoded tokens without the special ones."""
    stop_reason: Literal["stop", "length"]


class SampleResult(NamedTuple):
    """All continuations of one request, in sample order."""

    sequences: list[Sequence_]
    prompt_logprobs: list[float | None] | None
    """None first, then the logprob of each prompt token given those before it."""
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None
    """None first, then (token id, logprob) pairs from the most probable on."""
