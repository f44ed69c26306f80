"""Owns what a person is warned of while training: pure functions of committed metrics."""

from collections.abc import Mapping, Sequence
from math import fsum

from core.events import StepCommitted

GAP = 0.02
"""Mean |sampled − trainer's logprob| on fresh groups above which sampler and trainer disagree."""
WINDOW = 5
"""Steps whose means are compared with those of as many steps before."""
FALL, RISE = 0.05, 0.05
"""Of the mean reward, and of the share of failed searches, that together are worth a warning."""

REWARD, ERRORS = "reward/mean", "search/error_rate"


def gap_warning(committed: StepCommitted) -> str:
    """Return a warning when fresh groups were not sampled from the weights that are trained, or ""."""
    gap = committed.trainer_metrics.get("trainer/logprob_gap", 0.0)
    if gap <= GAP or committed.rollout_metrics.get("staleness/max", 0.0) != 0:
        return ""
    return (
        f"warning: step {committed.step}: sampled and trainer's logprobs differ by {gap:.3f} on average, "
        f"expected at most {GAP}: the sampler does not run the trained weights"
    )


def fault_warning(metrics: Sequence[Mapping[str, float]]) -> str:
    """Return a warning when reward falls while searches fail more often, or "".

    `metrics` are those of the last steps in order; fewer than twice the window say nothing yet. The policy
    is then being blamed for its search back-end.
    """
    if len(metrics) < 2 * WINDOW:
        return ""
    before, after = metrics[-2 * WINDOW : -WINDOW], metrics[-WINDOW:]
    fall = _mean(before, REWARD) - _mean(after, REWARD)
    rise = _mean(after, ERRORS) - _mean(before, ERRORS)
    if fall < FALL or rise < RISE:
        return ""
    return (
        f"warning: over the last {WINDOW} steps the mean reward fell by {fall:.3f} while {100 * rise:.0f} % "
        "more of the searches failed: look at the search back-end before you blame the policy"
    )


def _mean(metrics: Sequence[Mapping[str, float]], name: str) -> float:
    return fsum(one.get(name, 0.0) for one in metrics) / len(metrics)
