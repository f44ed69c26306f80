"""GSPO as a cross entropy: its weights are the exact gradient of the loss."""

import numpy as np
import pytest
from numpy.typing import NDArray

from core.datum import DatumArrays
from engine.datums import build
from engine.sequence_loss import sequence_weights, surrogate

CONFIG = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def datum(logprobs: list[float], advantage: float) -> DatumArrays:
    """Return a datum of one given and then only trained tokens."""
    count = len(logprobs)
    return DatumArrays(
        np.arange(count + 1),
        np.arange(1, count + 2),
        np.array([0.0, *logprobs], np.float32),
        np.array([0.0] + [advantage] * count, np.float32),
    )


def loss(datums: list[DatumArrays], current: list[NDArray[np.float64]]) -> float:
    """Return L, written down once more."""
    total = 0.0
    for one, logprobs in zip(datums, current, strict=True):
        trained = one.advantages != 0
        ratio = np.exp(np.mean(logprobs[trained] - one.logprobs[trained]))
        advantage = float(one.advantages[trained][0])
        total -= min(ratio * advantage, float(np.clip(ratio, 0.8, 1.2)) * advantage)
    return total / len(datums)


def test_weights_are_the_negative_gradient_of_the_loss() -> None:
    """Against finite differences: within the clip, above it for both signs, below it for both signs."""
    datums = [
        datum([-1.0, -2.0, -0.5], 0.7),
        datum([-1.0, -1.0], 0.7),
        datum([-1.0, -1.0], -0.7),
        datum([-1.0, -1.0], 0.7),
        datum([-1.0, -1.0], -0.7),
    ]
    shifts = [0.05, 0.5, 0.5, -0.5, -0.5]
    current = [one.logprobs.astype(np.float64) + shift for one, shift in zip(datums, shifts, strict=True)]
    weights = sequence_weights(datums, [values.astype(np.float32) for values in current], CONFIG)
    for index, values in enumerate(current):
        for place in range(len(values)):
            slopes = []
            for step in (1e-5, -1e-5):
                moved = [one.copy() for one in current]
                moved[index][place] += step
                slopes.append(loss(datums, moved) / (2 * step))
            assert -sum(slopes) == pytest.approx(float(weights[index][place]), abs=1e-5)
    assert [bool(values.any()) for values in weights] == [True, False, True, True, False]


def test_a_surrogate_keeps_the_tokens_and_replaces_the_rest() -> None:
    """The SDK sees an ordinary cross-entropy datum."""
    arrays = datum([-1.0, -2.0], 0.5)
    made = surrogate(build(arrays), np.array([0, 0.25, 0.25], np.float32))
    assert made.model_input.to_ints() == [0, 1, 2]
    assert made.loss_fn_inputs["target_tokens"].data == [1, 2, 3]
    assert made.loss_fn_inputs["weights"].data == [0, 0.25, 0.25]
    assert set(made.loss_fn_inputs) == {"target_tokens", "weights"}
