"""Every command as a stranger meets it: its help, its refusals, and what it tells of a finished run."""

import importlib.util
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import cli as program
from tests.e2e.conftest import ENVIRONMENT, cli

FAKE_SWANLAB = Path(__file__).resolve().parents[1] / "learner" / "fake_swanlab"


def call(*arguments: object) -> Result:
    """Run one command in this process: as fast as it is, and its warnings are errors."""
    return CliRunner().invoke(program.main, [str(argument) for argument in arguments])


def told(*arguments: object) -> str:
    """Run one command that must succeed; return what it printed on standard output."""
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*arguments: object) -> str:
    """Run one command that must refuse its input in one line; return that line."""
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    [line] = done.stderr.splitlines()
    assert line.startswith("rolltape: ")
    return line


def commands(group: click.Group = program.main, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    for name, command in sorted(group.commands.items()):
        yield (*prefix, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*prefix, name))


@pytest.mark.parametrize("words", [(), *commands()], ids=" ".join)
def test_help_is_complete_and_fits(words: tuple[str, ...]) -> None:
    """Every option is explained, and in a list of commands no line is cut short."""
    text = told(*words, "--help")
    assert "..." not in text.partition("Commands:")[2]
    command: click.Command = program.main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{' '.join(words)} {parameter.opts[0]}"


@pytest.mark.parametrize("words", [(), ("learn",), ("replay",), ("eval", "compare")], ids=" ".join)
def test_help_loads_nothing_heavy(words: tuple[str, ...]) -> None:
    """Help costs less than 0.3 s of CPU, interpreter included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert cli(*words, "--help").status == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


NEEDS_A_RUN: tuple[tuple[str, ...], ...] = (
    ("rollout",),
    ("learn", "--dry-run", "--max-steps", "3"),
    ("eval", "--limit", "1"),
    ("eval", "compare", "base"),
    ("replay", "--all"),
    ("verify",),
    ("lint",),
    ("stats",),
    ("show",),
    ("checkpoints",),
    ("estimators", "compare", "grpo"),
    ("report", "--html", "page.html"),
    ("export", "--out", "groups.jsonl"),
    ("backup", "--out", "copy"),
    ("compact",),
    ("rebuild",),
)


@pytest.mark.parametrize("words", NEEDS_A_RUN, ids=" ".join)
def test_a_missing_run_is_one_line_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """A run that is not there, and an empty directory in its place."""
    monkeypatch.chdir(tmp_path)
    assert "'none'" in refusal(*words, "--run", "none")
    (tmp_path / "empty").mkdir()
    assert "'empty'" in refusal(*words, "--run", "empty")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_an_engine_that_is_off_is_said_in_two_words(tmp_path: Path) -> None:
    """No zeros are listed; stopping it again is no error."""
    assert told("engine", "status", "--run", tmp_path) == "not running\n"
    assert told("engine", "stop", "--run", tmp_path) == "it was not running\n"


def test_the_cost_of_a_new_run_is_estimated_from_its_limits(tmp_path: Path) -> None:
    """Nothing is made, and the estimate says that it is an upper bound."""
    arguments = ("learn", "--run", tmp_path / "run", "--preset", "demo", "--dry-run", "--max-steps", 10)
    lines = told(*arguments, "--set", "budget.price_per_search=0.01").splitlines()
    assert lines[0].startswith("10 steps, 80 groups, up to 640 trajectories (at most")
    assert "2,560 searches, 25.60 at the configured prices" in lines[1]
    assert not (tmp_path / "run").exists()
    assert "--max-steps" in refusal("learn", "--run", tmp_path / "run", "--preset", "demo", "--dry-run")


def test_the_cost_of_more_steps_is_estimated_from_the_run(finished_run: Path) -> None:
    """Measured means of this run, for what is left up to the goal; the log is not touched."""
    before = (finished_run / "log" / "data.mdb").read_bytes()
    assert told("learn", "--run", finished_run, "--dry-run") == "nothing left to buy: 3 of 3 steps are done\n"
    found = json.loads(told("learn", "--run", finished_run, "--dry-run", "--max-steps", 6, "--json"))
    steps = [
        json.loads(line) for line in told("replay", "--run", finished_run, "--all", "--json").splitlines()
    ]
    assert (found["steps"], found["groups"], found["measured"]) == (3, 24, True)
    assert found["tokens_trained"] == sum(step["tokens"]["sent"] for step in steps)
    assert found["search_calls"] == sum(step["metrics"]["search/calls"] for step in steps)
    assert (finished_run / "log" / "data.mdb").read_bytes() == before


def test_budget_and_tracking_are_given_anew_by_each_command(finished_run: Path) -> None:
    """They are no part of what the run is; everything else stays frozen."""
    given = ("learn", "--run", finished_run, "--dry-run", "--max-steps", 4)
    priced = ("--set", "budget.price_per_search=1", "--set", "tracking.swanlab=offline")
    assert "at the configured prices" in told(*given, *priced)
    assert "learner.loss" in refusal(*given, "--set", "learner.loss=ppo")


def test_learn_sends_what_swanlab_lacks_also_after_the_goal(finished_run: Path, tmp_path: Path) -> None:
    """A later `learn` has nothing to train, and still hands every step over."""
    (tmp_path / "behaviour").write_text("")
    record = tmp_path / "record"
    env = ENVIRONMENT | {
        "PYTHONPATH": str(FAKE_SWANLAB),
        "FAKE_SWANLAB": str(tmp_path / "behaviour"),
        "FAKE_SWANLAB_RECORD": str(record),
    }
    done = cli("learn", "--run", finished_run, "--set", "tracking.swanlab=online", "--json", env=env)
    assert done.status == 0, done.err
    assert done.out == "", "no step was trained, and SwanLab prints nothing into the output"
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    assert [call["step"] for call in calls if call["call"] == "log"] == [0, 1, 2]


@pytest.mark.skipif(
    importlib.util.find_spec("swanboard") is not None, reason="swanlab's dashboard is installed"
)
def test_a_missing_package_is_said_before_anything_is_trained(finished_run: Path) -> None:
    """The line names the package and what to install."""
    line = refusal("learn", "--run", finished_run, "--set", "tracking.swanlab=local")
    assert "pip install" in line
    assert "swanlab" in line


def test_a_run_with_checkpoints_does_not_begin_anew(finished_run: Path) -> None:
    """--resume-from on a run that is under way is said to have no effect; the run goes on from its own state."""
    done = cli("learn", "--run", finished_run, "--resume-from", "trio://elsewhere/state/s")
    assert done.status == 0, done.err
    assert "--resume-from only begins a run" in done.err


def test_user_code_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the user's module is told with its kind, and no run is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_scorer.py").write_text("def score(:\n")
    named = "broken_scorer:score"
    done = cli(
        "rollout",
        "--run",
        "run",
        "--preset",
        "demo",
        "--set",
        f"reward.scorer={named}",
        "--allow-code",
        named,
    )
    assert done.status == 2
    [line] = done.err.splitlines()
    assert "SyntaxError" in line
    assert "broken_scorer.py" in line
    assert not (tmp_path / "run").exists()


def test_copies_of_a_run_are_runs(finished_run: Path, tmp_path: Path) -> None:
    """A backup replays as the run does; exported groups enter a fresh log, which has no step yet."""
    told("backup", "--run", finished_run, "--out", tmp_path / "copy")
    assert "3 steps replayed: all MATCH" in told("replay", "--run", tmp_path / "copy", "--all")
    assert "not empty" in refusal("backup", "--run", finished_run, "--out", tmp_path / "copy")
    for ending, wrote in (("bundle", "24 groups"), ("jsonl", "192 trajectories")):
        out, run = tmp_path / f"groups.{ending}", tmp_path / ending
        assert told("export", "--run", finished_run, "--out", out) == f"wrote {wrote} to {out}\n"
        assert "24 groups" in told("import", "--run", run, "--from", out)
        assert "sound" in told("verify", "--run", run)
        assert "nothing was replayed" in told("replay", "--run", run, "--all")
        assert "import into a fresh log" in refusal("import", "--run", run, "--from", out)
    assert "--format" in refusal("export", "--run", finished_run, "--out", tmp_path / "groups.txt")


def test_what_cannot_be_written_is_one_line(finished_run: Path, tmp_path: Path) -> None:
    """Files into folders that are not there, or that are files."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "none", tmp_path / "file"):
        assert str(place) in refusal("report", "--run", finished_run, "--html", place / "page.html")
        assert str(place) in refusal("export", "--run", finished_run, "--out", place / "groups.jsonl")


