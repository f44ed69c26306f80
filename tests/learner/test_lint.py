"""Each check of lint on groups and steps made for it: found where it is, quiet just beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.arrays import pack_logprobs, view_logprobs
from core.events import GroupAsked, Observed, Rewarded, StepCommitted, StepPlanned, TurnSampled
from learner.lint import ADVICE, FEWEST, MAX_EXAMPLES, LintFinding, lint, lint_lines
from store.log import open_log
from tests.learner.tampering import flip_bit, rewrite_group, rewrite_journal

Copy = Callable[[str], Path]
Change = Callable[[str, int, Any], Any]


def altered(run: Path, change: Change) -> dict[str, LintFinding]:
    """Return what lint finds after `change(uid, tree, event)` was applied to all groups."""
    with open_log(run, readonly=True) as log:
        uids = [row.uid for row in log.group_rows() if row.step is not None]
    for uid in uids:
        before: list[Any] = []
        after: list[Any] = []

        def apply(
            tree: int, event: Any, uid: str = uid, before: list[Any] = before, after: list[Any] = after
        ) -> Any:
            before.append(event)
            after.append(change(uid, tree, event))
            return after[-1]

        try:
            rewrite_group(run, uid, apply)
        except AssertionError:
            assert before == after
    return findings(run)


def findings(run: Path) -> dict[str, LintFinding]:
    """Return what lint finds, by name."""
    with open_log(run, readonly=True) as log:
        return {finding.name: finding for finding in lint(log)}


def rewards(*values: float) -> Change:
    """Return a change that scores the trees 1, 2, 3 of every group so."""

    def change(uid: str, tree: int, event: Any) -> Any:
        if isinstance(event, Rewarded):
            return msgspec.structs.replace(event, value=values[tree - 1], components={})
        return event

    return change


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ((1.0, 1.0, 1.0), {"no_signal"}),
        ((1.0, 0.0, 0.0), set()),
        ((0.5, 0.5005, 0.5), {"tiny_std"}),
        ((0.5, 0.503, 0.5), set()),
        ((31.0, 0.0, 0.0), {"huge_advantage"}),
        ((14.9, 0.0, 0.0), set()),
    ],
)
def test_rewards_without_signal_or_out_of_scale(
    copy_of: Copy, values: tuple[float, ...], found: set[str]
) -> None:
    """Equal; equal up to a thousandth; one with an advantage beyond ten; and what is just in order."""
    seen = altered(copy_of("chains"), rewards(*values))
    assert set(seen) & {"no_signal", "tiny_std", "huge_advantage"} == found
    for name in found - {"huge_advantage"}:
        assert (seen[name].count, seen[name].examined) == (6, 6)
        assert len(seen[name].examples) == MAX_EXAMPLES == 3
    if "huge_advantage" in found:
        assert (seen["huge_advantage"].count, seen["huge_advantage"].examined) == (18, 18)


@pytest.mark.parametrize(
    ("value", "bad"),
    [(float("-inf"), True), (float("nan"), True), (0.25, True), (-51.0, True), (-49.0, False), (0.0, False)],
)
def test_logprobs_that_no_policy_gives(copy_of: Copy, value: float, bad: bool) -> None:
    """Not finite, above 0, or below −50; 0 is a certain token."""
    done: list[str] = []

    def change(uid: str, tree: int, event: Any) -> Any:
        if isinstance(event, TurnSampled) and not done:
            done.append(uid)
            values = view_logprobs(event.sampled_logprobs).copy()
            values[2] = value
            return msgspec.structs.replace(event, sampled_logprobs=pack_logprobs(values))
        return event

    found = altered(copy_of("chains"), change).get("bad_logprob")
    assert (found is not None) is bad
    if found is not None:
        assert (found.count, found.examined) == (1, 6 * 3 * 2)
        assert found.examples[0] == f"{done[0]}/t1/0.0.0: {value!r}"


@pytest.mark.parametrize(
    ("gap", "age", "drift"), [(0.5, 0.0, True), (0.5, 1.0, False), (0.01, 0.0, False), (0.021, 0.0, True)]
)
def test_a_drift_of_logprobs_counts_on_fresh_groups_only(
    copy_of: Copy, gap: float, age: float, drift: bool
) -> None:
    """Old groups were sampled by other weights, so there the two must differ."""
    run = copy_of("chains")
    for step in range(3):
        with open_log(run, readonly=True) as log:
            index = log.step(step).committed_index or 0

        def change(event: Any, step: int = step) -> Any:
            assert isinstance(event, StepCommitted)
            return msgspec.structs.replace(
                event,
                trainer_metrics=event.trainer_metrics | {"trainer/logprob_gap": gap if step == 1 else 0.0},
                rollout_metrics=event.rollout_metrics | {"staleness/max": age},
            )

        rewrite_journal(run, index, change)
    found = findings(run).get("logprob_drift")
    assert (found is not None) is drift
    if found is not None:
        assert (found.count, found.examined, found.examples) == (1, 3, (f"step 1: {gap:.4f}",))


def test_one_id_for_two_questions_is_a_collision_and_for_one_is_none(copy_of: Copy) -> None:
    """Asked again in a later epoch, a question keeps its id."""
    run = copy_of("chains")

    def same(uid: str, tree: int, event: Any) -> Any:
        if isinstance(event, GroupAsked):
            return msgspec.structs.replace(event, example_id="a", question="Q?", data_source="s")
        return event

    assert "example_collision" not in altered(run, same)

    def another(uid: str, tree: int, event: Any) -> Any:
        if isinstance(event, GroupAsked) and uid == "000003.0":
            return msgspec.structs.replace(event, question="Q2?")
        return event

    found = altered(run, another)["example_collision"]
    assert (found.count, found.examined) == (1, 6)
    assert found.examples == ("000003.0: 'a' is also 'Q?'",)


@pytest.mark.parametrize(("value", "related"), [(0.0, True), (1.0, False)])
def test_search_faults_that_go_with_the_reward(copy_of: Copy, value: float, related: bool) -> None:
    """Said from eight trajectories on either side, and from a tenth of a reward on."""

    def change(uid: str, tree: int, event: Any) -> Any:
        faulty = uid < "000003.0"
        if isinstance(event, Observed):
            return msgspec.structs.replace(event, ok=not faulty)
        if isinstance(event, Rewarded):
            return msgspec.structs.replace(event, value=value if faulty else 1.0, components={})
        return event

    found = altered(copy_of("chains"), change).get("search_fault_reward")
    assert FEWEST <= 9
    assert (found is not None) is related
    if found is not None:
        assert found.examples == ("mean reward -1.000 over 9 trajectories with a fault, beside 9 without",)


def test_an_observation_in_the_loss_is_found(copy_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mask inverted, every datum has one."""
    import core.batch
    from core.datum import build_datum

    def inverted(segment: Any, *rest: Any, **named: Any) -> Any:
        built = build_datum(segment, *rest, **named)
        return built._replace(advantages=built.advantages[::-1].copy() + 1)

    monkeypatch.setattr(core.batch, "build_datum", inverted)
    run = copy_of("chains")
    with open_log(run, readonly=True) as log:
        datums = sum(len(log.plan(step).datum_digests) for step in range(3))
        assert isinstance(log.plan(0), StepPlanned)
    found = findings(run)["observation_in_loss"]
    assert (found.count, found.examined) == (datums, datums)


