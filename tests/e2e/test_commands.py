"""Every command as a stranger meets it: its help, its refusals, and what it tells of a finished run."""

import importlib.util
import json
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

import cli as program
from core.config import EngineSettings
from core.events import StepCommitted
from engine import launch
from engine.client import connect
from store.log import open_log
from tests.e2e.conftest import ENVIRONMENT, cli, finish, start

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
    ("settings",),
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


def test_checkpoints_are_listed_with_whether_they_still_exist(finished_run: Path, tmp_path: Path) -> None:
    """The service is asked; where it cannot be, that is said and the list is told all the same."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    with connect(EngineSettings(), run) as session:
        saved = {one.uri.rpartition("/")[2]: one for one in session.list_checkpoints()}
        session.delete_checkpoint(saved["s000000"])
        session.delete_checkpoint(saved["v000003"])
    lines = told("checkpoints", "--run", run).splitlines()
    assert [line.rpartition("/")[2] for line in lines] == [
        "s000000  (gone)",
        "s000003  (can be restored, not sampled)",
    ]
    asked = json.loads(told("checkpoints", "--run", run, "--json"))
    assert [(line["state_exists"], line["weights_exist"]) for line in asked] == [(False, True), (True, False)]
    launch.stop(run, force=True)
    (launch.engine_folder(run) / "engine.lock").unlink()
    (launch.engine_folder(run) / "engine.lock").mkdir()
    done = call("checkpoints", "--run", run)
    assert done.exit_code == 0
    assert "whether they still exist is not known" in done.stderr
    assert [line.rpartition("/")[2] for line in done.stdout.splitlines()] == ["s000000", "s000003"]


def test_another_run_is_learned_from_and_each_step_is_a_line_of_json(
    finished_run: Path, tmp_path: Path
) -> None:
    """Other advantages from the same rollouts; every step is re-derived, and nothing was sampled."""
    new = tmp_path / "new"
    out = told(
        "learn", "--from", finished_run, "--run", new, "--estimator", "grpo", "--steps", "0:1", "--json"
    )
    steps = [json.loads(line) for line in out.splitlines()]
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["rollout_metrics"]["train/members"] == 64 for step in steps)
    assert "2 steps replayed: all MATCH" in told("replay", "--run", new, "--all")
    launch.stop(new, force=True)


@pytest.mark.parametrize("name", ["tokenizer", "base_model"])
def test_a_run_of_another_model_is_not_learned_from(finished_run: Path, tmp_path: Path, name: str) -> None:
    """Its tokens and logprobs mean something else; the line names what differs."""
    with open_log(finished_run, readonly=True) as log:
        opened, planned = log.run_event(), msgspec.structs.replace(log.plan(0), groups=())
    assert opened is not None
    other = msgspec.structs.replace(opened, fingerprints=opened.fingerprints | {name: "another"})
    with open_log(tmp_path / "source", create=True, role="learner") as log:
        log.open_run(other)
        log.journal.append_sync([planned, StepCommitted(step=0, skipped=True, policy_version=0)])
    line = refusal("learn", "--from", tmp_path / "source", "--run", tmp_path / "new")
    assert f"the source run has {name} 'another'" in line
    launch.stop(tmp_path / "new", force=True)


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


CONFLICTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("replay", "--step", "0", "--estimator", "grpo", "--rescore"), "one at a time"),
    (("replay", "--trajectory", "000000.0/1/0.0.0", "--json"), "--json"),
    (("replay", "--trajectory", "000000.0/1/0.0.0", "--rescore"), "one at a time"),
    (("show", "--group", "000000.0", "--follow"), "name one"),
    (("show", "--group", "000000.0", "--trajectory", "000000.0/1/0.0.0"), "name one"),
    (("verify", "--head", "abc"), "64 hexadecimal digits"),
    (("eval", "--name", "../../elsewhere"), "--name"),
    (("eval", "--name", "a:b"), "--name"),
    (("eval", "compare", "base", "--png", "x.foo"), ".png"),
    (("estimators", "compare", "grpo", "--png", "nowhere/x.png"), "there is no folder 'nowhere'"),
    (("replay", "--step", "0", "--html", "nowhere/x.html"), "there is no folder 'nowhere'"),
)


@pytest.mark.parametrize(("words", "told_why"), CONFLICTS, ids=repr)
def test_what_cannot_be_meant_is_refused(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told_why: str
) -> None:
    """No option is silently left aside, and no name leads out of the run."""
    monkeypatch.chdir(tmp_path)
    assert told_why in refusal(*words, "--run", finished_run)
    assert not list(tmp_path.iterdir())


def test_learning_from_a_run_refuses_before_it_makes_one(finished_run: Path, tmp_path: Path) -> None:
    """The same run, a source without steps, and steps that it does not have."""
    new = tmp_path / "new"
    assert "needs a new one" in refusal("learn", "--from", finished_run, "--run", finished_run)
    assert "0 to 2" in refusal("learn", "--from", finished_run, "--run", new, "--steps", "7:9")
    bundle, imported = tmp_path / "groups.bundle", tmp_path / "imported"
    told("export", "--run", finished_run, "--out", bundle)
    told("import", "--run", imported, "--from", bundle)
    assert f"learn --run {imported}" in refusal("learn", "--from", imported, "--run", new)
    assert not new.exists()


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A file that is cut, and one whose run is missing; a directory that was there stays."""
    (tmp_path / "cut.bundle").write_bytes(b"rolltape")
    (tmp_path / "alone.jsonl").write_text("{}\n")
    for name in ("cut.bundle", "alone.jsonl"):
        assert name in refusal("import", "--run", tmp_path / "run", "--from", tmp_path / name)
    assert not (tmp_path / "run").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").write_text("mine")
    refusal("import", "--run", tmp_path / "kept", "--from", tmp_path / "cut.bundle")
    assert (tmp_path / "kept" / "notes").read_text() == "mine"


