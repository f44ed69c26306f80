"""Owns how whole groups become the datums and micro-batches of one step; replay calls the same function.

fold → shaping → estimator → KL term → prefix weight → datums (those without signal are left out) → packing →
scaling → one rounding to float32. The order of the groups given is the order of training.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

import msgspec
import numpy as np

from core.advantage import Advantages, Estimator, LeafTable, estimate, leaf_table
from core.arrays import Bool, Float64
from core.config import LearnerSettings, PackingSettings
from core.credit import Credit, assign_credit, token_advantages
from core.datum import DatumArrays, build_datum, datum_digest
from core.errors import EstimatorError
from core.events import ChosenLeaf, StepPlanned
from core.ids import make_tree_uid
from core.nodes import NUMBER_BYTES
from core.packing import pack
from core.segments import Segment, segments
from core.shaping import shape
from core.tree import Group, Trajectory, members


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what a step's datums are, given its groups."""

    estimator: str = "group_mean"
    singleton: Literal["zero", "raw"] = "zero"
    group_by: Literal["uid", "tree_uid"] = "uid"
    shaping: Literal["base", "tree_diff"] = "base"
    shaping_margin: float = 0.1
    prefix_weight: Literal["each", "once_sum", "once"] = "each"
    kl_beta: float = 0.0
    reduction: Literal["sample_mean", "sum"] = "sample_mean"
    packing: PackingSettings = PackingSettings()
    user: Estimator | None = None
    """The loaded function of a `module:function` estimator; loading it is the caller's business."""


class PlanFields(TypedDict):
    """The fields of `step_planned` that hold a BatchSettings; pass them on with `**`."""

    estimator: str
    estimator_params: dict[str, float | str | bool]
    shaping: str
    shaping_params: dict[str, float]
    prefix_weight: str
    kl_beta: float
    reduction: str
    packing: dict[str, int]


def settings_from_learner(learner: LearnerSettings, user: Estimator | None = None) -> BatchSettings:
    """Return the batch settings of a run's configuration."""
    return BatchSettings(
        estimator=learner.estimator,
        singleton=learner.singleton,
        group_by=learner.group_by,
        shaping=learner.shaping,
        shaping_margin=learner.shaping_margin,
        prefix_weight=learner.prefix_weight,
        kl_beta=learner.kl_beta,
        reduction=learner.reduction,
        packing=learner.packing,
        user=user,
    )


def settings_from_plan(plan: StepPlanned, user: Estimator | None = None) -> BatchSettings:
    """Return the batch settings that a plan recorded; raises EstimatorError when they are not ours."""
    recorded = {
        "estimator": plan.estimator,
        **plan.estimator_params,
        "shaping": plan.shaping,
        **{f"shaping_{name}": value for name, value in plan.shaping_params.items()},
        "prefix_weight": plan.prefix_weight,
        "kl_beta": plan.kl_beta,
        "reduction": plan.reduction,
        "packing": plan.packing,
    }
    try:
        settings = msgspec.convert(recorded, _Recorded)
    except msgspec.ValidationError as error:
        raise EstimatorError(f"step {plan.step}: its plan's batch settings are not ours: {error}") from error
    return BatchSettings(**msgspec.structs.asdict(settings), user=user)


def plan_fields(settings: BatchSettings) -> PlanFields:
    """Return what `step_planned` records; `settings_from_plan` gives the same settings back."""
    return PlanFields(
        estimator=settings.estimator,
        estimator_params={"singleton": settings.singleton, "group_by": settings.group_by},
        shaping=settings.shaping,
        shaping_params={"margin": settings.shaping_margin},
        prefix_weight=settings.prefix_weight,
        kl_beta=settings.kl_beta,
        reduction=settings.reduction,
        packing=msgspec.structs.asdict(settings.packing),
    )


class _Recorded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BatchSettings as far as a plan can hold them, validated."""

    estimator: str
    singleton: Literal["zero", "raw"]
    group_by: Literal["uid", "tree_uid"]
    shaping: Literal["base", "tree_diff"]
    shaping_margin: float
    prefix_weight: Literal["each", "once_sum", "once"]
    kl_beta: float
    reduction: Literal["sample_mean", "sum"]
    packing: PackingSettings


class DatumKey(NamedTuple):
    """Where a datum comes from."""

    uid: str
    tree: int
    leaf: str
    segment: int

    def __str__(self) -> str:
        return f"{make_tree_uid(self.uid, self.tree)}/{self.leaf}#{self.segment}"


class StepStats(NamedTuple):
    """Token and datum counts of one step; the members' segments are counted whole."""

    members: int
    """N."""
    segments: int
    """Datums before those without signal are left out."""
    datums: int
    prompt_tokens: int
    """Given tokens that open a segment: the prompt, or a whole prompt_reset."""
    observation_tokens: int
    sampled_tokens: int
    """Once per member whose path holds them."""
    shared_sampled_tokens: int
    """Of these, those that an earlier member's path holds too."""
    trained_tokens: int
    """Sampled tokens that are trained in some datum, once per datum."""
    datum_tokens: int
    """Inputs sent to the trainer."""
    reset_segments: int
    """Segments that open with a prompt_reset."""


