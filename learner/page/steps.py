"""Owns the facts of steps: the point of a curve for all, recipe, tokens and verdict for those shown."""

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Final, NamedTuple

from core.batch import StepBatch
from core.errors import CodeNotAllowed, RolltapeError
from core.events import StepCommitted, StepPlanned
from core.tree import Trajectory
from learner.batch import Taken, fetch
from learner.page.derive import Derived, derive_credit, largest
from learner.page.model import RunFacts, StepFacts
from learner.page.turns import NAME, cut
from learner.rebuild import CodeLoader, Rebuilt, committed_event, planned_event, rebuild
from learner.verdict import is_match
from store.log import Log

FORMULAS: Final[Mapping[str, str]] = {
    "group_mean": "A = R − mean of the question",
    "grpo": "A = (R − mean) / (std + 10⁻⁶), over the question",
    "rloo": "A = R − mean of the question's other leaves",
    "tree": "A = z over the question + z over the tree, z = (R − mean) / (std + 10⁻⁶)",
    "tree_intra": "A = (R − mean) / (std + 10⁻⁶), over the tree",
    "tree_2norm": "A = z over the tree of (z over the question)",
    "node": "A of a stretch = mean reward below it − mean reward below its parent stretch",
}


class StepSource(NamedTuple):
    """One step as its events give it today."""

    planned: StepPlanned
    committed: StepCommitted | None
    taken: Sequence[Taken]
    rebuilt: Rebuilt | None
    """None when it cannot be derived; `problem` says why."""
    match: bool | None
    """As replay judges it; None when it cannot be judged without code that is not allowed."""
    problem: str = ""


class RunSource(NamedTuple):
    """What the journal says about the run, without any group's records."""

    facts: RunFacts
    members: Mapping[int, int]
    """Step → N, for every planned step, ascending."""
    commits: Mapping[int, StepCommitted]


def read_step(log: Log, step: int, load: CodeLoader) -> StepSource:
    """Return one planned step with its groups; damage and missing permission become its `problem`.

    Raises StoreError when it was never planned.
    """
    planned, committed = planned_event(log, step), committed_event(log, step)
    try:
        rebuilt = rebuild(log, planned, load)
    except CodeNotAllowed as error:
        taken = fetch(log.groups, [log.group(group.uid) for group in planned.groups])
        return StepSource(planned, committed, taken, None, None, str(error))
    except RolltapeError as error:
        return StepSource(planned, committed, (), None, False, str(error))
    match = is_match(log, step, planned, committed, rebuilt)
    return StepSource(planned, committed, rebuilt.taken, rebuilt, match)


def derived_of(source: StepSource) -> Derived | None:
    """Return the step's credit per node, None when it cannot be derived."""
    if source.rebuilt is None:
        return None
    return derive_credit(source.rebuilt.batch, source.rebuilt.recipe.settings)


def curve_point(step: int, committed: StepCommitted | None) -> StepFacts:
    """Return a step of which the page shows only the recorded means."""
    metrics = committed.rollout_metrics if committed else {}
    return StepFacts(
        step=step,
        reward=metrics.get("reward/mean"),
        exact_match=metrics.get("reward/correct"),
        format=metrics.get("reward/format"),
        skipped=committed is not None and committed.skipped,
        committed=committed is not None,
    )


def step_facts(source: StepSource) -> StepFacts:
    """Return a step whose groups are on the page; its means are those of its re-derived members."""
    planned, committed, rebuilt = source.planned, source.committed, source.rebuilt
    members = rebuilt.batch.members if rebuilt else ()
    recorded = curve_point(planned.step, committed)
    return StepFacts(
        step=planned.step,
        reward=_mean([member.reward for member in members]) if rebuilt else recorded.reward,
        exact_match=_component(members, "exact_match") if rebuilt else recorded.exact_match,
        format=_component(members, "format") if rebuilt else recorded.format,
        skipped=recorded.skipped,
        committed=recorded.committed,
        shown=True,
        policy_in=planned.policy_version,
        policy_out=committed.policy_version if committed else planned.policy_version,
        members=planned.members,
        datums=len(planned.datum_digests),
        micro_batches=len(planned.micro_batches),
        tokens=_tokens(rebuilt.batch) if rebuilt else [],
        recipe=_recipe(planned),
        estimator=cut(planned.estimator, NAME),
        scale=largest(rebuilt.batch.advantages.entries) if rebuilt else 0.0,
        digest=planned.batch_digest,
        verdict=_verdict(source.match),
        problem=source.problem,
        metrics=_metrics(committed),
    )


def _verdict(match: bool | None) -> str:
    return "" if match is None else "match" if match else "mismatch"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None


def _component(members: Sequence[Trajectory], name: str) -> float | None:
    scores = [member.path[-1].reward for member in members]
    return _mean([score.components.get(name) for score in scores if score is not None])


def _tokens(batch: StepBatch) -> list[tuple[str, int]]:
    stats = batch.stats
    return [
        ("prompt", stats.prompt_tokens),
        ("sampled", stats.sampled_tokens),
        ("observation", stats.observation_tokens),
        ("trained", stats.trained_tokens),
        ("sent", stats.datum_tokens),
    ]


def _recipe(planned: StepPlanned) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = [("estimator", _with(planned.estimator, planned.estimator_params))]
    if planned.shaping != "base":
        rows.append(("reward shaping", _with(planned.shaping, planned.shaping_params)))
    rows.append(("prefix weight", planned.prefix_weight))
    if planned.kl_beta:
        rows.append(("KL β", f"{planned.kl_beta:g}"))
    rows.append(("loss", _with(planned.loss, planned.loss_config)))
    rows.append(("learning rate", f"{planned.adam.learning_rate:g}"))
    rows.append(("reduction", planned.reduction))
    return rows


def _with(name: str, params: Mapping[str, object]) -> str:
    shown = ", ".join(f"{key} {value}" for key, value in params.items())
    return cut(f"{name} ({shown})" if shown else name, NAME)


def _metrics(committed: StepCommitted | None) -> list[tuple[str, float]]:
    if committed is None:
        return []
    seconds = {f"seconds/{name}": value for name, value in committed.seconds.items()}
    return sorted((committed.rollout_metrics | committed.trainer_metrics | seconds).items())