def test_a_finding_reads_with_its_count_share_examples_and_advice(copy_of: Copy) -> None:
    """Six of six, in per cent, the first few, and what to do."""
    seen = altered(copy_of("chains"), rewards(1.0, 1.0, 1.0))
    head, *examples = lint_lines([seen["no_signal"]])
    assert head == f"no_signal: 6 of 6 (100.0 %). {ADVICE['no_signal']}"
    assert examples == [f"    00000{ticket}.0: all 1.0" for ticket in range(3)]


def test_what_cannot_be_read_or_made_again_is_a_finding_and_the_rest_is_examined(copy_of: Copy) -> None:
    """A damaged group, and the step that it belongs to; user code that was not allowed."""
    run = copy_of("chains")
    flip_bit(run, "000002.0")
    with open_log(run, readonly=True) as log:
        index = log.step(2).planned_index
    rewrite_journal(run, index, lambda plan: msgspec.structs.replace(plan, estimator="mine:credit"))
    seen = findings(run)
    assert (seen["unreadable"].count, seen["unreadable"].examined) == (1, 6)
    assert seen["unreadable"].examples[0].startswith("000002.0: damaged record")
    assert (seen["not_derived"].count, seen["not_derived"].examined) == (2, 3)
    assert [example[:8] for example in seen["not_derived"].examples] == ["step 1: ", "step 2: "]
    assert "mine:credit" in seen["not_derived"].examples[1]
