"""Training runs: adapters, accumulation, AdamW, saving and restoring."""

import io

import numpy as np
import pytest

from engine.embedded.adamw import AdamW
from engine.embedded.calls import AdamParams, Example, InputError, Loss, Totals
from engine.embedded.chunks import CHUNK_TOKENS, plan_chunks
from engine.embedded.compute import BaseModel, SamplerModel, TrainableModel
from engine.embedded.model import Weights

BASE = BaseModel.load()
POLICY = Loss("importance_sampling", {})
ADAM = AdamParams(learning_rate=1e-2)


def examples(count: int, seed: int = 0) -> list[Example]:
    """Random policy examples of several lengths."""
    rng = np.random.default_rng(seed)
    result = []
    for length in rng.integers(3, 60, count):
        inputs, targets = rng.integers(0, BASE.vocab_size, (2, length)).astype(np.int32)
        logprobs = rng.normal(-7, 1, length).astype(np.float32)
        advantages = rng.standard_normal(length).astype(np.float32)
        result.append(Example(inputs, targets, None, logprobs, advantages))
    return result


def new_model(rank: int = 8, seed: int = 1, **flags: bool) -> TrainableModel:
    """Start a fresh run on the shipped base."""
    return TrainableModel.create(BASE, rank=rank, seed=seed, **flags)


def stepped(model: TrainableModel, steps: int, start: int = 0) -> TrainableModel:
    """Train for some steps on data that depends on the step only."""
    for step in range(start, start + steps):
        model.forward_backward(examples(6, step), POLICY, Totals(6, 0, 0))
        model.optim_step(ADAM)
    return model


def test_fresh_adapters_change_nothing() -> None:
    """Before the first step the merged weights are the base's, to the bit."""
    merged = new_model().merged()
    assert all((merged[name] == x).all() for name, x in BASE.weights.items())


def test_logprobs_come_back_in_the_callers_order() -> None:
    """Examples are computed sorted by length, and answered in the order they came."""
    given = examples(20)
    model = new_model()
    together = model.forward(given, POLICY, Totals(20, 0, 0)).logprobs
    for example, logprobs in zip(given, together, strict=True):
        alone = model.forward([example], POLICY, Totals(1, 0, 0)).logprobs[0]
        assert logprobs.dtype == np.float32
        assert np.abs(alone - logprobs).max() < 1e-5


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_a_split_batch_gives_the_gradient_of_the_whole(name: str) -> None:
    """With the totals of the logical call, parts add up, however the batch was cut."""
    given, loss = examples(12), Loss(name, {})
    totals = Totals(12, 0, 0)
    whole, parts = new_model(), new_model()
    result = whole.forward_backward(given, loss, totals)
    sums = [parts.forward_backward(given[a:b], loss, totals) for a, b in ((0, 1), (1, 7), (7, 12))]
    assert sum(r.loss_sum for r in sums) == pytest.approx(result.loss_sum, rel=1e-6)
    assert sum(r.token_count for r in sums) == result.token_count
    for key, grad in whole.gradient.items():
        assert np.abs(grad - parts.gradient[key]).max() <= 1e-5 * max(1.0, np.abs(grad).max())


def test_scaled_micro_batches_give_the_gradient_of_the_whole() -> None:
    """Calls of n_k datums with advantages scaled by n_k / N add up to the call of N datums."""
    given = examples(9)
    whole, parts = new_model(), new_model()
    whole.forward_backward(given, POLICY, Totals(9, 0, 0))
    for part in (given[:4], given[4:]):
        scaled = [
            e._replace(advantages=e.advantages * np.float32(len(part) / 9))
            for e in part
            if e.advantages is not None
        ]
        parts.forward_backward(scaled, POLICY, Totals(len(part), 0, 0))
    for key, grad in whole.gradient.items():
        assert np.abs(grad - parts.gradient[key]).max() <= 1e-5 * max(1.0, np.abs(grad).max())


def test_a_custom_loss_arrives_as_cross_entropy_weights() -> None:
    """Weights -dL/dp give back exactly dL/dp: the slope of importance sampling, sent as weights."""
    given = examples(4)
    direct, custom = new_model(), new_model()
    current = direct.forward_backward(given, POLICY, Totals(4, 0, 0)).logprobs
    linear = []
    for example, p in zip(given, current, strict=True):
        assert example.advantages is not None
        assert example.logprobs is not None
        slope = -np.exp(p - example.logprobs) * example.advantages / 4
        linear.append(Example(example.inputs, example.targets, (-slope).astype(np.float32)))
    custom.forward_backward(linear, Loss("cross_entropy", {}), Totals(4, 0, 0))
    for key, grad in direct.gradient.items():
        assert np.abs(grad - custom.gradient[key]).max() <= 1e-5 * max(1.0, np.abs(grad).max())


