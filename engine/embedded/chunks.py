"""Runs training examples through the model in chunks of similar length, forward and backward."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.embedded.calls import IGNORED_TARGET, Example, Loss
from engine.embedded.losses import token_losses
from engine.embedded.model import (
    Array,
    Forward,
    ModelConfig,
    Weights,
    backward,
    forward,
    log_softmax,
)

CHUNK_TOKENS: Final = 1400
"""Padded tokens per forward pass: large enough for BLAS, small enough for the cache."""


class BatchResult(NamedTuple):
    """What a batch of examples gave."""

    logprobs: list[NDArray[np.float32]]
    """float32 [n] per example, 0 where the target is ignored."""
    loss_sum: float
    grads: Weights
    """Gradient of scale x loss by merged weight; empty when none was asked for."""


class _Chunk(NamedTuple):
    """Examples run together; N counts their tokens without padding."""

    run: Forward
    valid: NDArray[np.bool_]
    """[B, T], False at padding."""
    targets: np.ndarray
    """[N], ignored ones replaced by 0."""
    distribution: Array
    """[N, V] log probabilities."""
    logprobs: Array
    """[N] of the targets, 0 where ignored."""


def plan_chunks(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group the indices of examples to run together: sorted by length, at most CHUNK_TOKENS padded."""
    chunk: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if chunk and (len(chunk) + 1) * lengths[index] > CHUNK_TOKENS:
            yield chunk
            chunk = []
        chunk.append(index)
    if chunk:
        yield chunk


def _run_forward(weights: Weights, config: ModelConfig, examples: Sequence[Example]) -> _Chunk:
    length = max(len(example.inputs) for example in examples)
    tokens = np.zeros((len(examples), length), np.int32)
    valid = np.zeros((len(examples), length), bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.inputs)] = example.inputs
        valid[row, : len(example.inputs)] = True
    run = forward(weights, config, tokens)
    distribution = log_softmax(run.hidden[valid] @ weights["unembed"])
    targets = np.concatenate([example.targets for example in examples])
    ignored = targets == IGNORED_TARGET
    targets = np.where(ignored, 0, targets)
    logprobs = distribution[np.arange(len(targets)), targets]
    return _Chunk(run, valid, targets, distribution, np.where(ignored, 0, logprobs))


def _run_backward(weights: Weights, config: ModelConfig, chunk: _Chunk, slopes: Array) -> Weights:
    """Gradients given the slope [N] of the loss in the logprob of each target."""
    # d loss / d logits = slope (onehot - softmax), only where there is a slope
    rows = np.flatnonzero(slopes)
    steps = slopes[rows].astype(chunk.logprobs.dtype)
    d_logits = np.exp(chunk.distribution[rows]) * -steps[:, None]
    d_logits[np.arange(len(rows)), chunk.targets[rows]] += steps
    d_rows = np.zeros((len(slopes), config.width), steps.dtype)
    d_rows[rows] = d_logits @ weights["unembed"].T
    d_hidden = np.zeros_like(chunk.run.hidden)
    d_hidden[chunk.valid] = d_rows
    grads = backward(weights, config, chunk.run, d_hidden)
    grads["unembed"] = chunk.run.hidden[chunk.valid][rows].T @ d_logits
    return grads


def run_examples(
    weights: Weights,
    config: ModelConfig,
    examples: Sequence[Example],
    loss: Loss,
    scale: float | None = None,
) -> BatchResult:
    """Run all examples; with a `scale`, also sum the gradients of scale x loss over the chunks.

    Raises InputError when a loss is not finite.
    """
    logprobs = [np.empty(0, np.float32)] * len(examples)
    loss_sum = 0.0
    total: Weights = {}
    for indices in plan_chunks([len(example.inputs) for example in examples]):
        chunk = _run_forward(weights, config, [examples[i] for i in indices])
        slopes: list[NDArray[np.float64]] = []
        start = 0
        for i in indices:
            own = chunk.logprobs[start : start + len(examples[i].inputs)]
            losses = token_losses(loss, own.astype(np.float64), examples[i])
            logprobs[i] = own.astype(np.float32)
            loss_sum += float(losses.values.sum())
            slopes.append(losses.slopes)
            start += len(own)
        if scale is not None:
            grads = _run_backward(weights, config, chunk, np.concatenate(slopes) * scale)
            total = {name: total[name] + x for name, x in grads.items()} if total else grads
    return BatchResult(logprobs, loss_sum, total)
