"""KV-cached decoding whose arithmetic does not depend on what shares the batch.

BLAS may round a row of a matrix product differently depending on how many rows there are and on
where the row stands (measured here with OpenBLAS: nearly every batch size differed). So:
a prompt is run alone, in shapes that depend on its own length only; and while decoding every
product is a stack of vector-matrix products, one per row, of fixed shape. Attention reads a row's
cache up to its own length rounded up to BUCKET, and masks the rest. Reductions run over the last,
contiguous axis. Rows are ordered by length, so each bucket is one slice of the batch.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.embedded.model import (
    Array,
    ModelConfig,
    Weights,
    forward,
    normalise,
    rotary_tables,
    rotate,
)

BUCKET: Final = 64


class Prefill(NamedTuple):
    """A prompt of n tokens, run."""

    keys: Array
    """[L, H, n, h]"""
    values: Array
    """[L, H, n, h]"""
    hidden: Array
    """[n, d], input of the unembedding at every position."""


def row_products(x: Array, weight: Array) -> Array:
    """Return x [R, K] @ weight [K, N], each row by itself."""
    product: Array = np.matmul(x[:, None, :], weight)[:, 0]
    return product


def prefill(weights: Weights, config: ModelConfig, prompt: NDArray[np.int32]) -> Prefill:
    """Run one prompt [n]."""
    run = forward(weights, config, prompt[None])
    keys = np.stack([layer.key[0] for layer in run.layers])
    values = np.stack([layer.value[0] for layer in run.layers])
    return Prefill(keys, values, run.hidden[0])


class Batch:
    """The caches of R rows that decode together, longest first.

    lengths [R] counts the tokens whose keys and values are stored.
    """

    def __init__(self, weights: Weights, config: ModelConfig, prompts: list[Prefill]) -> None:
        self.weights = weights
        self.config = config
        self.lengths = np.array([len(p.hidden) for p in prompts])
        capacity = (int(self.lengths[0]) // BUCKET + 1) * BUCKET
        layers, heads, _, width = prompts[0].keys.shape
        dtype = prompts[0].keys.dtype
        # keys are stored transposed: [L, R, H, h, capacity]
        self.keys = np.zeros((layers, len(prompts), heads, width, capacity), dtype)
        self.values = np.zeros((layers, len(prompts), heads, capacity, width), dtype)
        for row, (prompt, length) in enumerate(zip(prompts, self.lengths, strict=True)):
            self.keys[:, row, :, :, :length] = prompt.keys.swapaxes(-1, -2)
            self.values[:, row, :, :length] = prompt.values
        self.cos, self.sin = rotary_tables(config.context, width, dtype.str)

    def __repr__(self) -> str:
        return f"Batch({len(self.lengths)} rows, capacity {self.keys.shape[-1]})"

    def keep(self, rows: NDArray[np.intp]) -> None:
        """Drop all rows but these (rising indices)."""
        self.lengths = self.lengths[rows]
        self.keys = self.keys[:, rows]
        self.values = self.values[:, rows]

    def _grow(self) -> None:
        """Make room for another bucket of tokens (two at a time: growing copies)."""
        extra = 2 * BUCKET
        self.keys = np.pad(self.keys, ((0, 0),) * 4 + ((0, extra),))
        self.values = np.pad(self.values, ((0, 0),) * 3 + ((0, extra), (0, 0)))

    def step(self, tokens: NDArray[np.int32]) -> Array:
        """Append one token [R] to every row; returns the logits [R, V] after it."""
        if self.lengths[0] == self.keys.shape[-1]:
            self._grow()
        weights, rows = self.weights, np.arange(len(tokens))
        x = weights["embed"][tokens]
        # a row that has ended idles on until it is dropped, perhaps past the context
        positions = np.minimum(self.lengths, self.config.context - 1)[:, None]
        cos, sin = self.cos[positions], self.sin[positions]
        heads = self.config.heads
        width = self.config.width // heads
        scale = x.dtype.type(width**-0.5)
        for i in range(self.config.layers):
            y, _ = normalise(x, weights[f"{i}.norm1"])
            qkv = row_products(y, weights[f"{i}.qkv"]).reshape(len(tokens), 3, heads, width)
            query = rotate(qkv[:, 0], cos, sin) * scale
            self.keys[i, rows, :, :, self.lengths] = rotate(qkv[:, 1], cos, sin)
            self.values[i, rows, :, self.lengths] = qkv[:, 2]
            attended = self._attend(i, query).reshape(len(tokens), -1)
            x = x + row_products(attended, weights[f"{i}.o"])
            z, _ = normalise(x, weights[f"{i}.norm2"])
            positive = np.maximum(row_products(z, weights[f"{i}.up"]), 0)
            x = x + row_products(positive * positive, weights[f"{i}.down"])
        self.lengths = self.lengths + 1
        hidden, _ = normalise(x, weights["norm"])
        return row_products(hidden, weights["unembed"])

    def _attend(self, layer: int, query: Array) -> Array:
        """Attention of query [R, H, h] over each row's cache, the new token included."""
        output = np.empty_like(query)
        buckets = self.lengths // BUCKET + 1
        start = 0
        while start < len(query):
            stop = int(np.searchsorted(-buckets, -buckets[start], side="right"))
            span = int(buckets[start]) * BUCKET
            scores = query[start:stop, :, None, :] @ self.keys[layer, start:stop, :, :, :span]
            beyond = np.arange(span) > self.lengths[start:stop, None]
            scores[np.broadcast_to(beyond[:, None, None], scores.shape)] = -np.inf
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            output[start:stop] = (scores @ self.values[layer, start:stop, :, :span])[:, :, 0]
            start = stop
        return output
