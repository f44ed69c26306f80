"""Owns the list of a run's checkpoints: what each holds, how it did, and whether it still exists."""

from collections.abc import Collection, Sequence

import msgspec

from core.events import CheckpointSaved, Evaluated, PolicyPublished, StepCommitted
from learner.evaluations import by_way, main_way
from store.log import Log

EXACT_MATCH = "exact_match"


class CheckpointLine(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint of a run."""

    step: int
    """Steps committed when it was saved."""
    state_uri: str
    weights_uri: str
    state_exists: bool | None
    """None when the service was not asked."""
    weights_exist: bool | None
    reward: float | None
    """Mean reward of the step before it, on training questions."""
    evaluation: dict[str, float]
    """Summary of the newest evaluation of its weights, {} when there is none asked like the others'."""
    best: bool
    """The highest score among the evaluated ones."""


def list_checkpoints(
    log: Log, existing: Collection[str] | None = None, score: str = EXACT_MATCH
) -> list[CheckpointLine]:
    """Return the run's checkpoints, oldest first; `existing` are the URIs that the service still has.

    The best one is that with the highest `score` in its evaluation's summary, the earliest of equals. Only
    evaluations that asked the same questions in the same way are held against each other: those of the way
    in which most checkpoints were evaluated, the first of equals.
    """
    saved: list[CheckpointSaved] = []
    rewards: dict[int, float] = {}
    evaluations: list[tuple[int, Evaluated]] = []
    steps: dict[int, int] = {0: 0}
    for record in log.journal.read():
        match record.event:
            case CheckpointSaved() as event:
                saved.append(event)
            case StepCommitted() as event:
                rewards[event.step + 1] = event.rollout_metrics.get("reward/mean", 0.0)
            case PolicyPublished(policy_version=version, step=step):
                steps[version] = step
            case Evaluated() as event if score in event.summary:
                evaluations.append((steps.get(event.policy_version, 0), event))
            case _:
                pass
    newest = {checkpoint.step: checkpoint for checkpoint in saved}
    way = main_way(by_way(evaluations), newest)
    scores = {} if way is None else {step: event.summary for step, event in way.events.items()}
    best = max(sorted(newest.keys() & scores), key=lambda step: scores[step][score], default=None)
    return [
        CheckpointLine(
            step=step,
            state_uri=checkpoint.state_uri,
            weights_uri=checkpoint.weights_uri,
            state_exists=None if existing is None else checkpoint.state_uri in existing,
            weights_exist=None if existing is None else checkpoint.weights_uri in {"", *existing},
            reward=rewards.get(step),
            evaluation=scores.get(step, {}),
            best=step == best,
        )
        for step, checkpoint in sorted(newest.items())
    ]


def checkpoint_lines(lines: Sequence[CheckpointLine], score: str = EXACT_MATCH) -> list[str]:
    """Return the list for a terminal."""
    told = []
    for line in lines:
        gone = "  (gone)" if line.state_exists is False else ""
        if line.weights_exist is False:
            gone = gone or "  (can be restored, not sampled)"
        reward = "" if line.reward is None else f"  reward {line.reward:+.3f}"
        scored = f"  {score} {line.evaluation[score]:.3f}" if line.evaluation else ""
        best = "  best" if line.best else ""
        told.append(f"step {line.step:>5}{reward}{scored}{best}  {line.state_uri}{gone}")
    return told or ["no checkpoint yet"]
