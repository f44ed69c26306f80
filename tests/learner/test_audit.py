"""What can be asked of recorded rollouts: other estimators, other scores, lint, errors, one trajectory."""

import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.advantage import ESTIMATORS, EstimatorOptions, LeafTable
from core.arrays import Float64
from core.errors import CodeNotAllowed, ConfigError, EstimatorError, ReplayError, StoreError
from core.events import GroupAsked, Observed, Outcome, Rewarded, StepPlanned
from core.tree import Trajectory
from engine.client import Session
from learner.checkpoints import checkpoint_lines, list_checkpoints
from learner.compare import compare, compare_lines
from learner.counterfactual import advantages, counterfactual, rescore
from learner.fingerprints import changed, code_fingerprints, git_revision
from learner.lint import Linter, Tally, lint, lint_lines
from learner.loop import Options, run_learner
from learner.offline import check_same_model, copy_groups
from learner.rebuild import committed_event, rebuild
from learner.replay import Auditor, committed_steps, judge, replay_step, replay_steps
from learner.stats import error_lines as errors_told
from learner.stats import error_report, groups_of, staleness_lines, staleness_report
from learner.view import Name, view_trajectory
from store.log import Log, open_log
from store.verify import verify
from tests.building import Script
from tests.learner.support import make_config, open_event
from tests.learner.tampering import rewrite_group, rewrite_journal

Copy = Callable[[str], Path]
PROJECT = Path(__file__).resolve().parents[2]


def spell(tokens: Sequence[int]) -> list[str]:
    """Return token ids as text."""
    return [f"<{token}>" for token in tokens]


@pytest.fixture
def chains(recorded: dict[str, Path]) -> Any:
    """Give the recorded run of chains, read-only."""
    with open_log(recorded["chains"], readonly=True) as log:
        yield log


@pytest.fixture
def trees(recorded: dict[str, Path]) -> Any:
    """Give the recorded run of trees, read-only."""
    with open_log(recorded["trees"], readonly=True) as log:
        yield log


def test_a_report_says_what_a_step_was_made_of(chains: Log) -> None:
    """Enough to check one advantage by hand: rewards, their mean, and the advantage that follows."""
    report = replay_step(Auditor(chains, code_fingerprints()), 1)
    assert report.match
    assert report.members == 6
    for group in report.groups:
        for member in group.members:
            assert member.advantage == pytest.approx(member.reward - group.mean)
        assert group.policy_version == 1
    assert report.tokens["sampled"] == 6 * 10
    assert report.tokens["observation"] == 6 * 6
    assert sum(report.micro_batches) == report.metrics["train/datums"]
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


def test_steps_that_do_not_exist_are_refused(chains: Log) -> None:
    """With the steps that do."""
    with pytest.raises(StoreError, match="step 9"):
        replay_step(Auditor(chains, {}), 9)
    with pytest.raises(ReplayError, match="0 to 2"):
        committed_steps(chains, 1, 7)
    assert list(committed_steps(chains, 1, None)) == [1, 2]


def test_changed_fingerprints_are_named_though_the_step_matches(chains: Log) -> None:
    """Other code may well derive the same batch."""
    report = replay_step(Auditor(chains, code_fingerprints() | {"numpy": "0.0"}), 0)
    assert report.match
    assert any(note.startswith("changed since: numpy was") for note in report.notes)


