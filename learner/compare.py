"""Owns the comparison of estimators on recorded rollouts: per step and overall, against a reference one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from core.advantage import Estimator
from core.arrays import Float64
from learner.counterfactual import advantages, correlation
from learner.rebuild import CodeLoader, Rebuilt, no_code, rebuild, user_estimator
from store.log import Log

MOST_DIFFERENT = 5
"""Trajectories named per estimator."""
SAME = 1e-12
"""Scaled advantages closer than this agree."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One estimator beside the reference, over one step or all."""

    estimator: str
    members: int
    correlation: float | None
    """Pearson's, with the reference's advantages."""
    sign_flips: int
    zero_groups: int
    """Groups without signal under this estimator."""
    groups: int
    norm: float
    """Root mean square of the advantages."""


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory on which an estimator and the reference disagree, both scaled to norm 1."""

    step: int
    uid: str
    tree: int
    leaf: str
    reward: float
    reference: float
    other: float


class StepComparison(msgspec.Struct, frozen=True, kw_only=True):
    """All estimators over one step."""

    step: int
    rows: tuple[Comparison, ...]


class CompareReport(msgspec.Struct, frozen=True, kw_only=True):
    """Estimators on the same recorded rollouts; the first named is the reference."""

    reference: str
    steps: tuple[StepComparison, ...]
    overall: tuple[Comparison, ...]
    apart: dict[str, tuple[Apart, ...]]
    """Per estimator, the trajectories that differ most."""


class _Step(NamedTuple):
    step: int
    rebuilt: Rebuilt
    advantages: dict[str, Float64]


def compare(
    log: Log, steps: Iterable[int], names: Sequence[str], load: CodeLoader = no_code
) -> CompareReport:
    """Return the report; raises EstimatorError (unknown name), CodeNotAllowed, StoreError or FoldError."""
    users = {name: user_estimator(name, load) for name in names}
    found = [_step(log, step, users, load) for step in steps]
    return CompareReport(
        reference=names[0],
        steps=tuple(StepComparison(step=one.step, rows=tuple(_rows([one], names))) for one in found),
        overall=tuple(_rows(found, names)),
        apart={name: tuple(_apart(found, names[0], name)) for name in names[1:]},
    )


def _step(log: Log, step: int, users: Mapping[str, Estimator | None], load: CodeLoader) -> _Step:
    rebuilt = rebuild(log, log.plan(step), load)
    return _Step(
        step, rebuilt, {name: advantages(rebuilt.batch, rebuilt, name, user) for name, user in users.items()}
    )


def _rows(found: Sequence[_Step], names: Sequence[str]) -> Iterator[Comparison]:
    reference = np.concatenate([one.advantages[names[0]] for one in found])
    for name in names:
        values = np.concatenate([one.advantages[name] for one in found])
        groups = [
            bool(one.advantages[name][one.rebuilt.batch.table.uid == uid].any())
            for one in found
            for uid in np.unique(one.rebuilt.batch.table.uid)
        ]
        yield Comparison(
            estimator=name,
            members=len(values),
            correlation=correlation(reference, values),
            sign_flips=int(np.count_nonzero(reference * values < 0)),
            zero_groups=groups.count(False),
            groups=len(groups),
            norm=float(np.sqrt(np.mean(values**2))) if len(values) else 0.0,
        )


def _apart(found: Sequence[_Step], reference: str, name: str) -> Iterator[Apart]:
    """Yield the trajectories with the largest gap between the two, each scaled to norm 1."""
    left = _unit(np.concatenate([one.advantages[reference] for one in found]))
    right = _unit(np.concatenate([one.advantages[name] for one in found]))
    members = [(one.step, member) for one in found for member in one.rebuilt.batch.members]
    gaps = np.abs(left - right)
    for position in np.argsort(-gaps, kind="stable")[:MOST_DIFFERENT].tolist():
        if gaps[position] < SAME:
            return
        step, member = members[position]
        assert member.reward is not None
        yield Apart(
            step=step,
            uid=member.group.uid,
            tree=member.tree,
            leaf=member.leaf,
            reward=member.reward,
            reference=float(left[position]),
            other=float(right[position]),
        )


def _unit(values: Float64) -> Float64:
    size = float(np.linalg.norm(values))
    return values / size if size else values


def compare_lines(report: CompareReport) -> list[str]:
    """Return the comparison for a terminal."""
    lines = [f"{'':>8} {'estimator':<14} {'corr':>8} {'flips':>6} {'no signal':>10} {'rms':>10}"]
    for step in report.steps:
        lines += [_line(f"step {step.step}", row) for row in step.rows]
    lines += [_line("overall", row) for row in report.overall]
    for name, apart in report.apart.items():
        lines.append(f"furthest from {report.reference} under {name} (both scaled to norm 1):")
        lines += [
            f"  step {one.step} {one.uid}/t{one.tree}/{one.leaf}  reward {one.reward:+.3f}  "
            f"{report.reference} {one.reference:+.4f}  {name} {one.other:+.4f}"
            for one in apart
        ]
    return lines


def _line(where: str, row: Comparison) -> str:
    related = "–" if row.correlation is None else f"{row.correlation:.4f}"
    silent = f"{row.zero_groups}/{row.groups}"
    return f"{where:>8} {row.estimator:<14} {related:>8} {row.sign_flips:>6} {silent:>10} {row.norm:>10.4f}"
