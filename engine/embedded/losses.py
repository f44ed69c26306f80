"""The SDK's losses as token losses and their slopes.

With p = current logprob of a target, q = its sampled logprob, A = its advantage, w = its weight
and ratio = exp(p - q), the loss of a token is

  cross_entropy        -w p
  importance_sampling  -ratio A
  ppo                  -min(ratio A, clip(ratio, low, high) A)
  cispo                -stop_gradient(clip(ratio, low, high)) A p
  dro                  -(A p - beta/2 (p - q)^2)

Config: clip_low_threshold 0.8 and clip_high_threshold 1.2 (ppo, cispo; bounds of the ratio itself),
beta 0.05 (dro). A token with target -100 or advantage 0 has loss 0 in every policy loss (the
quadratic term of dro included: prompt and observation tokens carry no sampled logprob).

Policy losses: L = (1 / total_samples) sum over datums and tokens. Cross-entropy: L = plain sum over
datums and tokens, as forward_backward_custom needs, which sends -dL/dp as weights and expects
exactly dL/dp back. Either way the parts of a split call add up to the gradient of the whole call.
"""

import difflib
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.embedded.calls import IGNORED_TARGET, Example, InputError, Loss, Totals

_CLIP: Final = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
DEFAULTS: Final[Mapping[str, Mapping[str, float]]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIP,
    "cispo": _CLIP,
    "dro": {"beta": 0.05},
}
"""Settings of every loss with their defaults."""


class TokenLosses(NamedTuple):
    """Token losses of some positions, float64 [n] each."""

    values: NDArray[np.float64]
    slopes: NDArray[np.float64]
    """Derivative of each value with respect to the token's current logprob."""


def resolve_loss(loss: Loss) -> Loss:
    """Fill in defaults. Raises InputError for an unknown loss, setting or a value out of range."""
    if loss.name not in DEFAULTS:
        raise InputError(f"unknown loss {loss.name!r}: expected one of {', '.join(DEFAULTS)}")
    defaults = DEFAULTS[loss.name]
    config = dict(defaults)
    for key, value in loss.config.items():
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, 1) or list(defaults)
            hint = f"did you mean {near[0]!r}?" if near else "it takes no settings"
            raise InputError(f"unknown setting {key!r} of loss {loss.name!r}: {hint}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
            raise InputError(f"loss setting {key} must be a number >= 0, got {value!r}")
        config[key] = float(value)
    if config.get("clip_low_threshold", 0.0) > config.get("clip_high_threshold", 0.0):
        raise InputError(f"clip_low_threshold exceeds clip_high_threshold: {config!r}")
    return Loss(loss.name, config)


def loss_scale(loss: Loss, totals: Totals) -> float:
    """Factor that turns the sum of token losses into the loss whose gradient is taken."""
    if loss.name == "cross_entropy":
        return 1.0
    if totals.total_samples < 1:
        raise InputError(f"total_samples must be at least 1, got {totals.total_samples!r}")
    return 1.0 / totals.total_samples


def active_tokens(example: Example, loss: Loss) -> int:
    """Tokens that the SDK counts as active: labelled, and with non-zero weight in cross_entropy."""
    labelled = example.targets != IGNORED_TARGET
    if loss.name == "cross_entropy" and example.weights is not None:
        labelled = labelled & (example.weights != 0)
    return int(np.count_nonzero(labelled))


def _clip_bounds(loss: Loss) -> tuple[float, float]:
    return loss.config["clip_low_threshold"], loss.config["clip_high_threshold"]


def _policy_losses(
    loss: Loss, p: NDArray[np.float64], q: NDArray[np.float64], a: NDArray[np.float64]
) -> TokenLosses:
    """Apply the formulas of the module docstring to tokens with non-zero advantage."""
    with np.errstate(over="ignore"):  # an infinite ratio is reported by the caller
        ratio = np.exp(p - q)
    match loss.name:
        case "importance_sampling":
            return TokenLosses(-ratio * a, -ratio * a)
        case "ppo":
            clipped = np.clip(ratio, *_clip_bounds(loss)) * a
            free = ratio * a
            return TokenLosses(-np.minimum(free, clipped), np.where(free <= clipped, -free, 0.0))
        case "cispo":
            weight = np.clip(ratio, *_clip_bounds(loss)) * a
            return TokenLosses(-weight * p, -weight)
        case _:
            beta = loss.config["beta"]
            gap = p - q
            return TokenLosses(-(a * p - 0.5 * beta * gap * gap), -a + beta * gap)


def token_losses(loss: Loss, logprobs: NDArray[np.float64], example: Example) -> TokenLosses:
    """Losses of one example given the current logprobs of its targets, float64 [n].

    Raises InputError when a loss is not finite (sampled logprobs far from the current ones).
    """
    values, slopes = np.zeros_like(logprobs), np.zeros_like(logprobs)
    labelled = example.targets != IGNORED_TARGET
    if loss.name == "cross_entropy":
        weights = np.ones(len(logprobs)) if example.weights is None else example.weights
        slopes[labelled] = -weights.astype(np.float64)[labelled]
        values = slopes * logprobs
    else:
        if example.logprobs is None or example.advantages is None:
            raise InputError(f"loss {loss.name!r} needs logprobs and advantages in every datum")
        advantages = example.advantages.astype(np.float64)
        trained = labelled & (advantages != 0)
        sampled = example.logprobs.astype(np.float64)
        part = _policy_losses(loss, logprobs[trained], sampled[trained], advantages[trained])
        values[trained], slopes[trained] = part
    if not (np.isfinite(values).all() and np.isfinite(slopes).all()):
        raise InputError(f"loss {loss.name!r} is not finite: check the sampled logprobs")
    return TokenLosses(values, slopes)
