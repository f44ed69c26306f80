"""Owns the demonstration: the main job as the separate processes a user would start, told from the log.

In this process it only reads: `eval`, `rollout`, `learn` and `replay` are commands of their own.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import plotext
from rich.console import Console
from rich.live import Live
from rich.table import Table

from core.errors import RolltapeError
from core.events import Evaluated, StepCommitted
from store.log import Log, open_log

POLL_SECONDS = 0.5
STOP_SECONDS = 20.0


class Evaluation(NamedTuple):
    """One of the three ways in which the held-out questions are asked, before and after."""

    name: str
    title: str
    arguments: tuple[str, ...]


EVALUATIONS = (
    Evaluation("sampled", "sampled, 4 a question", ("--samples", "4")),
    Evaluation("greedy", "greedy", ("--temperature", "0")),
    Evaluation("blind", "search returns nothing", ("--samples", "4", "--search", "none")),
)


class Demo(NamedTuple):
    """What is demonstrated."""

    command: Sequence[str]
    """How this program is started, such as [python, cli.py]."""
    run_dir: Path
    steps: int
    preset: str
    assignments: Sequence[str] = ()
    """Settings, each key=value."""
    limit: int = 0
    """Held-out questions that are asked, 0 for all."""

    @property
    def run(self) -> list[str]:
        """The option that names the run."""
        return ["--run", str(self.run_dir)]

    @property
    def opening(self) -> list[str]:
        """The options that create the run."""
        return ["--preset", self.preset, *(word for text in self.assignments for word in ("--set", text))]


def run_demo(demo: Demo) -> int:
    """Run the main job on the embedded engine and report it; return the exit status."""
    console = Console()
    started = time.monotonic()
    console.rule("Rolltape: rollout → log → learn → replay, offline")
    console.print(f"run directory: {demo.run_dir}   preset: {demo.preset}   steps: {demo.steps}")
    _evaluate_all(demo, "before", console)
    _train(demo, console)
    _evaluate_all(demo, "after", console)
    with open_log(demo.run_dir, role="reader") as log:
        commits = _commits(log)
        evaluations = {event.name: event for event in _events(log) if isinstance(event, Evaluated)}
    _draw(commits)
    console.print(_evaluation_table(evaluations))
    console.rule("replay: every step, re-derived from rollout events alone")
    status = subprocess.call([*demo.command, "replay", *demo.run, "--all"])  # noqa: S603 our own command
    seconds = time.monotonic() - started
    console.print(f"{len(commits)} steps, {seconds:.0f} s in all; the run is in {demo.run_dir}")
    return status


def _evaluate_all(demo: Demo, when: str, console: Console) -> None:
    policy = "base" if when == "before" else "latest"
    for evaluation in EVALUATIONS:
        console.print(f"held-out questions {when} training: {evaluation.title} …")
        name = f"{evaluation.name}-{when}"
        _check(
            [
                *(*demo.command, "eval", *demo.run, *demo.opening),
                *("--policy", policy, "--name", name, "--quiet", "--limit", str(demo.limit)),
                *evaluation.arguments,
            ]
        )


def _check(command: Sequence[str]) -> None:
    status = subprocess.call(command)  # noqa: S603 our own command
    if status != 0:
        raise RolltapeError(f"`{' '.join(command)}` ended with status {status}")


def _train(demo: Demo, console: Console) -> None:
    """Run rollout and learn as two processes and show the steps as they are committed."""
    steps = demo.steps
    arguments = {"rollout": [], "learn": ["--max-steps", str(steps)]}
    processes = {
        name: subprocess.Popen([*demo.command, name, *demo.run, *rest, "--quiet"])  # noqa: S603 our own
        for name, rest in arguments.items()
    }
    try:
        with (
            open_log(demo.run_dir, role="reader") as log,
            Live(console=console, refresh_per_second=4) as live,
        ):
            while any(process.poll() is None for process in processes.values()):
                live.update(_steps_table(_commits(log), steps))
                _fail_if_failed(processes)
                time.sleep(POLL_SECONDS)
            live.update(_steps_table(_commits(log), steps))
        if not console.is_terminal:
            console.line()  # a live view leaves the last line open where it cannot be drawn over
        _fail_if_failed(processes)
    finally:
        _stop(processes.values())


def _fail_if_failed(processes: dict[str, "subprocess.Popen[bytes]"]) -> None:
    for name, process in processes.items():
        status = process.poll()
        if status:
            raise RolltapeError(f"`{name}` ended with status {status}; see its messages above")


def _stop(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.send_signal(signal.SIGINT)
    for process in alive:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _events(log: Log) -> Iterator[object]:
    for record in log.journal.read():
        yield record.event


def _commits(log: Log) -> list[StepCommitted]:
    return [event for event in _events(log) if isinstance(event, StepCommitted)]


COLUMNS = (
    ("reward", "reward/mean"),
    ("exact match", "reward/correct"),
    ("format", "reward/format"),
    ("searches", "rollout/search_calls"),
    ("no signal", "rollout/degenerate_group_rate"),
    ("datums", "train/datums"),
)


def _steps_table(commits: Sequence[StepCommitted], steps: int, rows: int = 12) -> Table:
    table = Table(title=f"step {len(commits)} of {steps}", title_justify="left")
    table.add_column("step", justify="right")
    for title, _ in COLUMNS:
        table.add_column(title, justify="right")
    for commit in commits[-rows:]:
        values = [commit.rollout_metrics.get(name) for _, name in COLUMNS]
        table.add_row(str(commit.step), *("" if value is None else f"{value:.3g}" for value in values))
    return table


def _draw(commits: Sequence[StepCommitted]) -> None:
    if not commits:
        return
    steps = [commit.step for commit in commits]
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(90, 18)
    plotext.title("per training step")
    for label, name in (("reward", "reward/mean"), ("exact match", "reward/correct")):
        plotext.plot(steps, [commit.rollout_metrics.get(name, 0.0) for commit in commits], label=label)
    plotext.xlabel("step")
    sys.stdout.write(plotext.uncolorize(plotext.build()) + "\n")
    sys.stdout.flush()


def _evaluation_table(evaluations: dict[str, Evaluated]) -> Table:
    table = Table(title="held-out questions (never trained on), %", title_justify="left")
    table.add_column("how")
    for title in (
        "exact\nmatch\nbefore",
        "after",
        "format\nbefore",
        "after",
        "EM of\nwell-\nformed\nbefore",
        "after",
    ):
        table.add_column(title, justify="right", vertical="bottom")
    for evaluation in EVALUATIONS:
        pair = [evaluations.get(f"{evaluation.name}-{when}") for when in ("before", "after")]
        cells = [
            _percent(None if event is None else event.summary.get(key))
            for key in ("exact_match", "format", "exact_match_of_well_formed")
            for event in pair
        ]
        table.add_row(evaluation.title, *cells)
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
