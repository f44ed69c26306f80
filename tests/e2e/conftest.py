"""The program as a user runs it: `python cli.py …` in processes of its own, on real runs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import launch
from store.log import open_log

ROOT = Path(__file__).resolve().parents[2]
CLI = (sys.executable, str(ROOT / "cli.py"))
DEADLINE = 400.0

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTRIO_")},
    "OPENBLAS_NUM_THREADS": "1",
    launch.IDLE_VARIABLE: "5",
}


class Finished:
    """What a finished command left: status and texts."""

    def __init__(self, done: "subprocess.CompletedProcess[str]") -> None:
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr


def cli(*arguments: object, env: dict[str, str] | None = None) -> Finished:
    """Run one command to its end."""
    command = [*CLI, *map(str, arguments)]
    return Finished(
        subprocess.run(
            command, env=env or ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
    )


def start(*arguments: object) -> "subprocess.Popen[str]":
    """Start one command and return its process."""
    return subprocess.Popen(
        [*CLI, *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    """Wait for a command that must succeed; return what it printed."""
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, out
    return out


def wait_until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE) -> None:
    """Look again and again until `condition` holds; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.05)


def committed(run_dir: Path) -> int:
    """Return how many steps a run has committed; 0 before it exists."""
    if not (run_dir / "log").exists():
        return 0
    with open_log(run_dir, readonly=True) as log:
        return log.state().committed_steps


def end(process: "subprocess.Popen[str]", how: signal.Signals) -> str:
    """Send a signal to a process of ours and wait for its end; return what it printed."""
    if process.poll() is None:
        process.send_signal(how)
    return process.communicate(timeout=DEADLINE)[0]


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Give a run directory whose engine is stopped at the end of the test."""
    yield tmp_path / "run"
    launch.stop(tmp_path / "run", force=True)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a run of three demo steps, made by two processes; the learner was started first."""
    run_dir = tmp_path_factory.mktemp("e2e") / "run"
    learn = start("learn", "--run", run_dir, "--max-steps", 3)
    rollout = start("rollout", "--run", run_dir, "--preset", "demo")
    finish(learn)
    finish(rollout)
    yield run_dir
    launch.stop(run_dir, force=True)
