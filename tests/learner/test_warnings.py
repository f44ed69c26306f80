"""What a person is warned of while training."""

from collections.abc import Mapping

import pytest

from core.events import StepCommitted
from learner.warnings import fault_warning, gap_warning


def committed(step: int = 0, gap: float = 0.0, age: float = 0.0) -> StepCommitted:
    """Return a commit with a few metrics."""
    return StepCommitted(
        step=step,
        skipped=False,
        policy_version=1,
        rollout_metrics={"reward/mean": 0.5, "staleness/max": age},
        trainer_metrics={"trainer/logprob_gap": gap},
        seconds={"step": 1.5},
    )


@pytest.mark.parametrize(("gap", "age", "warned"), [(0.03, 0, True), (0.01, 0, False), (0.03, 1, False)])
def test_a_gap_is_warned_of_on_fresh_groups_only(gap: float, age: float, warned: bool) -> None:
    """Older groups were sampled from other weights by design."""
    assert bool(gap_warning(committed(gap=gap, age=age))) == warned


def steps(*pairs: tuple[float, float]) -> list[Mapping[str, float]]:
    """Return metrics of steps, five for each pair of reward and error rate."""
    return [
        {"reward/mean": reward, "search/error_rate": errors} for reward, errors in pairs for _ in range(5)
    ]


@pytest.mark.parametrize(
    ("metrics", "warned"),
    [
        (steps((0.6, 0.0), (0.4, 0.3)), True),
        (steps((0.6, 0.0), (0.6, 0.3)), False),
        (steps((0.6, 0.3), (0.4, 0.3)), False),
        (steps((0.4, 0.3), (0.6, 0.0)), False),
        (steps((0.4, 0.3)), False),
        (steps((0.6, 0.0), (0.6, 0.0), (0.4, 0.3)), True),
    ],
)
def test_falling_reward_beside_failing_searches_is_warned_of(
    metrics: list[Mapping[str, float]], warned: bool
) -> None:
    """Both together, over the last five steps against the five before."""
    assert bool(fault_warning(metrics)) == warned
