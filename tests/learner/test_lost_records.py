"""Records that are gone, damaged, doubled or in another's place: each is a MISMATCH that names the place."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from core.events import Answered, GroupAsked, Observed, Rewarded, TurnSampled
from learner.lint import lint, lint_lines
from learner.page.steps import read_step, step_facts
from learner.rebuild import no_code
from learner.replay import Auditor, StepReport, replay_step, replay_steps
from learner.stats import error_lines, error_report, groups_of
from learner.telling import note_lines, report_lines
from store import codec
from store.log import open_log
from store.records import RawRecord
from tests.learner.tampering import rewrite_group, rewrite_journal, rewrite_records, spoil_journal

Copy = Callable[[str], Path]
Records = list[RawRecord]


def audit(run: Path) -> list[StepReport]:
    """Return the reports on all three steps; those beside step 1 always match."""
    with open_log(run, readonly=True) as log:
        reports = list(replay_steps(Auditor(log, {}), range(3)))
    assert [report.match for report in reports] == [True, False, True]
    return reports


def told(run: Path) -> str:
    """Return what replay says of step 1."""
    return "\n".join(report_lines(audit(run)[1], whole=True))


def first_group(run: Path) -> str:
    """Return the first group of step 1."""
    with open_log(run, readonly=True) as log:
        return log.plan(1).groups[0].uid


def journal_index(run: Path, name: str) -> int:
    """Return the journal position of the plan or the commit of step 1."""
    with open_log(run, readonly=True) as log:
        index = getattr(log.step(1), name)
    assert isinstance(index, int)
    return index


@pytest.mark.parametrize("name", ["planned_index", "committed_index"])
@pytest.mark.parametrize(("remove", "said"), [(True, "is missing"), (False, "is damaged")])
def test_a_plan_or_commit_that_cannot_be_read_is_the_mismatch_of_its_step(
    copy_of: Copy, name: str, remove: bool, said: str
) -> None:
    """An audit of all steps goes on to the next one."""
    run = copy_of("chains")
    index = journal_index(run, name)
    spoil_journal(run, index, remove=remove)
    text = told(run)
    assert text.startswith("step 1: MISMATCH\n")
    assert f"a stored record {said}" in text
    assert f"position {index}" in text or f"{index:016x}" in text


def test_damage_behind_a_step_is_not_blamed_on_it(copy_of: Copy) -> None:
    """The record after a commit is not the step's own; `verify` names it."""
    run = copy_of("chains")
    spoil_journal(run, journal_index(run, "committed_index") + 1, remove=False)
    with open_log(run, readonly=True) as log:
        assert replay_step(Auditor(log, {}), 1).match


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (Observed, "tree 2 record 2"),
        (Answered, "tree 2 record 4"),
        (Rewarded, "tree 3 record 0"),
        (TurnSampled, "tree 2 record 0"),
    ],
)
def test_a_removed_record_is_named_by_its_place(copy_of: Copy, kind: type, place: str) -> None:
    """Also where what is left makes no group any more."""
    run = copy_of("chains")
    uid = first_group(run)

    def remove(before: Records) -> Records:
        return [
            record
            for record in before
            if not (record.tree == 2 and isinstance(codec.decode_group(record.raw), kind))
        ]

    rewrite_records(run, uid, remove)
    text = told(run)
    lost = 2 if kind is TurnSampled else 1
    assert f"group {uid}: number of records: recorded 19, re-derived {19 - lost}" in text
    assert f"from {place} on" in text


def test_a_record_added_at_the_end_is_counted(copy_of: Copy) -> None:
    """The last of all places."""
    run = copy_of("chains")
    uid = first_group(run)
    rewrite_records(run, uid, lambda before: [*before, before[-1]])
    assert "recorded 19, re-derived 20" in (text := told(run))
    assert "from tree 3 record 6 on" in text


def test_a_group_without_records_is_named(copy_of: Copy) -> None:
    """All of its records are gone."""
    run = copy_of("chains")
    uid = first_group(run)
    rewrite_records(run, uid, lambda before: [])
    text = told(run)
    assert f"group {uid}: no group record" in text
    assert f"group {uid}: number of records: recorded 19, re-derived 0" in text