def test_forward_changes_nothing() -> None:
    """A forward call leaves weights and gradient alone."""
    model = new_model()
    before = model.digest()
    model.forward(examples(3), POLICY, Totals(3, 0, 0))
    assert model.gradient == {}
    assert model.digest() == before


def test_a_step_lowers_the_loss_and_clears_the_gradient() -> None:
    """Cross-entropy on fixed data falls step by step."""
    model, given = new_model(), examples(4)
    loss, totals = Loss("cross_entropy", {}), Totals(4, 0, 0)
    losses = []
    for _ in range(5):
        losses.append(model.forward_backward(given, loss, totals).loss_mean)
        metrics = model.optim_step(ADAM)
        assert model.gradient == {}
    assert losses == sorted(losses, reverse=True)
    assert metrics["step"] == 5
    assert metrics["update_norm"] > 0
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"qkv", "o"}),
        ({"train_attn": False, "train_unembed": False}, {"up", "down"}),
        ({"train_attn": False, "train_mlp": False}, {"unembed"}),
    ],
)
def test_flags_choose_what_is_trained(flags: dict[str, bool], names: set[str]) -> None:
    """Only the chosen parts have adapters, and only they move."""
    model = stepped(new_model(**flags), 2)
    moved = {
        name.split(".")[-1] for name, x in model.merged().items() if not np.array_equal(x, BASE.weights[name])
    }
    assert moved == names


def test_two_runs_give_the_same_bytes() -> None:
    """Training is a function of seed and data."""
    assert stepped(new_model(), 3).digest() == stepped(new_model(), 3).digest()
    assert stepped(new_model(seed=2), 3).digest() != stepped(new_model(), 3).digest()


def through_a_file(model: TrainableModel, *, optimizer: bool) -> dict[str, np.ndarray]:
    """State after np.savez and np.load."""
    buffer = io.BytesIO()
    np.savez(buffer, **model.state_dict(optimizer=optimizer))
    buffer.seek(0)
    with np.load(buffer) as stored:
        return {name: stored[name] for name in stored.files}


def test_a_restored_run_continues_byte_identically() -> None:
    """With the optimizer, three steps and three more equal six; without it they do not."""
    straight = stepped(new_model(), 6)
    half = stepped(new_model(), 3)
    state = through_a_file(half, optimizer=True)
    restored = TrainableModel.from_state(BASE, state, load_optimizer=True)
    assert stepped(restored, 3, start=3).digest() == straight.digest()
    fresh = TrainableModel.from_state(BASE, state, load_optimizer=False)
    assert fresh.digest() == half.digest()
    assert stepped(fresh, 3, start=3).digest() != straight.digest()


def test_saved_weights_sample_like_the_run() -> None:
    """A sampler built from a state holds the run's merged weights."""
    model = stepped(new_model(), 2)
    sampler = SamplerModel.from_state(BASE, through_a_file(model, optimizer=False))
    assert all((sampler.weights[name] == x).all() for name, x in model.merged().items())


def test_state_that_does_not_fit_is_refused() -> None:
    """Another base, a missing array or a wrong shape is an InputError that says which."""
    state = through_a_file(new_model(), optimizer=False)
    with pytest.raises(InputError, match=r"holds no 'adam\.step'"):
        TrainableModel.from_state(BASE, state, load_optimizer=True)
    with pytest.raises(InputError, match="belongs to base model 0000"):
        SamplerModel.from_state(BASE, state | {"meta.base": np.zeros(32, np.uint8)})
    with pytest.raises(InputError, match=r"0\.qkv\.a is float32"):
        SamplerModel.from_state(BASE, state | {"lora.0.qkv.a": np.zeros((2, 2), np.float32)})


def test_adamw_takes_the_step_of_the_formula() -> None:
    """First step: bias correction makes it -lr (sign(g) + decay x); the second is worked out by hand."""
    x: Weights = {"w": np.array([1.0, -2.0])}
    optimizer = AdamW(x)
    params = AdamParams(0.1, beta1=0.9, beta2=0.99, eps=0.0, weight_decay=0.5)
    metrics = optimizer.step(x, {"w": np.array([3.0, -4.0])}, params)
    assert metrics["grad_norm"] == 5.0
    assert x["w"] == pytest.approx([1 - 0.1 * 1.5, -2 + 0.1 * 2])
    # g = (0, 0): m = 0.9 * 0.1 g0, v = 0.99 * 0.01 g0^2, corrected by 0.19 and 0.0199
    direction = (0.09 / 0.19) / np.sqrt(0.0099 / 0.0199)
    expected = [0.85 - 0.1 * (direction + 0.425), -1.8 - 0.1 * (-direction - 0.9)]
    optimizer.step(x, {"w": np.zeros(2)}, params)
    assert x["w"] == pytest.approx(expected)


