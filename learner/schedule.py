"""Owns the learning-rate schedule. The rate of a step is recorded in its plan; recovery uses the record."""

import math

from core.config import LearnerSettings


def learning_rate(settings: LearnerSettings, step: int, max_steps: int) -> float:
    """Return the rate of step `step` (from 0) of a run whose goal is `max_steps`.

    All schedules rise linearly over `warmup_steps`; then `constant` stays, `linear` and `cosine` fall
    towards 0 at the goal. A goal that is set further out later stretches only the steps still to come.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = min((step - warmup) / max(max_steps - warmup, 1), 1.0)
    match settings.schedule:
        case "constant":
            return settings.learning_rate
        case "linear":
            return settings.learning_rate * (1.0 - progress)
        case "cosine":
            return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