def test_trajectories_that_changed_places_are_told_as_that(copy_of: Copy) -> None:
    """Each record with the place that the plan has it at."""
    run = copy_of("chains")
    uid = first_group(run)
    swap = {1: 2, 2: 1}
    rewrite_records(
        run,
        uid,
        lambda before: [record._replace(tree=swap.get(record.tree, record.tree)) for record in before],
    )
    text = told(run)
    for here, there in ((1, 2), (2, 1)):
        assert (
            f"group {uid} tree {here} record 0 (sample 0.0.0): record. the plan has this record as tree "
            f"{there} record 0: records changed places" in text
        )
    assert f"group {uid} tree 3" not in text


def test_a_group_that_a_plan_names_twice_is_named(copy_of: Copy) -> None:
    """A step trains each group once."""
    run = copy_of("chains")
    uid = first_group(run)
    rewrite_journal(
        run,
        journal_index(run, "planned_index"),
        lambda plan: msgspec.structs.replace(plan, groups=(plan.groups[0], *plan.groups)),  # type: ignore[union-attr,attr-defined]
    )
    assert f"the plan names group {uid} 2 times" in told(run)


@pytest.mark.parametrize(
    ("name", "event"), [("planned_index", "step_planned"), ("committed_index", "step_committed")]
)
def test_a_record_that_speaks_of_another_step_is_named(copy_of: Copy, name: str, event: str) -> None:
    """The report stays with the step that was asked for."""
    run = copy_of("chains")
    rewrite_journal(run, journal_index(run, name), lambda old: msgspec.structs.replace(old, step=2))
    assert f"{event} of step 1: step: recorded 2, re-derived 1" in told(run)
    assert audit(run)[1].step == 1


@pytest.mark.parametrize("name", ["planned_index", "committed_index"])
def test_another_event_in_the_place_of_a_plan_or_commit_is_named(copy_of: Copy, name: str) -> None:
    """It is read as what it is, not as what it should be."""
    run = copy_of("chains")
    with open_log(run, readonly=True) as log:
        other = log.journal.get(log.step(0).committed_index or 0).event
        if name == "committed_index":
            other = log.plan(0)
    index = journal_index(run, name)
    rewrite_journal(run, index, lambda _: other)
    assert f"journal position {index} holds no" in told(run)


def test_the_page_judges_as_replay_does(copy_of: Copy) -> None:
    """An altered text changes no datum, and is a mismatch on the page as in the terminal."""
    run = copy_of("chains")

    def verdicts() -> list[str]:
        with open_log(run, readonly=True) as log:
            return [step_facts(read_step(log, step, no_code)).verdict for step in range(3)]

    assert verdicts() == ["match"] * 3
    done: list[bool] = []

    def alter(tree: int, event: object) -> object:
        if isinstance(event, Answered) and not done:
            done.append(True)
            return msgspec.structs.replace(event, text="forged")
        return event

    rewrite_group(run, first_group(run), alter)  # type: ignore[arg-type]
    assert not audit(run)[1].match
    assert verdicts() == ["match", "mismatch", "match"]


def test_names_of_a_data_set_cannot_move_the_cursor(copy_of: Copy) -> None:
    """Every line of a report and of a lint is printable, whatever stands in ids, sources and scorers."""
    run = copy_of("chains")
    hostile = "\x1b[2J\x07\u202e\r"

    def alter(tree: int, event: object) -> object:
        if isinstance(event, GroupAsked):
            return msgspec.structs.replace(event, data_source=hostile, example_id=hostile, question=hostile)
        if isinstance(event, Rewarded):
            return msgspec.structs.replace(event, scorer=hostile, components={"exact_match": 1.0})
        return msgspec.structs.replace(event, answer=None) if isinstance(event, Answered) else event

    for uid in (first_group(run), uid_after(run)):
        rewrite_group(run, uid, alter)  # type: ignore[arg-type]
    with open_log(run, readonly=True) as log:
        report = replay_step(Auditor(log, {}), 1)
        lines = [
            *report_lines(report, whole=True),
            *lint_lines(lint(log)),
            *error_lines(error_report(groups_of(log))),
        ]
        lines += note_lines([(1, hostile)])
    assert any("⟨U+001B⟩" in line for line in lines)
    assert [line for line in lines if set(line) & set(hostile) - set("[2J")] == []


def uid_after(run: Path) -> str:
    """Return the second group of step 1."""
    with open_log(run, readonly=True) as log:
        return log.plan(1).groups[1].uid
