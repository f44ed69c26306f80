"""The transformer: forward and hand-written backward, in numpy.

Decoder-only, RMSNorm before each part, rotary positions, relu-squared feed-forward, no biases.
Shapes: B sequences, T positions (padded at the end), d = width, H heads of h = d / H, V = vocabulary.
Every function works in the dtype of the weights: float32 in use, float64 for gradient checks.
The causal mask keeps padding at the end of a sequence from touching anything before it.
"""

from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = np.ndarray
"""A floating array of the dtype of the weights."""
Weights: TypeAlias = dict[str, Array]
"""embed [V, d], norm [d], unembed [d, V]; per layer i: i.norm1 [d], i.qkv [d, 3d], i.o [d, d],
i.norm2 [d], i.up [d, f], i.down [f, d]."""

NORM_EPSILON: Final = 1e-6
ROTARY_BASE: Final = 10_000.0


class ModelConfig(NamedTuple):
    """Sizes of the model."""

    vocab_size: int
    width: int = 64
    layers: int = 2
    heads: int = 4
    hidden: int = 192
    context: int = 2048


class NormCache(NamedTuple):
    """What the backward pass of one RMSNorm needs."""

    unit: Array
    """[B, T, d], the input divided by its root mean square."""
    inverse: Array
    """[B, T, 1], 1 / root mean square."""


class LayerCache(NamedTuple):
    """What the backward pass of one layer needs."""

    norm1: NormCache
    attended_input: Array
    query: Array
    """[B, H, T, h], rotated and divided by sqrt(h)."""
    key: Array
    """[B, H, T, h], rotated."""
    value: Array
    weights: Array
    """[B, H, T, T], attention after softmax."""
    attended: Array
    """[B, T, d], heads side by side."""
    norm2: NormCache
    hidden_input: Array
    positive: Array
    """[B, T, f], relu of the up projection."""


class Forward(NamedTuple):
    """Result of a forward pass, enough for its backward pass."""

    tokens: NDArray[np.int32]
    layers: list[LayerCache]
    norm: NormCache
    hidden: Array
    """[B, T, d], input of the unembedding."""