def test_an_imported_run_can_be_rolled_out_and_its_world_comes_back(
    finished_run: Path, tmp_path: Path
) -> None:
    """The questions of the generated world are a function of the seed; the tickets go on where they were."""
    bundle, run = tmp_path / "groups.bundle", tmp_path / "imported"
    told("export", "--run", finished_run, "--out", bundle)
    told("import", "--run", run, "--from", bundle)
    with open_log(run, readonly=True) as log:
        before = log.state().next_ticket
    rollout = start("rollout", "--run", run, "--set", "learner.max_staleness=0")
    learn = start("learn", "--run", run, "--max-steps", 4)
    finish(learn)
    finish(rollout)
    launch.stop(run, force=True)
    world = Path("world") / "train.jsonl"
    assert (run / world).read_bytes() == (finished_run / world).read_bytes()
    with open_log(run, readonly=True) as log:
        assert log.state().committed_steps == 4
        assert log.state().next_ticket == before + 8


def test_the_settings_of_a_run_make_one_like_it(finished_run: Path, tmp_path: Path) -> None:
    """What is printed is a configuration file; a bad setting is refused as it would be by the run."""
    (tmp_path / "run.toml").write_text(told("settings", "--run", finished_run))
    again = told("settings", "--config", tmp_path / "run.toml")
    assert again == told("settings", "--run", finished_run)
    plain = json.loads(told("settings", "--preset", "search-r1", "--set", "run.seed=7", "--json"))
    assert (plain["run"]["seed"], plain["engine"]["lora_rank"]) == (7, 32)
    assert "leave out" in refusal("settings", "--run", finished_run, "--preset", "demo")
    assert "'learner.loss'" in refusal("settings", "--set", "learner.los=ppo")


def test_what_a_used_up_budget_leaves_can_be_trained(run_dir: Path) -> None:
    """Both stop, what waits is counted, and a learner without that limit trains it."""
    given = ("--preset", "demo", "--set", "budget.tokens_sampled=1")
    assert "rollout: ended: budget" in cli("rollout", "--run", run_dir, *given).err
    stopped = cli("learn", "--run", run_dir, "--max-steps", 1).err
    assert "0 steps are committed; stopped: budget.tokens_sampled is used up" in stopped
    assert stopped.endswith("; 8 groups wait in the log\n")
    done = cli("learn", "--run", run_dir, "--set", "budget.tokens_sampled=0")
    assert "1 steps are committed; stopped: goal\n" in done.err


def test_a_run_without_a_step_is_no_fault(run_dir: Path) -> None:
    """What looks at it says that there is nothing yet; what would compare steps refuses in one line."""
    assert "nothing is left to do" in cli("learn", "--run", run_dir, "--preset", "demo", "--max-steps", 0).err
    assert "nothing was replayed" in told("replay", "--run", run_dir, "--all")
    for words in (("show",), ("stats",), ("lint",), ("checkpoints",)):
        told(*words, "--run", run_dir)
    for words in (
        ("estimators", "compare", "grpo"),
        ("replay", "--all", "--estimator", "grpo"),
        ("replay", "--all", "--rescore"),
    ):
        assert "no committed step yet" in refusal(*words, "--run", run_dir)


def test_the_numbers_of_a_run_have_names(finished_run: Path) -> None:
    """No number stands in a bare list."""
    found = json.loads(told("stats", "--run", finished_run, "--budget", "--json"))["budget"]
    assert found["cost"]["groups"] == 24
    assert found["tokens_per_group"]["measured"] == found["tokens_per_group"]["paper"]


def test_a_user_estimator_that_fails_is_one_line(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its name and what it raised."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_estimator.py").write_text("def nothing():\n    return 1\n")
    named = "odd_estimator:nothing"
    given = ("--run", finished_run, "--allow-code", named)
    assert "TypeError" in refusal("replay", "--step", 0, "--estimator", named, *given)
    assert named in refusal("estimators", "compare", "grpo", named, *given)


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


def test_an_evaluation_by_address_is_that_of_the_policy_and_goes_on(
    finished_run: Path, tmp_path: Path
) -> None:
    """--model-path names the same weights; asked again under its name, nothing is asked; the picture is a PNG."""
    with open_log(finished_run, readonly=True) as log:
        newest = log.policies()[-1]
    assert newest.weights_uri.startswith("trio://")
    common = ("eval", "--run", finished_run, "--limit", 3, "--quiet", "--json")
    by_address = ("--model-path", newest.weights_uri, "--name", "address", "--batch-size", 1)
    one = json.loads(told(*common, *by_address))
    other = json.loads(told(*common, "--policy", newest.policy_version, "--name", "number"))
    assert one["weights_uri"] == other["weights_uri"] == newest.weights_uri
    assert (one["results"], one["settings"]) == (other["results"], other["settings"])
    assert (len(one["results"]), one["settings"]["temperature"], one["settings"]["samples"]) == (3, 0.0, 1)
    [records] = (finished_run / "eval").glob("address-v*.jsonl")
    before = records.read_bytes()
    assert json.loads(told(*common, *by_address))["results"] == one["results"]
    assert records.read_bytes() == before
    several = json.loads(told(*common, "--samples", 2, "--name", "several"))["settings"]
    assert (several["samples"], several["temperature"]) == (2, 1.0)
    told("eval", "compare", "--run", finished_run, "address", "number", "--png", tmp_path / "eval.png")
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