class StepBatch(NamedTuple):
    """One logical batch: all that a step sends, and what it was made of."""

    members: tuple[Trajectory, ...]
    """N, in training order."""
    table: LeafTable
    """The members' recorded rewards and tree shape."""
    shaped: Float64
    """float64 [N]: the rewards that the estimator saw."""
    advantages: Advantages
    """Per member and per node of its path, before KL term, prefix weight and scaling."""
    keys: tuple[DatumKey, ...]
    """Per datum, in training order."""
    segments: tuple[Segment, ...]
    """Per datum."""
    datums: tuple[DatumArrays, ...]
    """Scaled and rounded, ready to be sent."""
    micro_batches: tuple[tuple[int, ...], ...]
    """Datum indices per micro-batch, in sending order; empty when the step has no signal."""
    stats: StepStats

    def shaped_table(self) -> LeafTable:
        """Return the table as the estimator saw it, from which any other estimator may start."""
        return self.table._replace(rewards=self.shaped, recorded=self.table.rewards)

    def digests(self) -> tuple[str, ...]:
        """Return the SHA-256 hex of every datum."""
        return tuple(datum_digest(datum) for datum in self.datums)


def build_step(groups: Sequence[tuple[Group, Sequence[ChosenLeaf]]], settings: BatchSettings) -> StepBatch:
    """Return the logical batch of `groups`, pairs of a folded group and its chosen leaves.

    Raises FoldError, RewardError (a reward that is not finite) or EstimatorError.
    """
    everyone = tuple(member for group, chosen in groups for member in members(group, chosen))
    table = leaf_table(everyone)
    shaped = shape(settings.shaping, table, margin=settings.shaping_margin)
    advantages = estimate(
        settings.estimator,
        table._replace(rewards=shaped, recorded=table.rewards),
        singleton=settings.singleton,
        group_by=settings.group_by,
        user=settings.user,
    )
    credit = assign_credit(table, advantages.entries, settings.prefix_weight)
    drafts = _drafts(everyone, table, credit, settings.kl_beta)
    kept = [draft for draft in drafts if draft.advantages.any()]
    micro_batches = pack([len(draft.segment.tokens) - 1 for draft in kept], settings.packing)
    datums: list[DatumArrays | None] = [None] * len(kept)
    for batch in micro_batches:
        scale = _scale(len(batch), len(everyone), settings.reduction)
        for index in batch:
            draft = kept[index]
            datums[index] = build_datum(draft.segment, draft.advantages, draft.trained, scale=scale)
    return StepBatch(
        members=everyone,
        table=table,
        shaped=shaped,
        advantages=advantages,
        keys=tuple(draft.key for draft in kept),
        segments=tuple(draft.segment for draft in kept),
        datums=tuple(datum for datum in datums if datum is not None),
        micro_batches=micro_batches,
        stats=_stats(everyone, drafts, kept, table),
    )


class _Draft(NamedTuple):
    """One segment on its way to a datum, before packing decides its scale."""

    key: DatumKey
    segment: Segment
    advantages: Float64
    """float64 [n], unscaled."""
    trained: Bool
    """Per node of the member's path."""

    def trained_tokens(self) -> int:
        return sum(turn.stop - turn.start for turn in self.segment.turns if self.trained[turn.step])

    def sampled_tokens(self) -> int:
        return sum(turn.stop - turn.start for turn in self.segment.turns)


def _drafts(everyone: Sequence[Trajectory], table: LeafTable, credit: Credit, kl_beta: float) -> list[_Draft]:
    result = []
    for leaf, member in enumerate(everyone):
        own = credit.part(int(table.path_starts[leaf]), int(table.path_starts[leaf + 1]))
        for index, segment in enumerate(segments(member)):
            key = DatumKey(member.group.uid, member.tree, member.leaf, index)
            advantages = token_advantages(segment, member, own, kl_beta)
            result.append(_Draft(key, segment, advantages, own.trained))
    return result


def _scale(datums: int, members: int, reduction: Literal["sample_mean", "sum"]) -> float:
    """Return the factor by which the step's gradient becomes the mean over N members."""
    return datums / members if reduction == "sample_mean" else 1 / members


def _stats(
    everyone: Sequence[Trajectory], drafts: Sequence[_Draft], kept: Sequence[_Draft], table: LeafTable
) -> StepStats:
    given = sum(len(draft.segment.tokens) for draft in drafts)
    sampled = sum(draft.sampled_tokens() for draft in drafts)
    opening = sum(draft.segment.turns[0].start for draft in drafts)
    turns = np.array(
        [len(node.sample.tokens) // NUMBER_BYTES for member in everyone for node in member.path],
        dtype=np.int64,
    )
    first = np.unique(table.path_nodes, return_index=True)[1]
    return StepStats(
        members=len(everyone),
        segments=len(drafts),
        datums=len(kept),
        prompt_tokens=opening,
        observation_tokens=given - sampled - opening,
        sampled_tokens=sampled,
        shared_sampled_tokens=sampled - int(turns[first].sum()),
        trained_tokens=sum(draft.trained_tokens() for draft in kept),
        datum_tokens=sum(len(draft.segment.tokens) - 1 for draft in kept),
        reset_segments=sum(draft.key.segment > 0 for draft in drafts),
    )