def init_weights(config: ModelConfig, seed: int) -> Weights:
    """Random float32 weights; parts that write to the residual stream start smaller."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    d, f = config.width, config.hidden

    def normal(rows: int, columns: int, scale: float) -> Array:
        return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    residual = 1.0 / np.sqrt(2 * config.layers)
    weights: Weights = {"embed": normal(config.vocab_size, d, 0.5)}
    for i in range(config.layers):
        weights[f"{i}.norm1"] = np.ones(d, np.float32)
        weights[f"{i}.qkv"] = normal(d, 3 * d, d**-0.5)
        weights[f"{i}.o"] = normal(d, d, residual * d**-0.5)
        weights[f"{i}.norm2"] = np.ones(d, np.float32)
        weights[f"{i}.up"] = normal(d, f, d**-0.5)
        weights[f"{i}.down"] = normal(f, d, residual * f**-0.5)
    weights["norm"] = np.ones(d, np.float32)
    weights["unembed"] = normal(d, config.vocab_size, 0.5 * d**-0.5)
    return weights


def normalise(x: Array, gain: Array) -> tuple[Array, NormCache]:
    """RMSNorm over the last axis."""
    inverse = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + NORM_EPSILON)
    unit = x * inverse
    return unit * gain, NormCache(unit, inverse)


def _normalise_backward(dy: Array, gain: Array, cache: NormCache) -> tuple[Array, Array]:
    """Gradients of (input, gain)."""
    unit, inverse = cache
    d_gain = (dy * unit).reshape(-1, gain.size).sum(axis=0)
    d_unit = dy * gain
    dx = inverse * (d_unit - unit * np.mean(d_unit * unit, axis=-1, keepdims=True))
    return dx, d_gain


@lru_cache(maxsize=8)
def rotary_tables(positions: int, head_width: int, dtype: str) -> tuple[Array, Array]:
    """Return cos and sin, each [positions, h / 2]."""
    frequencies = ROTARY_BASE ** (-np.arange(0, head_width, 2) / head_width)
    angles = np.arange(positions)[:, None] * frequencies
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (i, i + h/2) of the last axis; with -sin it is the inverse."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, first * sin + second * cos), axis=-1)


def split_heads(x: Array, heads: int) -> Array:
    """[B, T, d] to [B, H, T, h]."""
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Array) -> Array:
    """[B, H, T, h] to [B, T, d]."""
    batch, heads, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width)


def _attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Causal attention of scaled queries; returns (output [B, H, T, h], weights [B, H, T, T])."""
    length = q.shape[2]
    scores = q @ k.swapaxes(-1, -2)
    scores += np.triu(np.full((length, length), -np.inf, q.dtype), k=1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores @ v, scores


def forward(weights: Weights, config: ModelConfig, tokens: NDArray[np.int32]) -> Forward:
    """Run the model on tokens [B, T] up to the input of the unembedding."""
    x = weights["embed"][tokens]
    head_width = config.width // config.heads
    cos, sin = rotary_tables(config.context, head_width, x.dtype.str)
    cos, sin = cos[: tokens.shape[1]], sin[: tokens.shape[1]]
    scale = x.dtype.type(head_width**-0.5)
    layers: list[LayerCache] = []
    for i in range(config.layers):
        y, norm1 = normalise(x, weights[f"{i}.norm1"])
        q, k, v = (split_heads(p, config.heads) for p in np.split(y @ weights[f"{i}.qkv"], 3, -1))
        q = rotate(q, cos, sin) * scale
        k = rotate(k, cos, sin)
        output, attention = _attention(q, k, v)
        attended = merge_heads(output)
        x = x + attended @ weights[f"{i}.o"]
        z, norm2 = normalise(x, weights[f"{i}.norm2"])
        positive = np.maximum(z @ weights[f"{i}.up"], 0)
        x = x + (positive * positive) @ weights[f"{i}.down"]
        layers.append(LayerCache(norm1, y, q, k, v, attention, attended, norm2, z, positive))
    hidden, norm = normalise(x, weights["norm"])
    return Forward(tokens, layers, norm, hidden)


def _outer(x: Array, dy: Array) -> Array:
    """Gradient of W in y = x @ W, summed over all positions."""
    grad: Array = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
    return grad


def _attention_backward(
    d_output: Array, cache: LayerCache, cos: Array, sin: Array
) -> tuple[Array, Array, Array]:
    """Gradients of (query, key, value) before rotation, each [B, H, T, h]."""
    d_value = cache.weights.swapaxes(-1, -2) @ d_output
    d_weights = d_output @ cache.value.swapaxes(-1, -2)
    d_weights -= (d_weights * cache.weights).sum(axis=-1, keepdims=True)
    d_weights *= cache.weights
    scale = d_output.dtype.type(d_output.shape[-1] ** -0.5)
    d_query = rotate(d_weights @ cache.key, cos, -sin) * scale
    d_key = rotate(d_weights.swapaxes(-1, -2) @ cache.query, cos, -sin)
    return d_query, d_key, d_value


def _scatter_rows(rows: Array, index: NDArray[np.int32], count: int) -> Array:
    """Sum rows [n, d] by index [n] into [count, d], in a fixed order of addition."""
    order = np.argsort(index, kind="stable")
    present, starts = np.unique(index[order], return_index=True)
    result = np.zeros((count, rows.shape[1]), rows.dtype)
    result[present] = np.add.reduceat(rows[order], starts, axis=0)
    return result


def backward(weights: Weights, config: ModelConfig, run: Forward, d_hidden: Array) -> Weights:
    """Gradients of all weights but unembed, given that of `run.hidden` [B, T, d]."""
    length = run.tokens.shape[1]
    head_width = config.width // config.heads
    cos, sin = rotary_tables(config.context, head_width, d_hidden.dtype.str)
    cos, sin = cos[:length], sin[:length]
    grads: Weights = {}
    dx, grads["norm"] = _normalise_backward(d_hidden, weights["norm"], run.norm)
    for i in reversed(range(config.layers)):
        cache = run.layers[i]
        squared = cache.positive * cache.positive
        grads[f"{i}.down"] = _outer(squared, dx)
        d_up = (dx @ weights[f"{i}.down"].T) * cache.positive * 2
        grads[f"{i}.up"] = _outer(cache.hidden_input, d_up)
        dz, grads[f"{i}.norm2"] = _normalise_backward(
            d_up @ weights[f"{i}.up"].T, weights[f"{i}.norm2"], cache.norm2
        )
        dx = dx + dz
        grads[f"{i}.o"] = _outer(cache.attended, dx)
        d_heads = split_heads(dx @ weights[f"{i}.o"].T, config.heads)
        parts = _attention_backward(d_heads, cache, cos, sin)
        d_qkv = np.concatenate([merge_heads(part) for part in parts], axis=-1)
        grads[f"{i}.qkv"] = _outer(cache.attended_input, d_qkv)
        dy, grads[f"{i}.norm1"] = _normalise_backward(
            d_qkv @ weights[f"{i}.qkv"].T, weights[f"{i}.norm1"], cache.norm1
        )
        dx = dx + dy
    rows = dx.reshape(-1, dx.shape[-1])
    grads["embed"] = _scatter_rows(rows, run.tokens.reshape(-1), config.vocab_size)
    return grads


def log_softmax(logits: Array) -> Array:
    """Log probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))  # type: ignore[no-any-return]
