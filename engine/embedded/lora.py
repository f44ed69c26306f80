"""LoRA by reparametrisation: merge W + s A B, run the plain model, pull the gradient back.

dA = s dW B^T and dB = s A^T dW, so the model itself knows nothing of adapters, and the merged
weights that train are the very ones that sample.
"""

from typing import Final, NamedTuple

import numpy as np

from engine.embedded.calls import InputError
from engine.embedded.model import Array, ModelConfig, Weights

ALPHA: Final = 32.0
"""The update is scaled by ALPHA / rank."""
RANKS: Final = range(4, 65)
"""Ranks that the SDK accepts."""


class LoraConfig(NamedTuple):
    """Which weights have adapters, and of what rank."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def scale(self) -> float:
        """The factor s in W + s A B."""
        return ALPHA / self.rank


def target_names(config: ModelConfig, lora: LoraConfig) -> list[str]:
    """Names of the weights that have an adapter, in a fixed order."""
    names: list[str] = []
    for i in range(config.layers):
        if lora.train_attn:
            names += [f"{i}.qkv", f"{i}.o"]
        if lora.train_mlp:
            names += [f"{i}.up", f"{i}.down"]
    if lora.train_unembed:
        names.append("unembed")
    return names


def init_factors(weights: Weights, config: ModelConfig, lora: LoraConfig, seed: int) -> Weights:
    """Draw A at random and set B to zero: the merged model starts as the base. Keys `<name>.a`, `<name>.b`.

    Raises InputError for a rank outside 4..64 or when nothing would be trained.
    """
    if lora.rank not in RANKS:
        raise InputError(f"LoRA rank {lora.rank!r} is not supported: choose 4 to 64")
    names = target_names(config, lora)
    if not names:
        raise InputError("nothing to train: set train_attn, train_mlp or train_unembed")
    rng = np.random.Generator(np.random.Philox(key=seed % 2**64))
    factors: Weights = {}
    for name in names:
        rows, columns = weights[name].shape
        noise = rng.standard_normal((rows, lora.rank)) * rows**-0.5
        factors[f"{name}.a"] = noise.astype(weights[name].dtype)
        factors[f"{name}.b"] = np.zeros((lora.rank, columns), weights[name].dtype)
    return factors


def _adapted(factors: Weights) -> list[str]:
    return [key.removesuffix(".a") for key in factors if key.endswith(".a")]


def merge(weights: Weights, factors: Weights, scale: float) -> Weights:
    """Add every adapter to its weight; weights without one are shared, not copied."""
    merged = dict(weights)
    for name in _adapted(factors):
        update: Array = factors[f"{name}.a"] @ factors[f"{name}.b"]
        merged[name] = weights[name] + update * weights[name].dtype.type(scale)
    return merged


def factor_gradients(factors: Weights, grads: Weights, scale: float) -> Weights:
    """Gradients of the factors from those of the merged weights."""
    result: Weights = {}
    for name in _adapted(factors):
        step = grads[name] * grads[name].dtype.type(scale)
        result[f"{name}.a"] = step @ factors[f"{name}.b"].T
        result[f"{name}.b"] = factors[f"{name}.a"].T @ step
    return result
