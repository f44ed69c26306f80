"""How audits read: notes of many steps are told once."""

import pytest

from learner.replay import StepReport
from learner.telling import METRICS_WIDTH, metric_lines, note_lines, report_lines

OLD, NEW = "a1" * 20, "b2" * 20
NOTE = f"changed since: git was {OLD}, is {NEW}"
SHORT = f"changed since: git was {OLD[:12]}, is {NEW[:12]}"


def report(step: int, *notes: str) -> StepReport:
    """Return a report of a matching step."""
    return StepReport(
        step=step,
        match=True,
        committed=True,
        skipped=False,
        estimator="group_mean",
        loss="ppo",
        learning_rate=1e-4,
        policy_version=step,
        batch_digest="c3" * 32,
        notes=notes,
    )


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([4], "step 4"),
        ([0, 1], "steps 0–1"),
        (list(range(30)), "steps 0–29"),
        ([0, 1, 2, 7, 9, 10], "steps 0–2, 7, 9–10"),
    ],
)
def test_the_same_note_of_many_steps_is_one_line(steps: list[int], told: str) -> None:
    """Digests are cut to twelve digits, steps in a row are a span."""
    assert note_lines((step, NOTE) for step in steps) == [f"note: {told}: {SHORT}"]


def test_other_words_are_other_lines() -> None:
    """Notes keep the order in which they first appear; short numbers stay whole."""
    metric = "metric reward/mean: recorded 0.1234567890123456, re-derived 0.25"
    assert note_lines([(0, NOTE), (1, metric), (1, NOTE), (2, "numpy was 2.1, is 2.4")]) == [
        f"note: steps 0–1: {SHORT}",
        f"note: step 1: {metric}",
        "note: step 2: numpy was 2.1, is 2.4",
    ]
    assert note_lines([]) == []


def test_only_a_step_told_in_full_carries_its_notes() -> None:
    """Among many, a step is one line; alone, its notes stand with it, shortened."""
    assert report_lines(report(3, NOTE), whole=False) == [f"step 3: MATCH  batch {'c3' * 8}"]
    assert report_lines(report(3, NOTE), whole=True)[-1] == f"  note: {SHORT}"


def test_metrics_are_told_by_family() -> None:
    """One line per family, wrapped between members; names without a family stand under none."""
    metrics = {"reward/mean": 0.25, "reward/hotpot": 1.0, "search/429": 12.0, "exact_match": 1 / 3}
    assert metric_lines(metrics) == [
        "reward  mean 0.25  hotpot 1",
        "search  429 12",
        "        exact_match 0.333333",
    ]
    many = metric_lines({f"budget/number_{count}": count / 7 for count in range(30)})
    assert len(many) > 2
    assert all(len(line) <= METRICS_WIDTH for line in many)
    assert all(line.startswith("        number_") for line in many[1:])
    assert metric_lines({}) == []