def test_fingerprints_only_one_side_has_are_no_change(tmp_path: Path) -> None:
    """An older log may lack some; a checkout may have no git."""
    assert changed({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == ["b was 2, is 3"]
    assert git_revision(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (tmp_path / ".git" / "packed-refs").write_text("# pack-refs\nabc123 refs/heads/main\n")
    assert git_revision(tmp_path) == "abc123"
    (tmp_path / ".git" / "HEAD").write_text("def456\n")
    assert git_revision(tmp_path) == "def456"


def test_replay_needs_no_sdk(recorded: dict[str, Path]) -> None:
    """CPU only, no key, no network: the SDK is not even imported."""
    code = (
        "import sys; from pathlib import Path; from learner.replay import *; from store.log import open_log\n"
        f"log = open_log(Path({str(recorded['chains'])!r}), readonly=True)\n"
        "assert all(r.match for r in replay_steps(Auditor(log, {}), committed_steps(log, None, None)))\n"
        "assert not {'pytrio', 'transformers', 'httpx'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


def test_another_estimator_shows_what_would_have_changed(trees: Log) -> None:
    """Against numbers from the members' own rewards."""
    rebuilt = rebuild(trees, trees.plan(1))
    found = counterfactual(rebuilt, 1, "group_mean")
    for leaf in found.leaves:
        peers = [other.reward for other in found.leaves if other.uid == leaf.uid]
        assert leaf.other == pytest.approx(leaf.reward - sum(peers) / len(peers))
        assert leaf.flipped == (leaf.recorded * leaf.other < 0)
    assert found.flips == sum(leaf.flipped for leaf in found.leaves)
    same = counterfactual(rebuilt, 1, "tree")
    assert (same.flips, same.gained, same.lost) == (0, (), ())
    assert same.norm_ratio == 1.0


def zero(table: LeafTable, _options: EstimatorOptions) -> Float64:
    """Give no credit at all."""
    return table.rewards * 0.0


def test_a_users_estimator_can_take_every_groups_signal_away(trees: Log) -> None:
    """Groups lost are named; a constant side has no correlation."""
    found = counterfactual(rebuild(trees, trees.plan(1)), 1, "tests:zero", zero)
    assert len(found.lost) == 2
    assert found.correlation is None
    assert found.norm_ratio == 0.0


def test_code_named_in_a_log_runs_only_when_it_is_allowed(copy_of: Copy) -> None:
    """The step is not re-derivable without it; with it, it is."""
    run = copy_of("chains")
    with open_log(run, readonly=True) as log:
        index = log.step(1).planned_index
    rewrite_journal(run, index, lambda plan: msgspec.structs.replace(plan, estimator="mine:credit"))
    with open_log(run, readonly=True) as log:
        with pytest.raises(CodeNotAllowed, match="mine:credit"):
            replay_step(Auditor(log, {}), 1)
        allowed = Auditor(log, {}, load=lambda name: ESTIMATORS["group_mean"])
        assert judge(allowed, log.plan(1), committed_event(log, 1)).match
        [chain] = replay_step(allowed, 1).differences
        assert "(the plan)" in chain.field  # the test has put the name there itself


def test_estimators_are_compared_over_steps(trees: Log) -> None:
    """The first is the reference: it correlates with itself fully."""
    report = compare(trees, range(3), ["tree", "grpo", "node", "rloo"])
    assert [step.step for step in report.steps] == [0, 1, 2]
    assert [row.estimator for row in report.overall] == ["tree", "grpo", "node", "rloo"]
    assert report.overall[0].correlation == pytest.approx(1.0)
    assert report.overall[0].sign_flips == 0
    assert all(row.members == 24 and row.groups == 6 for row in report.overall)
    assert set(report.apart) == {"grpo", "node", "rloo"}
    assert all(len(apart) <= 5 for apart in report.apart.values())
    assert any("overall" in line for line in compare_lines(report))
    with pytest.raises(EstimatorError, match="grpo"):
        compare(trees, range(1), ["gprpo"])


def test_what_a_comparison_says_by_plain_loops(trees: Log) -> None:
    """Correlation, flips, groups without signal, norm, and who differs most, from the advantages themselves."""
    names = ["group_mean", "tree", "node"]
    report = compare(trees, [0, 2], names)
    rebuilt = {step: rebuild(trees, trees.plan(step)) for step in (0, 2)}
    found = {
        name: [value for step in (0, 2) for value in advantages(rebuilt[step].batch, rebuilt[step], name)]
        for name in names
    }
    uids = [member.group.uid for step in (0, 2) for member in rebuilt[step].batch.members]
    for row in report.overall:
        values, reference = found[row.estimator], found["group_mean"]
        assert row.correlation == pytest.approx(statistics.correlation(reference, values))
        assert row.sign_flips == sum(a * b < 0 for a, b in zip(reference, values, strict=True))
        lit = {uid for uid, value in zip(uids, values, strict=True) if value}
        assert (row.groups, row.zero_groups) == (len(set(uids)), len(set(uids) - lit))
        assert row.norm == pytest.approx(math.sqrt(sum(value**2 for value in values) / len(values)))
    assert report.overall[0].norm != pytest.approx(report.overall[1].norm)
    for name in names[1:]:
        sizes = [math.hypot(*found[which]) for which in ("group_mean", name)]
        gaps = [
            abs(a / sizes[0] - b / sizes[1]) for a, b in zip(found["group_mean"], found[name], strict=True)
        ]
        told = [abs(apart.reference - apart.other) for apart in report.apart[name]]
        assert told == pytest.approx(sorted((gap for gap in gaps if gap >= 1e-12), reverse=True)[: len(told)])
        assert len(told) == min(5, sum(gap >= 1e-12 for gap in gaps))
        for apart in report.apart[name]:
            [reward] = [
                member.reward
                for member in rebuilt[apart.step].batch.members
                if (member.group.uid, member.tree, member.leaf) == (apart.uid, apart.tree, apart.leaf)
            ]
            assert apart.reward == reward


def test_scoring_again_finds_rewards_that_the_scorer_does_not_give(copy_of: Copy) -> None:
    """One altered reward among rewards that all follow from the trajectory."""
    run = copy_of("chains")
    with open_log(run, readonly=True) as log:
        batch = rebuild(log, log.plan(1)).batch
        truth = {(member.tree_uid, member.leaf): member.reward for member in batch.members}
        uid = batch.members[0].group.uid

    def score(member: Trajectory) -> float:
        value = truth[member.tree_uid, member.leaf]
        assert value is not None
        return value

    def alter(tree: int, event: Any) -> Any:
        return (
            msgspec.structs.replace(event, value=0.75) if tree == 1 and isinstance(event, Rewarded) else event
        )

    rewrite_group(run, uid, alter)
    with open_log(run, readonly=True) as log:
        batch = rebuild(log, log.plan(1)).batch
        [found] = rescore(batch, score)
    assert (found.uid, found.tree, found.recorded) == (uid, 1, 0.75)
    assert found.rescored in {0.0, 1.0}


def test_one_trajectory_is_shown_token_by_token(chains: Log) -> None:
    """Logprobs on the sampled tokens only, advantages as they were sent."""
    report = replay_step(Auditor(chains, {}), 1)
    group = next(group for group in report.groups if len({member.reward for member in group.members}) > 1)
    member = group.members[0]
    view = view_trajectory(chains, Name(group.uid, member.tree, member.leaf), spell)
    [segment] = view.segments
    assert segment.datum
    assert [token.sampled for token in segment.tokens] == [False] * 12 + [True] * 5 + [False] * 6 + [True] * 5
    for token in segment.tokens:
        assert (token.logprob is not None) == token.sampled
        assert (token.advantage != 0) == token.sampled
        assert token.text == f"<{token.token}>"


def test_lint_is_quiet_about_what_is_in_order(trees: Log) -> None:
    """Made-up logprobs are not the model's: that alone is found, with the steps."""
    assert {finding.name for finding in lint(trees)} <= {"logprob_drift", "no_signal", "example_collision"}
    assert lint_lines([]) == ["nothing suspicious was found"]


def test_lint_finds_what_was_planted(copy_of: Copy) -> None:
    """Each with a count, a share, an example and what to do."""
    run = copy_of("chains")
    with open_log(run, readonly=True) as log:
        first, second = (group.uid for group in log.plan(0).groups)

    changes: dict[str, dict[str, Any]] = {
        "TurnSampled": {"text": "a\ufffdb"},
        "Rewarded": {"value": 0.5, "components": {"exact_match": 1.0}},
        "Answered": {"outcome": Outcome.TRUNCATED, "answer": None},
    }

    def plant(tree: int, event: Any) -> Any:
        kind = type(event).__name__
        if tree == 1 and isinstance(event, Observed):
            return msgspec.structs.replace(event, prompt_reset=event.tokens)
        if tree == 1 and kind in changes:
            return msgspec.structs.replace(event, **changes[kind])
        if isinstance(event, Rewarded):
            return msgspec.structs.replace(event, value=0.5 + 1e-5)
        return msgspec.structs.replace(event, example_id="same") if isinstance(event, GroupAsked) else event

    rewrite_group(run, first, plant)
    rewrite_group(
        run,
        second,
        lambda tree, event: (
            msgspec.structs.replace(event, example_id="same", question="another?")
            if isinstance(event, GroupAsked)
            else event
        ),
    )
    with open_log(run, readonly=True) as log:
        found = {finding.name: finding for finding in lint(log)}
    expected = {
        "unknown_token",
        "prefix_break",
        "example_collision",
        "tiny_std",
        "truncated",
        "reward_unsupported",
    }
    assert expected <= set(found)
    assert found["prefix_break"].count == 1
    assert found["truncated"].examples == (f"{first}/t1/0.0.1: truncated",)
    assert "observation_in_loss" not in found
    assert any("tiny_std" in line for line in lint_lines(found.values()))


def test_lint_can_score_again(chains: Log) -> None:
    """With a scorer, every reward is compared instead of guessed at."""
    [finding] = [f for f in lint(chains, Linter(rescore=lambda path: 7.0)) if f.name == "reward_unsupported"]
    assert finding.share == 1.0


def wrong_leaves() -> Script:
    """Return one group with a wrong leaf of every kind, and a right one."""
    script = Script(1, references=("Paris",))

    def chain(
        tree: int, content: str | None, outcome: Outcome, reward: float = 0.0, *, ok: bool = True
    ) -> None:
        node = "0.0.0"
        script.turn(node, None, [4], tree=tree)
        if content is not None:
            script.see(node, [5], tree=tree)
            at, event = script.records[-1]
            script.records[-1] = (at, msgspec.structs.replace(event, content=content, ok=ok))
            node = "0.0.1"
            script.turn(node, "0.0.0", [6], tree=tree)
        script.end(node, reward, tree=tree, outcome=outcome)
        at, event = script.records[-1]
        script.records[-1] = (at, msgspec.structs.replace(event, components={"exact_match": reward}))

    chain(1, "the capital is PARIS", Outcome.ANSWERED, 1.0)
    chain(2, "gone", Outcome.ANSWERED, ok=False)
    chain(3, "x", Outcome.TURN_LIMIT)
    chain(4, "x", Outcome.BAD_FORMAT)
    chain(5, None, Outcome.ANSWERED)
    chain(6, "the capital is London", Outcome.ANSWERED)
    chain(7, "the  capital is\nparis", Outcome.ANSWERED)
    return script


def test_wrong_leaves_are_sorted_by_the_first_cause_that_applies() -> None:
    """One of each kind, with an example that shows question, answer and reference."""
    report = error_report([wrong_leaves().group()])
    assert (report.leaves, report.wrong) == (7, 6)
    assert [(kind.kind, kind.count) for kind in report.kinds] == [
        ("tool_fault", 1),
        ("budget", 1),
        ("bad_format", 1),
        ("no_search", 1),
        ("never_retrieved", 1),
        ("retrieved_not_used", 1),
    ]
    assert "expected Paris" in report.kinds[4].examples[0]
    assert errors_told(report)[0] == "6 of 7 scored leaves are wrong"


def test_a_wrong_leaf_tells_where_it_left_a_right_path() -> None:
    """In a tree: how many turns it shares with the closest right leaf."""
    script = Script(1)
    script.turn("0.0.0", None, [4]).see("0.0.0", [5]).turn("0.0.1", "0.0.0", [6]).end("0.0.1", 1.0)
    at, event = script.records[-1]
    script.records[-1] = (at, msgspec.structs.replace(event, components={"exact_match": 1.0}))
    script.expand(1, ["0.0.0", None])
    script.turn("1.0.1", "0.0.0", [7]).end("1.0.1", 0.0)
    script.turn("1.1.0", None, [8]).end("1.1.0", 0.0)
    kinds = {kind.kind: kind.left_at for kind in error_report([script.group()]).kinds}
    assert kinds["never_retrieved"] == {1: 1}
    assert kinds["no_search"] == {0: 1}


def test_staleness_and_groups_are_read_from_the_log(chains: Log) -> None:
    """On policy, everything is fresh."""
    report = staleness_report(chains)
    assert report.groups == {0: 6}
    assert report.tighter == {}
    assert staleness_lines(report)[0] == "staleness 0: 6 groups trained"
    assert len(list(groups_of(chains))) == 6


def test_checkpoints_are_listed_with_what_is_known_of_them(chains: Log) -> None:
    """One per saved step; whether they still exist is asked of the service."""
    lines = list_checkpoints(chains)
    assert [line.step for line in lines] == [0, 2, 3]
    assert lines[0].reward is None
    assert lines[1].reward is not None
    assert lines[1].state_exists is None
    told = checkpoint_lines(list_checkpoints(chains, existing=[lines[1].state_uri]))
    assert "(gone)" in told[0]
    assert "(gone)" not in told[1]


def test_another_run_is_learned_from_with_the_same_datums(
    recorded: dict[str, Path], tmp_path: Path, session: Session
) -> None:
    """The same estimator gives the digests of the source; another one trains other numbers, with the same audit."""
    with open_log(recorded["trees"], readonly=True) as source:
        expected = [source.plan(step).datum_digests for step in range(3)]
        for estimator in ("tree", "group_mean"):
            config = make_config(estimator=estimator)
            run = tmp_path / estimator
            with open_log(run, create=True, role="learner") as log:
                log.open_run(open_event(config))
                assert copy_groups(source, log, range(3), 0.0) == 6
                run_learner(log, session, config, 3, options=Options(any_age=True))
                plans = [r.event for r in log.journal.read() if isinstance(r.event, StepPlanned)]
                assert ([plan.datum_digests for plan in plans] == expected) == (estimator == "tree")
                assert all(r.match for r in replay_steps(Auditor(log, code_fingerprints()), range(3)))
                asked = log.groups.fetch("000000.0").records[0].event
                assert isinstance(asked, GroupAsked)
                assert asked.source == "run-under-test/000000.0"
                assert verify(run) == []


def test_copying_goes_on_where_it_was_interrupted(recorded: dict[str, Path], tmp_path: Path) -> None:
    """And refuses a run that has rollouts of its own."""
    config = make_config()
    with (
        open_log(recorded["chains"], readonly=True) as source,
        open_log(tmp_path / "new", create=True, role="learner") as log,
    ):
        log.open_run(open_event(config))
        copy_groups(source, log, range(1), 0.0)
        assert log.state().next_ticket == 2
        assert copy_groups(source, log, range(3), 0.0) == 6
        assert log.state().fates["closed"] == 6
    run = tmp_path / "used"
    shutil.copytree(recorded["chains"], run)
    with (
        open_log(recorded["trees"], readonly=True) as source,
        open_log(run, role="learner") as log,
        pytest.raises(ConfigError, match="a run of its own"),
    ):
        copy_groups(source, log, range(3), 0.0)


def test_another_tokenizer_or_base_model_is_refused() -> None:
    """Recorded tokens and logprobs would mean something else."""
    same = {"tokenizer": "t", "base_model": "b", "numpy": "1"}
    check_same_model(same, same | {"numpy": "2"})
    with pytest.raises(ConfigError, match="base_model 'b', this one 'c'"):
        check_same_model(same, same | {"base_model": "c"})


def test_some_groups_without_signal_are_no_finding() -> None:
    """Half of the groups may be always right or always wrong; more is a finding, anything else at once."""
    tally = Tally()
    for number in range(10):
        tally.see("no_signal", number < 5, lambda: "a group")
    assert tally.findings() == []
    tally.see("no_signal", wrong=True, example=lambda: "a group")
    tally.see("bad_logprob", wrong=True, example=lambda: "a token")
    assert [finding.name for finding in tally.findings()] == ["no_signal", "bad_logprob"]
