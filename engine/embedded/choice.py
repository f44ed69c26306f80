"""Drawing a token: the counter-based random numbers and the filtered distributions."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from engine.embedded.model import Array


def uniforms(seed: int, sample_index: int, prompt: NDArray[np.int32], count: int) -> Array:
    """float64 [count] in [0, 1): the t-th is the draw of the t-th token.

    Philox keyed by SHA-256 of (seed, sample index, prompt): nothing else has an influence.
    """
    head = f"rolltape.sample.v1 {seed} {sample_index}\n".encode()
    digest = hashlib.sha256(head + prompt.astype("<i4").tobytes()).digest()
    key = int.from_bytes(digest[:16], "little")
    draws: Array = np.random.Generator(np.random.Philox(key=key)).random(count)
    return draws


def draw(weights: Array, uniform: float) -> int:
    """Index drawn from non-negative weights [V] by inversion; never one of weight 0."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    target = min(uniform * cumulative[-1], np.nextafter(cumulative[-1], 0.0))
    return int(np.searchsorted(cumulative, target, side="right"))


def filtered_weights(logits: Array, temperature: float, top_p: float, top_k: int) -> Array:
    """float64 [V] unnormalised probabilities after temperature, then top_k, then top_p.

    Both filters keep whole ranks of the order (probability falling, id rising); top_p keeps the
    shortest head whose probability reaches top_p, at least one token.
    """
    scaled = logits.astype(np.float64) / temperature
    weights: Array = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(weights.size), -weights))
    keep = weights.size
    if top_k > 0:
        keep = min(keep, top_k)
    if top_p < 1.0:
        head = np.cumsum(weights[order[:keep]])
        keep = int(np.searchsorted(head, top_p * head[-1], side="left")) + 1
    weights[order[keep:]] = 0.0
    return weights
