"""Other estimators and scores on rewards that are known: every figure by hand."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.advantage import EstimatorOptions, LeafTable
from core.arrays import Float64
from core.events import Rewarded
from core.tree import Trajectory
from learner.compare import compare, compare_lines
from learner.counterfactual import AGREEMENT, correlation, counterfactual, rescore
from learner.rebuild import rebuild
from store.log import Log, open_log
from tests.learner.tampering import rewrite_group

STEP = 1
NEGATED = "mine:negated"
GROUPS = {"000002.0": (1.0, 0.5, 0.0), "000003.0": (0.25, 0.25, 0.25)}
"""Advantages under group_mean: +0.5, 0, −0.5; and none."""


def negated(table: LeafTable, _options: EstimatorOptions) -> Float64:
    """Give the opposite of group_mean to the first group, and credit to the second."""
    first = table.uid == table.uid[0]
    return (0.5 - table.rewards) * first + 1.0 * ~first


@pytest.fixture
def log(copy_of: Callable[[str], Path]) -> Iterator[Log]:
    """Give a run of chains whose step 1 has these rewards."""
    run = copy_of("chains")
    for uid, values in GROUPS.items():

        def change(tree: int, event: Any, values: tuple[float, ...] = values) -> Any:
            return (
                msgspec.structs.replace(event, value=values[tree - 1])
                if isinstance(event, Rewarded)
                else event
            )

        rewrite_group(run, uid, change)
    with open_log(run, readonly=True) as opened:
        yield opened


def test_flips_gains_and_losses(log: Log) -> None:
    """An advantage of 0 cannot flip; a group gains a signal where it had none."""
    found = counterfactual(rebuild(log, log.plan(STEP)), STEP, NEGATED, negated)
    assert [leaf.recorded for leaf in found.leaves] == pytest.approx([0.5, 0, -0.5, 0, 0, 0])
    assert [leaf.other for leaf in found.leaves] == pytest.approx([-0.5, 0, 0.5, 1, 1, 1])
    assert [leaf.flipped for leaf in found.leaves] == [True, False, True, False, False, False]
    assert found.flips == 2
    assert (found.gained, found.lost) == (("000003.0",), ())
    assert found.norm_ratio == pytest.approx(math.sqrt(3.5 / 0.5))
    assert found.correlation == pytest.approx(-0.5 / math.sqrt(0.5 * (3.5 - 9 / 6)))
    assert (found.recorded, found.other, found.step) == ("group_mean", NEGATED, STEP)
    back = counterfactual(rebuild(log, log.plan(STEP)), STEP, "rloo")
    assert [leaf.other for leaf in back.leaves] == pytest.approx([0.75, 0, -0.75, 0, 0, 0])
    assert (back.flips, back.gained, back.lost) == (0, (), ())
    assert back.correlation == pytest.approx(1.0)
    assert back.norm_ratio == pytest.approx(1.5)


def test_estimators_side_by_side(log: Log) -> None:
    """The first is the reference; rloo is group_mean but for its scale, so nothing is apart."""
    report = compare(log, [STEP], ["group_mean", NEGATED, "rloo"], load=lambda name: negated)
    assert report.reference == "group_mean"
    mean, other, rloo = report.overall
    assert report.steps[0].rows == report.overall
    assert [row.estimator for row in report.overall] == ["group_mean", NEGATED, "rloo"]
    assert [(row.members, row.groups) for row in report.overall] == [(6, 2)] * 3
    assert [row.zero_groups for row in report.overall] == [1, 0, 1]
    assert [row.sign_flips for row in report.overall] == [0, 2, 0]
    assert mean.norm == pytest.approx(math.sqrt(0.5 / 6))
    assert other.norm == pytest.approx(math.sqrt(3.5 / 6))
    assert rloo.norm == pytest.approx(1.5 * mean.norm)
    assert report.apart["rloo"] == ()
    apart = report.apart[NEGATED]
    half, unit = math.sqrt(0.5), math.sqrt(3.5)
    assert [(one.uid, one.tree) for one in apart] == [
        ("000002.0", 1),
        ("000002.0", 3),
        ("000003.0", 1),
        ("000003.0", 2),
        ("000003.0", 3),
    ]
    assert [one.reference for one in apart] == pytest.approx([0.5 / half, -0.5 / half, 0, 0, 0])
    assert [one.other for one in apart] == pytest.approx(
        [-0.5 / unit, 0.5 / unit, 1 / unit, 1 / unit, 1 / unit]
    )
    assert [one.reward for one in apart] == [1.0, 0.0, 0.25, 0.25, 0.25]
    lines = compare_lines(report)
    [overall] = [line for line in lines if line.split()[:2] == ["overall", NEGATED]]
    assert overall.split()[3:] == ["2", "0/2", f"{other.norm:.4f}"]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1.0, 2.0], [2.0, 4.0], 1.0),
        ([1.0, 2.0], [4.0, 2.0], -1.0),
        ([1.0], [1.0], None),
        ([1.0, 1.0], [1.0, 2.0], None),
        ([1.0, 2.0], [3.0, 3.0], None),
    ],
)
def test_correlation_needs_two_values_that_differ_on_both_sides(
    left: list[float], right: list[float], expected: float | None
) -> None:
    """A constant side has none."""
    import numpy as np

    found = correlation(np.array(left), np.array(right))
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("off", "count"), [(0.0, 0), (AGREEMENT / 2, 0), (2 * AGREEMENT, 6)])
def test_rewards_within_rounding_are_the_same(log: Log, off: float, count: int) -> None:
    """What differs by no more is no change."""

    def score(member: Trajectory) -> float:
        assert member.reward is not None
        return member.reward + off

    assert len(list(rescore(rebuild(log, log.plan(STEP)).batch, score))) == count
