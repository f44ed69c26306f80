"""Losses against numbers worked out by hand."""

import math

import numpy as np
import pytest

from engine.embedded.calls import Example, InputError, Loss, Totals
from engine.embedded.losses import active_tokens, loss_scale, resolve_loss, token_losses

LN2 = math.log(2)


def example(
    *, targets: list[int], sampled: list[float] | None = None, advantages: list[float] | None = None
) -> Example:
    """Make an example whose inputs do not matter."""
    return Example(
        np.zeros(len(targets), np.int32),
        np.array(targets, np.int32),
        None,
        None if sampled is None else np.array(sampled, np.float32),
        None if advantages is None else np.array(advantages, np.float32),
    )


def evaluate(
    name: str, config: dict[str, float], current: list[float], given: Example
) -> tuple[list[float], list[float]]:
    """Values and slopes of the token losses."""
    losses = token_losses(resolve_loss(Loss(name, config)), np.array(current), given)
    return losses.values.tolist(), losses.slopes.tolist()


def test_cross_entropy_weighs_negative_logprobs() -> None:
    """The loss of a token is -weight x logprob, and 0 for target -100 whatever its weight."""
    given = example(targets=[3, 4, -100])._replace(weights=np.array([1, 0.5, 9], np.float32))
    values, slopes = evaluate("cross_entropy", {}, [-1.0, -2.0, 0.0], given)
    assert values == [1.0, 1.0, 0.0]
    assert slopes == [-1.0, -0.5, 0.0]


def test_cross_entropy_weighs_one_by_default() -> None:
    """Without weights every labelled token counts once."""
    values, _ = evaluate("cross_entropy", {}, [-1.0, -2.0], example(targets=[3, 4]))
    assert values == [1.0, 2.0]


def test_importance_sampling_weighs_by_the_ratio() -> None:
    """Ratio 2 and advantage 3 give loss -6, and its slope is the same number."""
    given = example(targets=[1, 1], sampled=[-1 - LN2, -1.0], advantages=[3.0, -2.0])
    values, slopes = evaluate("importance_sampling", {}, [-1.0, -1.0], given)
    assert values == pytest.approx([-6.0, 2.0], rel=1e-6)
    assert slopes == pytest.approx([-6.0, 2.0], rel=1e-6)


@pytest.mark.parametrize(
    ("advantage", "ratio", "value", "slope"),
    [
        (1.0, 2.0, -1.2, 0.0),  # too likely already: clipped, no gradient
        (-1.0, 2.0, 2.0, 2.0),  # made more likely although bad: not clipped
        (1.0, 0.5, -0.5, -0.5),  # made less likely although good: not clipped
        (-1.0, 0.5, 0.8, 0.0),  # unlikely enough: clipped
        (1.0, 1.1, -1.1, -1.1),  # inside the bounds
    ],
)
def test_ppo_clips_only_what_has_gone_too_far(
    advantage: float, ratio: float, value: float, slope: float
) -> None:
    """PPO takes the worse of the free and the clipped objective (bounds 0.8 and 1.2)."""
    given = example(targets=[1], sampled=[-1.0], advantages=[advantage])
    values, slopes = evaluate("ppo", {}, [-1.0 + math.log(ratio)], given)
    assert values == pytest.approx([value], rel=1e-6)
    assert slopes == pytest.approx([slope], rel=1e-6)


def test_cispo_clips_the_weight_but_keeps_the_gradient() -> None:
    """Ratio 2 is cut to 1.2, and the token still learns with that weight."""
    given = example(targets=[1], sampled=[-1.0], advantages=[2.0])
    current = -1.0 + LN2
    values, slopes = evaluate("cispo", {}, [current], given)
    assert values == pytest.approx([-2.4 * current], rel=1e-6)
    assert slopes == pytest.approx([-2.4], rel=1e-6)


def test_clip_bounds_are_settings() -> None:
    """Both clipped losses use the bounds that they are given."""
    given = example(targets=[1], sampled=[-1.0], advantages=[1.0])
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    assert evaluate("ppo", bounds, [-1.0 + LN2], given)[0] == pytest.approx([-1.5], rel=1e-6)
    assert evaluate("cispo", bounds, [-1.0 + LN2], given)[1] == pytest.approx([-1.5], rel=1e-6)


def test_dro_adds_a_quadratic_pull() -> None:
    """With p - q = 1, A = 2 and beta = 0.5: loss -(2 p - 0.25), slope -2 + 0.5."""
    given = example(targets=[1], sampled=[-3.0], advantages=[2.0])
    values, slopes = evaluate("dro", {"beta": 0.5}, [-2.0], given)
    assert values == [4.25]
    assert slopes == [-1.5]


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_tokens_without_advantage_are_not_trained(name: str) -> None:
    """Advantage 0 or target -100 means no loss and no gradient, also in dro's quadratic term."""
    given = example(targets=[1, -100], sampled=[0.0, 0.0], advantages=[0.0, 5.0])
    assert evaluate(name, {}, [-7.0, -7.0], given) == ([0.0, 0.0], [0.0, 0.0])


def test_policy_losses_are_means_over_the_samples_of_the_logical_call() -> None:
    """Policy losses are divided by total_samples; cross-entropy is a plain sum."""
    totals = Totals(total_samples=8, total_active_tokens=100, total_advantage_tokens=50)
    assert loss_scale(Loss("ppo", {}), totals) == 1 / 8
    assert loss_scale(Loss("cross_entropy", {}), totals) == 1.0
    with pytest.raises(InputError, match="total_samples must be at least 1, got 0"):
        loss_scale(Loss("ppo", {}), Totals(0, 0, 0))


def test_active_tokens_are_counted_as_the_sdk_does() -> None:
    """Labelled tokens, and in cross-entropy only those with a weight."""
    given = example(targets=[3, -100, 4])._replace(weights=np.array([0, 1, 1], np.float32))
    assert active_tokens(given, Loss("cross_entropy", {})) == 1
    assert active_tokens(given, Loss("ppo", {})) == 2


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Loss("gspo", {}), "unknown loss 'gspo': expected one of cross_entropy"),
        (Loss("ppo", {"clip_low": 0.1}), "did you mean 'clip_low_threshold'"),
        (Loss("importance_sampling", {"beta": 1}), "it takes no settings"),
        (Loss("dro", {"beta": -1}), "must be a number >= 0, got -1"),
        (Loss("dro", {"beta": math.nan}), "must be a number >= 0, got nan"),
        (Loss("ppo", {"clip_low_threshold": 2}), "exceeds clip_high_threshold"),
    ],
)
def test_unknown_losses_and_settings_are_named(loss: Loss, message: str) -> None:
    """A wrong name or value is an InputError that says what is expected."""
    with pytest.raises(InputError, match=message):
        resolve_loss(loss)


def test_a_loss_that_is_not_finite_is_refused() -> None:
    """A sampled logprob that makes the ratio overflow is an error, not an infinite gradient."""
    given = example(targets=[1], sampled=[-1e6], advantages=[1.0])
    with pytest.raises(InputError, match="is not finite"):
        evaluate("importance_sampling", {}, [-1.0], given)


def test_policy_losses_need_their_inputs() -> None:
    """A datum without logprobs or advantages is refused by name of the loss."""
    with pytest.raises(InputError, match="'ppo' needs logprobs and advantages"):
        evaluate("ppo", {}, [-1.0], example(targets=[1]))
