"""Owns "what if": the same recorded groups under another estimator, or scored again. Nothing is sampled."""

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from core.advantage import Estimator, estimate
from core.arrays import Float64
from core.batch import StepBatch
from core.errors import RolltapeError
from core.tree import Trajectory
from learner.rebuild import Rebuilt

Rescore = Callable[[Trajectory], float]
"""Scores a trajectory anew; the scorer is put together by the caller."""

AGREEMENT = 1e-9
"""Rewards further apart than this are reported."""


class LeafChange(msgspec.Struct, frozen=True, kw_only=True):
    """One member under the recorded estimator and under another one."""

    uid: str
    tree: int
    leaf: str
    reward: float
    recorded: float
    """Advantage per leaf, before KL term, prefix weight and scaling."""
    other: float
    flipped: bool
    """One would have been reinforced, the other discouraged."""


class Counterfactual(msgspec.Struct, frozen=True, kw_only=True):
    """A step under another estimator."""

    step: int
    recorded: str
    other: str
    leaves: tuple[LeafChange, ...]
    flips: int
    gained: tuple[str, ...]
    """Groups that would have had a signal."""
    lost: tuple[str, ...]
    """Groups that would have had none."""
    correlation: float | None
    """Pearson's; None when one side is constant."""
    norm_ratio: float | None
    """|other| / |recorded|; None when nothing is recorded."""


class RewardChange(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf whose recorded reward is not what the scorer gives now."""

    uid: str
    tree: int
    leaf: str
    recorded: float
    rescored: float | None
    scorer: str
    error: str = ""


def advantages(batch: StepBatch, rebuilt: Rebuilt, name: str, user: Estimator | None = None) -> Float64:
    """Return float64 [n]: what estimator `name` gives the members, with the plan's other settings.

    Raises EstimatorError when it is unknown or returns unusable numbers.
    """
    settings = rebuilt.recipe.settings
    return estimate(
        name,
        batch.shaped_table(),
        singleton=settings.singleton,
        group_by=settings.group_by,
        user=user,
    ).leaf


def counterfactual(rebuilt: Rebuilt, step: int, name: str, user: Estimator | None = None) -> Counterfactual:
    """Return what would have changed; raises EstimatorError."""
    batch = rebuilt.batch
    recorded, other = batch.advantages.leaf, advantages(batch, rebuilt, name, user)
    leaves = tuple(
        LeafChange(
            uid=member.group.uid,
            tree=member.tree,
            leaf=member.leaf,
            reward=float(batch.table.rewards[position]),
            recorded=float(recorded[position]),
            other=float(other[position]),
            flipped=bool(recorded[position] * other[position] < 0),
        )
        for position, member in enumerate(batch.members)
    )
    before, after = _with_signal(leaves, "recorded"), _with_signal(leaves, "other")
    size = float(np.linalg.norm(recorded))
    return Counterfactual(
        step=step,
        recorded=rebuilt.recipe.settings.estimator,
        other=name,
        leaves=leaves,
        flips=sum(leaf.flipped for leaf in leaves),
        gained=tuple(sorted(after - before)),
        lost=tuple(sorted(before - after)),
        correlation=correlation(recorded, other),
        norm_ratio=float(np.linalg.norm(other)) / size if size else None,
    )


def _with_signal(leaves: Sequence[LeafChange], field: str) -> set[str]:
    return {leaf.uid for leaf in leaves if getattr(leaf, field) != 0.0}


def correlation(left: Float64, right: Float64) -> float | None:
    """Return Pearson's correlation, None when one side is constant or there are fewer than two values."""
    if len(left) < 2 or len(set(left.tolist())) < 2 or len(set(right.tolist())) < 2:
        return None
    return statistics.correlation(left.tolist(), right.tolist())


def rescore(batch: StepBatch, score: Rescore) -> Iterator[RewardChange]:
    """Yield the members whose reward is scored otherwise now than it was recorded."""
    for member in batch.members:
        scored = member.path[-1].reward
        assert scored is not None
        value, error = None, ""
        try:
            value = score(member)
        except RolltapeError as exc:
            error = str(exc)
        if value is None or abs(value - scored.value) > AGREEMENT:
            yield RewardChange(
                uid=member.group.uid,
                tree=member.tree,
                leaf=member.leaf,
                recorded=scored.value,
                rescored=value,
                scorer=f"{scored.scorer} {scored.scorer_version}",
                error=error,
            )
