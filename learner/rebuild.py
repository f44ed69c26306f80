"""Owns the re-derivation of a planned step from rollout events alone. Recovery sends it, replay judges it."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from core.advantage import ESTIMATORS, Estimator
from core.batch import StepBatch
from core.errors import CodeNotAllowed, ReplayError
from core.events import StepCommitted, StepPlanned
from learner.batch import Recipe, Taken, assemble, fetch, recipe_from_plan, step_digest
from store.log import Log

CodeLoader = Callable[[str], Estimator]
"""Returns the function that `module:function` names; raises CodeNotAllowed unless the user allowed it."""


class Rebuilt(NamedTuple):
    """A step as its rollout events give it today."""

    taken: tuple[Taken, ...]
    batch: StepBatch
    digests: tuple[str, ...]
    """SHA-256 hex per datum: in replay of arrays that never saw the SDK, in the learner of what it sends."""
    recipe: Recipe
    batch_digest: str


def no_code(name: str) -> Estimator:
    """Refuse every user function."""
    raise CodeNotAllowed(f"the log names user code {name!r}: name it with --allow-code to let it run")


def user_estimator(name: str, load: CodeLoader) -> Estimator | None:
    """Return the loaded function of a `module:function` estimator, None for one of ours."""
    return load(name) if ":" in name and name not in ESTIMATORS else None


def planned_event(log: Log, step: int) -> StepPlanned:
    """Return the plan of a step; raises StoreError when it was never planned or cannot be read."""
    index = log.step(step).planned_index
    event = log.journal.get(index).event
    if not isinstance(event, StepPlanned):
        raise ReplayError(f"journal position {index} holds no plan: run `rolltape verify`")
    return event


def committed_event(log: Log, step: int) -> StepCommitted | None:
    """Return the commit of a step, None while there is none; raises StoreError when it was never planned."""
    index = log.step(step).committed_index
    if index is None:
        return None
    event = log.journal.get(index).event
    if not isinstance(event, StepCommitted):
        raise ReplayError(f"journal position {index} holds no commit: run `rolltape verify`")
    return event


def rebuild(log: Log, planned: StepPlanned, load: CodeLoader = no_code) -> Rebuilt:
    """Return the step that `planned` speaks of, from the groups' records.

    Raises CodeNotAllowed, StoreError, FoldError, RewardError, EstimatorError, or ReplayError (a uid twice).
    """
    for uid, count in Counter(group.uid for group in planned.groups).items():
        if count > 1:
            raise ReplayError(f"the plan names group {uid} {count} times")
    taken = fetch(log.groups, [log.group(group.uid) for group in planned.groups])
    return derive(taken, recipe_from_plan(planned, user_estimator(planned.estimator, load)))


def derive(taken: list[Taken], recipe: Recipe) -> Rebuilt:
    """Return what `recipe` makes of groups; raises FoldError, RewardError or EstimatorError."""
    batch = assemble(taken, recipe.settings)
    digests = batch.digests()
    return Rebuilt(tuple(taken), batch, digests, recipe, step_digest(batch, digests, recipe))
