"""`replay` as a user runs it: which steps, with what status, on an altered log, and on a read-only file system."""

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from core.events import Rewarded
from store.log import open_log
from tests.e2e.conftest import CLI, ENVIRONMENT, ROOT, cli
from tests.learner.tampering import rewrite_group, rewrite_journal, spoil_journal


@pytest.fixture
def altered(finished_run: Path, tmp_path: Path) -> Path:
    """Give a copy of the run in which one reward of step 1 was altered."""
    run = tmp_path / "altered"
    shutil.copytree(finished_run / "log", run / "log")
    with open_log(run, readonly=True) as log:
        uid = log.plan(1).groups[0].uid
    rewrite_group(
        run,
        uid,
        lambda tree, event: (
            msgspec.structs.replace(event, value=0.75) if tree == 1 and isinstance(event, Rewarded) else event
        ),
    )
    return run


@pytest.mark.parametrize(
    ("steps", "told"), [("0:1", [0, 1]), ("1:", [1, 2]), (":0", [0]), (":", [0, 1, 2]), ("2:2", [2])]
)
def test_both_ends_of_a_range_are_included(finished_run: Path, steps: str, told: list[int]) -> None:
    """And either may be left out."""
    done = cli("replay", "--run", finished_run, "--steps", steps, "--json")
    assert [json.loads(line)["step"] for line in done.out.splitlines()] == told
    assert done.status == 0


@pytest.mark.parametrize("steps", ["2:1", "a:b", "1", "-1:2", "0:3", "3:", "1:2:3"])
def test_a_range_that_is_none_is_refused(finished_run: Path, steps: str) -> None:
    """In one line, before anything is replayed."""
    done = cli("replay", "--run", finished_run, "--steps", steps)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith("rolltape: ")
    assert len(done.err.splitlines()) == 1


def test_an_altered_run_ends_with_status_1_and_names_the_place(altered: Path) -> None:
    """As text, as JSON lines, and shared by two processes; the other steps match."""
    done = cli("replay", "--run", altered, "--all")
    assert done.status == 1
    assert done.out.splitlines()[-1] == "3 steps replayed: 1 MISMATCH"
    assert "reward: recorded" in done.out
    assert "re-derived 0.75" in done.out
    for jobs in (1, 2):
        done = cli("replay", "--run", altered, "--all", "--json", "--jobs", jobs)
        reports = [json.loads(line) for line in done.out.splitlines()]
        assert done.status == 1
        assert [(report["step"], report["match"]) for report in reports] == [(0, True), (1, False), (2, True)]
        assert any(found["field"] == "reward" and found["proven"] for found in reports[1]["differences"])
    assert cli("replay", "--run", altered, "--step", 0).status == 0
    assert cli("replay", "--run", altered, "--step", 1).status == 1


def test_scoring_again_ends_with_status_1_where_a_reward_differs(altered: Path) -> None:
    """And names the leaf with both values."""
    done = cli("replay", "--run", altered, "--all", "--rescore")
    lines = done.out.splitlines()
    assert done.status == 1
    assert lines[-1] == "192 members of 3 steps scored again: 1 differ"
    assert "/t1/" in lines[0]
    assert "recorded +0.7500 by em_format" in lines[0]
    assert cli("replay", "--run", altered, "--step", 0, "--rescore").status == 0


def test_a_lost_plan_is_a_mismatch_and_the_audit_goes_on(finished_run: Path, tmp_path: Path) -> None:
    """Every other step is still judged."""
    run = tmp_path / "run"
    shutil.copytree(finished_run / "log", run / "log")
    with open_log(run, readonly=True) as log:
        index = log.step(1).planned_index
    spoil_journal(run, index, remove=False)
    for jobs in (1, 2):
        done = cli("replay", "--run", run, "--all", "--jobs", jobs)
        assert done.status == 1
        verdicts = [line.split()[2] for line in done.out.splitlines() if line.startswith("step ")]
        assert verdicts == ["MATCH", "MISMATCH", "MATCH"]


@pytest.mark.parametrize(
    "place", ["000000.0/1/9.9.9", "000000.0/99/0.0.0", "999999.0/1/0.0.0", "x", "000000.0/x/0.0.0"]
)
def test_a_trajectory_that_is_none_is_refused_in_one_line(finished_run: Path, place: str) -> None:
    """An unknown group, tree or leaf, and what is no name at all."""
    done = cli("replay", "--run", finished_run, "--trajectory", place)
    assert done.status == 2
    assert done.err.startswith("rolltape: ")
    assert len(done.err.splitlines()) == 1


def test_code_named_in_a_log_is_not_imported_unless_it_is_allowed(finished_run: Path, tmp_path: Path) -> None:
    """Not by any reading command: importing it would leave a file behind."""
    run = tmp_path / "run"
    shutil.copytree(finished_run / "log", run / "log")
    with open_log(run, readonly=True) as log:
        index = log.step(1).planned_index
    rewrite_journal(run, index, lambda plan: msgspec.structs.replace(plan, estimator="left_behind:credit"))
    trace = tmp_path / "trace"
    (tmp_path / "left_behind.py").write_text(
        f"from pathlib import Path\nPath({str(trace)!r}).touch()\n"
        "def credit(table):\n    return table.rewards * 0.0\n"
    )
    env = ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}
    for command in (
        ("replay", "--step", 1),
        ("replay", "--step", 1, "--estimator", "grpo"),
        ("replay", "--step", 1, "--rescore"),
        ("replay", "--all", "--jobs", 2),
        ("lint",),
        ("stats",),
        ("show",),
        ("estimators", "compare", "grpo", "rloo"),
        ("report", "--html", tmp_path / "page.html"),
        ("verify",),
    ):
        cli(*command, "--run", run, env=env)
        assert not trace.exists(), command
    refused = cli("replay", "--step", 1, "--run", run, env=env)
    assert refused.status == 2
    assert refused.out.startswith("step 1: NOT DERIVED\n")
    assert "left_behind:credit" in refused.out
    for jobs in (1, 2):
        others = cli("replay", "--all", "--jobs", jobs, "--run", run, env=env)
        assert others.status == 2
        assert others.out.splitlines()[-1] == "3 steps replayed: 1 NOT DERIVED"
        assert [line.split("  ")[0] for line in others.out.splitlines() if line.startswith("step ")] == [
            "step 0: MATCH",
            "step 1: NOT DERIVED",
            "step 2: MATCH",
        ]
    cli("replay", "--step", 1, "--run", run, "--allow-code", "other:credit", env=env)
    assert not trace.exists()
    allowed = cli("replay", "--step", 1, "--run", run, "--allow-code", "left_behind:credit", env=env)
    assert trace.exists()
    assert allowed.status == 1


READING = """
cp -r "$2/log" "$1/log" && mount -o remount,ro "$1" || exit 99
shift 2
"$@"
"""


@pytest.mark.parametrize(
    "command",
    [
        ("replay", "--all"),
        ("replay", "--all", "--jobs", "2"),
        ("replay", "--step", "1", "--estimator", "rloo"),
        ("replay", "--all", "--rescore"),
        ("stats",),
        ("show",),
        ("verify",),
    ],
)
def test_reading_commands_work_on_a_read_only_file_system(
    finished_run: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """A run on a snapshot, or on another user's disk."""
    place = tmp_path / "disk"
    place.mkdir()
    mounting = f'mount -t tmpfs -o size=64m none "{place}" || exit 98\n{READING}'
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*inside, ":"], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs `unshare` with user and mount namespaces to mount a small file system")
    done = subprocess.run(
        [*inside, mounting, "sh", place, finished_run, *CLI, *command, "--run", place],
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
