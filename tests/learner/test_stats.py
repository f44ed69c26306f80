"""Statistics of recorded groups by hand: errors and their shares, staleness, what was dropped, what was spent."""

from pathlib import Path

import msgspec
import pytest

from core.events import Outcome
from core.tree import Group
from engine.client import Session
from learner.loop import run_learner
from learner.stats import (
    MAX_EXAMPLES,
    budget_lines,
    budget_report,
    error_lines,
    error_report,
    holds,
    staleness_lines,
    staleness_report,
)
from store.log import open_log
from tests.building import Script
from tests.learner.support import CHAINS, Worker, make_config, open_event, working


def answered(tree: int, script: Script, reward: float | None, outcome: Outcome = Outcome.ANSWERED) -> None:
    """Add a chain that answers without a search."""
    script.turn("0.0.0", None, [4, 5], tree=tree)
    script.end("0.0.0", reward, tree=tree, outcome=outcome)
    if reward is not None:
        at, event = script.records[-1]
        script.records[-1] = (at, msgspec.structs.replace(event, components={"exact_match": reward}))


def group_of(*rewards: float | None) -> Group:
    """Return a group of chains that were scored so; None is not scored yet."""
    script = Script(1, [1, 2, 3], references=("Paris", "\x1b[31mRed"))
    for tree, reward in enumerate(rewards, start=1):
        answered(tree, script, reward)
    return script.group()


def test_shares_are_of_the_wrong_leaves_and_examples_are_few() -> None:
    """Five wrong of seven scored; one that is not scored is not counted."""
    script = Script(1, [1, 2, 3])
    for tree, reward in enumerate([1.0, 1.0, 0.0, 0.0, 0.0, 0.0], start=1):
        answered(tree, script, reward)
    answered(7, script, 0.0, Outcome.BAD_FORMAT)
    answered(8, script, None)
    report = error_report([script.group()])
    assert (report.leaves, report.wrong) == (7, 5)
    kinds = {kind.kind: kind for kind in report.kinds}
    assert (kinds["no_search"].count, kinds["no_search"].share) == (4, 0.8)
    assert (kinds["bad_format"].count, kinds["bad_format"].share) == (1, 0.2)
    assert len(kinds["no_search"].examples) == MAX_EXAMPLES == 3
    lines = error_lines(report)
    assert lines[0] == "5 of 7 scored leaves are wrong"
    assert any(line.split()[:4] == ["no_search", "4", "80.0", "%"] for line in lines)


def test_nothing_wrong_has_no_shares() -> None:
    """Nothing is divided by nothing."""
    report = error_report([group_of(1.0, 1.0)])
    assert (report.leaves, report.wrong) == (2, 0)
    assert {kind.share for kind in report.kinds} == {0.0}
    assert error_report([]).leaves == 0


def test_an_example_shows_no_control_characters() -> None:
    """A data set's reference cannot colour the terminal."""
    [example] = [kind.examples[0] for kind in error_report([group_of(0.0)]).kinds if kind.count]
    assert "\x1b" not in example
    assert "Paris | " in example


@pytest.mark.parametrize(
    ("text", "phrase", "held"),
    [
        ("the mayor is ann.", "ann", True),
        ("ann", "ann", True),
        ("the mayor is anne", "ann", False),
        ("joann and ann's dog", "ann", True),
        ("in 1842 it was", "42", False),
        ("42", "42", True),
        ("first joann, then ann", "ann", True),
        ("法国的首都巴黎是", "巴黎", True),
        ("anything", "", False),
        ("c++ code", "c++", True),
    ],
)
def test_a_reference_is_found_as_words_of_its_own(text: str, phrase: str, held: bool) -> None:
    """A part of another word or number is not the reference; scripts without spaces have no such words."""
    assert holds(text, phrase) is held


def test_staleness_dropped_and_tighter_bounds(session: Session, tmp_path: Path) -> None:
    """Groups made three steps ahead: trained at ages 0, 1 and 2 where that is allowed, dropped where not."""
    ahead = make_config(groups_per_step=2, max_staleness=2)
    fresh = make_config(groups_per_step=2, max_staleness=0)
    with open_log(tmp_path / "old", create=True, role="learner") as log:
        log.open_run(open_event(ahead))
        Worker(log, ahead, CHAINS).fill()
        run_learner(log, session, ahead, 3)
        report = staleness_report(log)
        assert report.groups == {0: 2, 1: 2, 2: 2}
        assert report.tighter == {0: 4, 1: 2}
        assert report.dropped == {}
    with open_log(tmp_path / "fresh", create=True, role="learner") as log:
        log.open_run(open_event(fresh))
        Worker(log, ahead, CHAINS).fill()
        with working(Worker(log, fresh, CHAINS)):
            run_learner(log, session, fresh, 2)
        report = staleness_report(log)
        assert report.groups == {0: 4}
        assert report.dropped == {"stale": 4}
        assert "dropped, stale: 4" in staleness_lines(report)


def test_what_was_spent_is_told_per_group_and_per_leaf() -> None:
    """Two chains of two tokens each, in one request of three prompt tokens."""
    report = budget_report([group_of(1.0, 0.0)])
    lines = budget_lines(report)
    assert lines[0] == "1 groups: 4 tokens generated, 3 read, 0 tool calls, 1 requests, 2 leaves"
    assert lines[1] == "per group 4.0 tokens and 0.00 calls"
    assert lines[2] == "per leaf 2.0 tokens and 0.00 calls"
    assert lines[3].startswith("tokens per group: measured 4.0, ")
    assert lines[4].startswith("calls per group: measured 0.0, ")
