"""AdamW with decoupled weight decay and clipping by the global norm."""

import math

import numpy as np

from engine.embedded.calls import AdamParams, InputError
from engine.embedded.model import Array, Weights


def check_params(params: AdamParams) -> None:
    """Raise InputError unless every setting is finite and in range."""
    for name, value in params._asdict().items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InputError(f"{name} must be a number, got {value!r}")
        if not math.isfinite(value) or value < 0:
            raise InputError(f"{name} must be finite and >= 0, got {value!r}")
    if params.beta1 >= 1 or params.beta2 >= 1:
        raise InputError(f"beta1 and beta2 must be below 1, got {params.beta1}, {params.beta2}")


def global_norm(tensors: Weights) -> float:
    """Euclidean norm over all tensors together, accumulated in float64."""
    return math.sqrt(math.fsum(float(np.sum(np.square(x, dtype=np.float64))) for x in tensors.values()))


class AdamW:
    """First and second moments of a set of tensors, and the count of steps taken."""

    def __init__(self, tensors: Weights) -> None:
        self.step_count = 0
        self.first: Weights = {name: np.zeros_like(x) for name, x in tensors.items()}
        self.second: Weights = {name: np.zeros_like(x) for name, x in tensors.items()}

    def __repr__(self) -> str:
        return f"AdamW({len(self.first)} tensors, {self.step_count} steps)"

    def step(self, tensors: Weights, grads: Weights, params: AdamParams) -> dict[str, float]:
        """Update `tensors` in place; returns grad_norm (before clipping) and update_norm.

        Raises InputError, with nothing changed, if the gradient or the update is not finite.
        """
        grad_norm = global_norm(grads)
        if not math.isfinite(grad_norm):
            raise InputError(f"gradient norm is {grad_norm!r}: nothing was updated")
        clip = 1.0
        if 0 < params.grad_clip_norm < grad_norm:
            clip = params.grad_clip_norm / grad_norm
        rate = params.learning_rate
        bias1 = 1 - params.beta1 ** (self.step_count + 1)
        bias2 = 1 - params.beta2 ** (self.step_count + 1)
        moments: dict[str, tuple[Array, Array]] = {}
        updates: Weights = {}
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for name, x in tensors.items():
                grad = grads[name] * x.dtype.type(clip)
                first = self.first[name] + (1 - params.beta1) * (grad - self.first[name])
                second = self.second[name] + (1 - params.beta2) * (grad * grad - self.second[name])
                direction = (first / bias1) / (np.sqrt(second / bias2) + params.eps)
                updates[name] = (-rate * (direction + params.weight_decay * x)).astype(x.dtype)
                moments[name] = first, second
            finite = all(np.isfinite(x + updates[name]).all() for name, x in tensors.items())
        if not finite:
            raise InputError(f"the update is not finite with {params!r}: nothing was updated")
        self.step_count += 1
        for name, x in tensors.items():
            self.first[name], self.second[name] = moments[name]
            np.add(x, updates[name], out=x)
        return {"grad_norm": grad_norm, "update_norm": global_norm(updates)}
