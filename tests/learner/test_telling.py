"""How audits read: notes of many steps are told once."""

import msgspec
import pytest

from core.events import StepCommitted
from learner.replay import StepReport
from learner.telling import METRICS_WIDTH, StepTable, metric_lines, note_lines, report_lines

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
        "search  HTTP 429 12",
        "        exact_match 0.333333",
    ]
    many = metric_lines({f"budget/number_{count}": count / 7 for count in range(30)})
    assert len(many) > 2
    assert all(len(line) <= METRICS_WIDTH for line in many)
    assert all(line.startswith("        number_") for line in many[1:])
    assert metric_lines({"train/tokens": 1_234_567.0}) == ["train  tokens 1234567"]
    assert metric_lines({}) == []


def commit(step: int, *, skipped: bool = False) -> StepCommitted:
    """Return the commit of a step with the widest usual numbers."""
    metrics = {
        "reward/mean": -0.1,
        "reward/correct": 1.0,
        "reward/format": 1.0,
        "rollout/search_calls": 12.5,
        "rollout/degenerate_group_rate": 1.0,
        "train/datums": 4096.0,
    }
    return StepCommitted(
        step=step,
        skipped=skipped,
        policy_version=step + 1,
        trainer_metrics={},
        rollout_metrics=metrics,
        seconds={"step": 1234.5},
        tokens_trained=1,
        at=0.0,
    )


def test_steps_are_rows_under_a_head_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """The head comes back every twenty rows; every line ends in the same column."""
    table = StepTable(999)
    for step in range(21):
        table.tell(commit(step, skipped=step == 4))
    lines = capsys.readouterr().out.splitlines()
    assert [place for place, line in enumerate(lines) if "reward" in line] == [0, 21]
    assert {len(line) for line in lines} == {80}
    assert lines[5].split()[-4:] == ["%", "skipped", "v5", "1234.5"]
    assert lines[1].split() == [
        "0/999",
        "-0.100",
        "100.0",
        "%",
        "100.0",
        "%",
        "12.50",
        "100",
        "%",
        "4096",
        "v1",
        "1234.5",
    ]


def test_quiet_steps_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """No head either."""
    StepTable(3, quiet=True).tell(commit(0))
    assert capsys.readouterr().out == ""


def test_a_script_gets_each_step_as_the_committed_event(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object a line, without a head, also when --quiet is given."""
    table = StepTable(3, quiet=True, as_json=True)
    for step in range(2):
        table.tell(commit(step))
    told = [msgspec.json.decode(line, type=StepCommitted) for line in capsys.readouterr().out.splitlines()]
    assert told == [commit(0), commit(1)]