def test_reading_commands_tell_of_a_finished_run(finished_run: Path, tmp_path: Path) -> None:
    """Each prints something to the point and leaves the log as it was."""
    before = (finished_run / "log" / "data.mdb").read_bytes()
    assert "3 of 3 steps" in told("show", "--run", finished_run)
    told("report", "--run", finished_run, "--html", tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().count("<html") == 1
    assert "staleness 0: 24 groups trained" in told("stats", "--run", finished_run)
    assert "overall grpo" in told("estimators", "compare", "--run", finished_run, "group_mean", "grpo")
    assert told("estimators", "list").startswith("group_mean   R_i − mean")
    assert "s000003" in told("checkpoints", "--run", finished_run)
    assert "grpo instead of group_mean" in told(
        "replay", "--run", finished_run, "--all", "--estimator", "grpo"
    )
    assert "0 differ" in told("replay", "--run", finished_run, "--all", "--rescore")
    assert "has no evaluation 'x'" in refusal("eval", "compare", "--run", finished_run, "x")
    assert "name its run" in refusal("eval", "compare", "x")
    assert (finished_run / "log" / "data.mdb").read_bytes() == before


def test_evaluations_are_recorded_and_compared(finished_run: Path) -> None:
    """Base and trained weights answer the same questions; the comparison has a row for each."""
    for policy in ("base", "latest"):
        text = told("eval", "--run", finished_run, "--policy", policy, "--limit", 4, "--name", policy)
        assert "exact_match" in text
        assert "search" in text
    lines = told("eval", "compare", "--run", finished_run, "base", "latest").splitlines()
    assert lines[0] == "4 questions"
    assert [line.split()[0] for line in lines[2:]] == ["base", "latest"]
    assert "expected base, latest or one of" in refusal("eval", "--run", finished_run, "--policy", "99")