def test_clipping_scales_the_whole_gradient() -> None:
    """A gradient of norm 5 clipped at 1 moves the moments a fifth as far; below the limit nothing changes."""
    moments = {}
    for limit in (0.0, 1.0, 10.0):
        x: Weights = {"a": np.zeros(1), "b": np.zeros(1)}
        optimizer = AdamW(x)
        params = AdamParams(0.1, grad_clip_norm=limit)
        optimizer.step(x, {"a": np.array([3.0]), "b": np.array([4.0])}, params)
        moments[limit] = float(optimizer.first["b"][0])
    assert moments[1.0] == pytest.approx(moments[0.0] / 5)
    assert moments[10.0] == moments[0.0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (AdamParams(learning_rate=-1.0), "learning_rate must be finite and >= 0, got -1.0"),
        (AdamParams(learning_rate=float("nan")), "learning_rate must be finite"),
        (AdamParams(beta1=1.0), "beta1 and beta2 must be below 1"),
        (AdamParams(eps="x"), "eps must be a number, got 'x'"),  # type: ignore[arg-type]
    ],
)
def test_bad_optimizer_settings_change_nothing(params: AdamParams, message: str) -> None:
    """A bad setting is an InputError before anything moves, and the gradient is kept."""
    model = new_model()
    model.forward_backward(examples(2), POLICY, Totals(2, 0, 0))
    before = model.digest()
    with pytest.raises(InputError, match=message):
        model.optim_step(params)
    assert model.digest() == before
    assert model.gradient


def test_a_gradient_that_is_not_finite_is_dropped() -> None:
    """The step is refused and the weights stay as they were."""
    model = new_model()
    model.forward_backward(examples(2), POLICY, Totals(2, 0, 0))
    model.gradient["unembed.b"][0, 0] = np.inf
    before = model.digest()
    with pytest.raises(InputError, match="gradient norm is inf"):
        model.optim_step(ADAM)
    assert model.digest() == before
    assert model.gradient == {}


def test_chunks_hold_every_example_once() -> None:
    """Sorted by length, at most CHUNK_TOKENS padded tokens each, alone if longer than that."""
    lengths = [5, 2000, 300, 700, 10, 700, 1]
    chunks = list(plan_chunks(lengths))
    assert sorted(i for chunk in chunks for i in chunk) == list(range(7))
    for chunk in chunks:
        padded = len(chunk) * max(lengths[i] for i in chunk)
        assert padded <= CHUNK_TOKENS or len(chunk) == 1


def test_a_full_context_can_be_trained() -> None:
    """An example of 2,048 tokens runs forward and backward."""
    rng = np.random.default_rng(0)
    row = rng.integers(0, BASE.vocab_size, BASE.context).astype(np.int32)
    model = new_model(rank=4)
    model.forward_backward([Example(row, row)], Loss("cross_entropy", {}), Totals(1, 0, 0))
    assert model.optim_step(ADAM)["grad_norm"] > 0


@pytest.mark.parametrize("rank", [3, 65])
def test_ranks_outside_the_sdks_range_are_refused(rank: int) -> None:
    """Rank must be 4 to 64, and something must be trained."""
    with pytest.raises(InputError, match=f"rank {rank} is not supported"):
        new_model(rank=rank)
    with pytest.raises(InputError, match="nothing to train"):
        new_model(train_attn=False, train_mlp=False, train_unembed=False)


def test_bad_examples_are_named() -> None:
    """The message gives the datum, the field and the value."""
    good = examples(1)[0]
    n = len(good.inputs)
    model = new_model()
    for bad, message in [
        (good._replace(inputs=np.full(n, BASE.vocab_size, np.int32)), "datum 1: inputs holds token id"),
        (good._replace(targets=np.full(n, -5, np.int32)), "datum 1: targets holds token id -5"),
        (good._replace(advantages=np.zeros(n + 1, np.float32)), "datum 1: advantages has shape"),
        (good._replace(logprobs=np.full(n, np.nan, np.float32)), "datum 1: logprobs must be finite"),
    ]:
        with pytest.raises(InputError, match=message):
            model.forward_backward([good, bad], POLICY, Totals(2, 0, 0))
    with pytest.raises(InputError, match="needs at least one datum"):
        model.forward([], POLICY, Totals(1, 0, 0))
    assert model.gradient == {}
