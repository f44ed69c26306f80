"""Owns the way from a step's uids to its logical batch and its plan. Learner and replay both take it.

Everything that decides a datum comes from the fetched records and from settings that the plan records.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from core.advantage import Estimator
from core.batch import (
    BatchSettings,
    StepBatch,
    build_step,
    plan_fields,
    settings_from_learner,
    settings_from_plan,
)
from core.config import AdamSettings, LearnerSettings
from core.digests import batch_digest
from core.errors import FoldError
from core.events import AdamParams, ChosenLeaf, PlannedGroup, StepPlanned
from core.tree import Group, Trajectory, fold_group, members
from learner.evidence import collect, record_marks
from learner.metrics import GroupFacts
from store.ports import Bundle, GroupRow, Groups


class Taken(NamedTuple):
    """One closed group as it was fetched."""

    group: Group
    chosen: tuple[ChosenLeaf, ...]
    digest: str
    """Of the fetched records."""
    marks: bytes
    opened_at_step: int


def fold_bundle(bundle: Bundle) -> Group:
    """Return the group that a bundle's records tell of; raises FoldError, which names the group."""
    try:
        return fold_group((record.tree, record.event) for record in bundle.records)
    except FoldError as exc:
        raise FoldError(f"group {bundle.uid}: {exc}") from exc


def take(row: GroupRow, bundle: Bundle) -> Taken:
    """Return a closed group, ready for a batch; raises FoldError."""
    return Taken(
        fold_bundle(bundle), row.chosen, bundle.digest, record_marks(bundle.records), row.opened_at_step
    )


def fetch(groups: Groups, rows: Sequence[GroupRow]) -> list[Taken]:
    """Return the groups of `rows` in their order; raises LogDamaged, StoreError or FoldError."""
    return [take(row, groups.fetch(row.uid)) for row in rows]


def assemble(taken: Sequence[Taken], settings: BatchSettings) -> StepBatch:
    """Return the logical batch; raises FoldError, RewardError or EstimatorError."""
    return build_step([(one.group, one.chosen) for one in taken], settings)


def members_of(taken: Taken) -> tuple[Trajectory, ...]:
    """Return the members of one group in (tree, node) order; raises FoldError."""
    return members(taken.group, taken.chosen)


def group_facts(taken: Sequence[Taken], batch: StepBatch, step: int) -> list[GroupFacts]:
    """Return what metrics need of each group, in training order."""
    by_uid: dict[str, list[int]] = {one.group.uid: [] for one in taken}
    for position, member in enumerate(batch.members):
        by_uid[member.group.uid].append(position)
    return [
        GroupFacts(
            one.group,
            tuple(batch.members[position] for position in by_uid[one.group.uid]),
            step - one.opened_at_step,
        )
        for one in taken
    ]


def adam_params(learning_rate: float, adam: AdamSettings) -> AdamParams:
    """Return the optimizer's settings as a plan records them."""
    return AdamParams(
        learning_rate=learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )


def adam_settings(params: AdamParams) -> AdamSettings:
    """Return the part of a plan's optimizer settings that is not the learning rate."""
    return AdamSettings(
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        grad_clip_norm=params.grad_clip_norm,
    )


class Recipe(NamedTuple):
    """How the groups of a step become its update."""

    settings: BatchSettings
    loss: str
    loss_config: Mapping[str, float]
    adam: AdamParams


def recipe_from_learner(
    learner: LearnerSettings, learning_rate: float, user: Estimator | None = None
) -> Recipe:
    """Return the recipe of a run's configuration; `user` is the loaded `module:function` estimator."""
    return Recipe(
        settings_from_learner(learner, user),
        learner.loss,
        learner.loss_config,
        adam_params(learning_rate, learner.adam),
    )


def recipe_from_plan(plan: StepPlanned, user: Estimator | None = None) -> Recipe:
    """Return the recipe that a plan recorded; raises EstimatorError when its settings are not ours."""
    return Recipe(settings_from_plan(plan, user), plan.loss, plan.loss_config, plan.adam)


def step_digest(batch: StepBatch, digests: Sequence[str], recipe: Recipe) -> str:
    """Return the batch digest, given the digests of the datums in their order."""
    micro_batches = [[digests[position] for position in micro] for micro in batch.micro_batches]
    return batch_digest(micro_batches, recipe.loss, recipe.loss_config, recipe.adam)


class PlanContext(NamedTuple):
    """What a plan records besides its groups and its recipe."""

    step: int
    policy_version: int
    fingerprints: Mapping[str, str]
    now: float


def plan_event(
    taken: Sequence[Taken],
    batch: StepBatch,
    digests: Sequence[str],
    recipe: Recipe,
    context: PlanContext,
) -> StepPlanned:
    """Return the plan of a step; `digests` are those of the datums as they are handed to the trainer."""
    return StepPlanned(
        step=context.step,
        groups=tuple(PlannedGroup(uid=one.group.uid, digest=one.digest, marks=one.marks) for one in taken),
        **plan_fields(recipe.settings),
        loss=recipe.loss,
        loss_config=dict(recipe.loss_config),
        adam=recipe.adam,
        members=len(batch.members),
        micro_batches=batch.micro_batches,
        datum_digests=tuple(digests),
        batch_digest=step_digest(batch, digests, recipe),
        policy_version=context.policy_version,
        fingerprints=dict(context.fingerprints),
        evidence=collect([str(key) for key in batch.keys], batch.datums, batch.table.rewards),
        at=context.now,
    )
