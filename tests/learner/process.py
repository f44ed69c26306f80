"""A learner process as tests see it: its lines, its end, and where it is stopped."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from core.config import Config

PROJECT = Path(__file__).resolve().parents[2]
DEADLINE = 60.0


class Learner:
    """One learner process."""

    def __init__(  # one argument per part of the command
        self,
        run_dir: Path,
        config: Config,
        steps: int,
        point: str = "",
        passes: int = 0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        text = msgspec.json.encode(config).decode()
        command = [
            sys.executable,
            "-m",
            "tests.learner.child",
            str(run_dir),
            text,
            str(steps),
            point,
            str(passes),
        ]
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"} | dict(env or {})
        self.process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []

    def read_until(self, prefix: str) -> str:
        """Return the first line that starts so; fails when the process ends or hangs before."""
        assert self.process.stdout is not None
        guard = threading.Timer(DEADLINE, self.process.kill)
        guard.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip())
                if line.startswith(prefix):
                    return line.rstrip()
        finally:
            guard.cancel()
        _, errors = self.process.communicate()
        pytest.fail(f"the learner never said {prefix!r}: {self.lines} {errors[-2000:]}")

    def kill_at(self, point: str) -> None:
        """SIGKILL it where it waits."""
        self.read_until(f"AT {point}")
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def finish(self) -> None:
        """Wait for it to reach the goal."""
        self.read_until("DONE")
        self.process.communicate()
        assert self.process.returncode == 0

    def interrupt(self) -> float:
        """Press Ctrl-C and return the seconds until it has ended."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.read_until("INTERRUPTED")
        self.process.communicate(timeout=DEADLINE)
        assert self.process.returncode == 130
        return time.monotonic() - started
