"""Logs and processes for the tests of the rollout worker: a run, a plan of groups, a program that may be killed."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.events import AdamParams, PlannedGroup, RunOpened, StepPlanned
from store.log import Log, open_log

ROOT = Path(__file__).resolve().parents[2]
MAP_SIZE = 1 << 28


def open_run(run_dir: Path) -> Log:
    """Return the log of a run for a rollout process, created when there is none."""
    log = open_log(run_dir, create=True, role="rollout", map_size=MAP_SIZE)
    log.open_run(
        RunOpened(
            schema=1, config={}, config_digest="d", fingerprints={}, base_model="scripted", seed=0, run_id="r"
        )
    )
    return log


def plan(step: int, groups: Sequence[PlannedGroup]) -> StepPlanned:
    """Return the plan of a step, as far as the log cares."""
    return StepPlanned(
        step=step,
        groups=tuple(groups),
        estimator="group_mean",
        estimator_params={},
        shaping="base",
        shaping_params={},
        prefix_weight="each",
        kl_beta=0.0,
        loss="importance_sampling",
        loss_config={},
        adam=AdamParams(learning_rate=1e-4),
        members=len(groups),
        micro_batches=(),
        datum_digests=(),
        batch_digest="b",
        policy_version=step,
        fingerprints={},
    )


@contextlib.contextmanager
def program(source: str, *arguments: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a Python program in a new process; it is killed at the end of the block."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)


def hear(child: "subprocess.Popen[str]") -> str:
    """Return the next line of a program; fails when it ended instead."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"the program ended with {child.poll()!r}"
    return line.strip()
