"""Hand-written gradients against finite differences, in float64."""

import numpy as np
import pytest

from engine.embedded.base_model import BASE_FOLDER, BaseModel
from engine.embedded.calls import Example, Loss, Totals
from engine.embedded.chunks import run_examples
from engine.embedded.losses import DEFAULTS, resolve_loss
from engine.embedded.model import ModelConfig, Weights, init_weights
from engine.embedded.trainable import TrainableModel

CONFIG = ModelConfig(vocab_size=37, width=16, layers=2, heads=4, hidden=24, context=64)
STEP = 1e-6


def random_examples(vocab_size: int, seed: int) -> list[Example]:
    """Examples of several lengths with ratios near 1, an ignored target and untrained tokens."""
    rng = np.random.default_rng(seed)
    examples = []
    for length in (5, 9, 12):
        targets = rng.integers(0, vocab_size, length).astype(np.int32)
        targets[2] = -100
        advantages = rng.standard_normal(length).astype(np.float32)
        advantages[:2] = 0
        examples.append(
            Example(
                rng.integers(0, vocab_size, length).astype(np.int32),
                targets,
                rng.standard_normal(length).astype(np.float32),
                rng.normal(-np.log(vocab_size), 0.3, length).astype(np.float32),
                advantages,
            )
        )
    return examples


def numeric(weights: Weights, name: str, index: tuple[int, ...], loss_of: object) -> float:
    """Central difference of loss_of() in one number of the weights."""
    assert callable(loss_of)
    kept = weights[name][index]
    weights[name][index] = kept + STEP
    above = loss_of()
    weights[name][index] = kept - STEP
    below = loss_of()
    weights[name][index] = kept
    return float((above - below) / (2 * STEP))


def smooth(name: str) -> Loss:
    """Choose bounds that no ratio here stands on; cispo's weight must be constant to be differentiated."""
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    frozen = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
    config = {"ppo": clip, "cispo": frozen, "dro": {"beta": 0.7}}.get(name, {})
    return resolve_loss(Loss(name, config))


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_full_gradients_match_finite_differences(name: str) -> None:
    """For every loss, the gradient of every weight tensor agrees to 1e-5 relative."""
    weights = {key: x.astype(np.float64) for key, x in init_weights(CONFIG, 3).items()}
    examples, loss = random_examples(CONFIG.vocab_size, 1), smooth(name)
    grads = run_examples(weights, CONFIG, examples, loss, 0.25).grads
    assert sorted(grads) == sorted(weights)
    rng = np.random.default_rng(2)
    for key, tensor in weights.items():
        for _ in range(3):
            index = tuple(int(rng.integers(size)) for size in tensor.shape)
            if key == "embed":
                index = (int(examples[2].inputs[rng.integers(12)]), index[1])
            expected = numeric(
                weights,
                key,
                index,
                lambda: 0.25 * run_examples(weights, CONFIG, examples, loss).loss_sum,
            )
            assert grads[key][index] == pytest.approx(expected, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_lora_gradients_match_finite_differences(name: str) -> None:
    """For every loss, the gradient of both factors of every adapter agrees, on the shipped model."""
    shipped = BaseModel.load()
    weights = {key: x.astype(np.float64) for key, x in shipped.weights.items()}
    base = BaseModel(BASE_FOLDER, shipped.config, weights)
    model = TrainableModel.create(base, rank=4, seed=5)
    rng = np.random.default_rng(6)
    for key in [key for key in model.factors if key.endswith(".b")]:
        model.factors[key] += rng.standard_normal(model.factors[key].shape) * 0.02
    examples, loss = random_examples(base.vocab_size, 1), smooth(name)
    totals = Totals(5, 0, 0)
    scale = 1.0 if name == "cross_entropy" else 0.2
    model.forward_backward(examples, loss, totals)

    def loss_now() -> float:
        fresh = TrainableModel(base, model.lora, model.factors)
        return scale * fresh.forward(examples, loss, totals).loss_sum

    for key, tensor in model.factors.items():
        index = tuple(int(rng.integers(size)) for size in tensor.shape)
        if key == "unembed.b":
            index = (index[0], int(examples[0].targets[3]))
        expected = numeric(model.factors, key, index, loss_now)
        assert model.gradient[key][index] == pytest.approx(expected, rel=1e-4, abs=1e-7)
