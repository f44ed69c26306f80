"""Owns sending a run's metrics to SwanLab beside the training, which it can neither slow nor break.

The log is the queue: a thread reads committed steps from it and hands them, one at a time, to a process of
its own that talks to SwanLab. A step costs the learner nothing but its commit, memory holds one point, and
what SwanLab did not take while it was down, missing a network or slow is sent later, once, from the log.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from core.config import Config, to_plain
from core.errors import ConfigError, StoreError
from core.events import PolicyPublished, RunOpened, StepCommitted
from learner.points import Opening, Point, Taken, point_of, read_position
from store.log import Log
from store.ports import Sink

FOLDER = "swanlab"
CONSOLE = "console.log"
"""What SwanLab prints."""
DISABLED, LOCAL = "disabled", "local"

LOOK_SECONDS = 0.25
"""Between two looks for new steps."""
SILENT_SECONDS = 2.0
"""How long the end of training waits for SwanLab without saying so."""
KILL_SECONDS = 5.0
"""How long the thread may take to see that the process is gone."""

PROJECT = Path(__file__).resolve().parent.parent


class Patience(NamedTuple):
    """How long SwanLab is waited for, in seconds."""

    first_pause: float = 5.0
    """Until it is tried again after a failure; doubles."""
    longest_pause: float = 300.0
    flush: float = 20.0
    """At the end of training."""


def check_installed(mode: str, find: Callable[[str], object] = importlib.util.find_spec) -> None:
    """Raise ConfigError when the packages that a mode of SwanLab needs are missing; imports nothing."""
    needed = {} if mode == DISABLED else {"swanlab": "rolltape[swanlab]"}
    if mode == LOCAL:
        needed["swanboard"] = "swanlab[dashboard]"
    for package, install in needed.items():
        if find(package) is None:
            raise ConfigError(
                f"tracking.swanlab = {mode!r} needs the package {package!r}, which is not installed: "
                f"pip install '{install}', or --set tracking.swanlab={DISABLED}"
            )


class Tracking:
    """A thread that sends a run's committed steps to SwanLab while the block lasts, and flushes at its end.

    With `tracking.swanlab = "disabled"` it does nothing. Notices go to `notify`, one per change of state.
    """

    def __init__(
        self, log: Log, config: Config, opened: RunOpened, notify: Sink, patience: Patience | None = None
    ) -> None:
        check_installed(config.tracking.swanlab)
        self._log = log
        self._notify = notify
        self._patience = patience or Patience()
        self._folder = log.run_dir / FOLDER
        self._opening = Opening(
            folder=str(self._folder.resolve()),
            mode=config.tracking.swanlab,
            run_id=opened.run_id,
            name=log.run_dir.resolve().name,
            config=to_plain(config),
        )
        self._stopping = threading.Event()
        self._child: _Child | None = None
        self._position: int | None = None
        """Journal position below which SwanLab has everything; None as long as that is not known."""
        self._failed = False
        self._thread = threading.Thread(target=self._send_all, name="tracking", daemon=True)

    def __repr__(self) -> str:
        state = "failing" if self._failed else "well"
        return f"<Tracking {self._opening.mode}, {state}, sent up to {self._position}>"

    def __enter__(self) -> Self:
        if self._opening.mode != DISABLED:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is left, for `patience.flush` seconds at most; then say what is missing."""
        if self._opening.mode == DISABLED:
            return
        self._stopping.set()
        try:
            self._wait()
        finally:
            unfinished = self._thread.is_alive()
            if self._child is not None:
                self._child.kill()
            self._thread.join(KILL_SECONDS)
        self._tell_end(unfinished=unfinished)

    def _wait(self) -> None:
        seconds = self._patience.flush
        self._thread.join(min(SILENT_SECONDS, seconds))
        if self._thread.is_alive() and seconds > SILENT_SECONDS:
            self._notify(f"waiting for SwanLab, {seconds:g} s at most")
            self._thread.join(seconds - SILENT_SECONDS)

    def _tell_end(self, *, unfinished: bool) -> None:
        missing = sum(
            isinstance(record.event, StepCommitted) for record in self._log.journal.read(self._position or 0)
        )
        if missing:
            self._notify(f"SwanLab has not taken {missing} steps; the next `learn` on this run sends them")
        elif unfinished:
            self._notify(
                f"SwanLab did not finish within {self._patience.flush:g} s; what it has not uploaded is in "
                f"{str(self._folder / 'log')!r}, for `swanlab sync`"
            )

    def _send_all(self) -> None:
        pause = self._patience.first_pause
        while True:
            try:
                self._serve()
            except (OSError, EOFError, msgspec.DecodeError, StoreError) as exc:
                self._tell_failure(exc)
            else:
                return
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, self._patience.longest_pause)

    def _serve(self) -> None:
        """Start SwanLab's process once there is something to send, and feed it until the end.

        Raises OSError, EOFError, DecodeError when it fails, StoreError when the log cannot be read.
        """
        self._position = read_position(self._folder)
        if next(self._points(), None) is None:
            return
        with _Child(self._folder) as child:
            self._child = child
            self._take(child.ask(self._opening))
            for point in self._points():
                self._take(child.ask(point))
            child.finish()

    def _take(self, taken: Taken) -> None:
        self._position = taken.position
        if self._failed:
            self._notify("SwanLab takes metrics again")
        elif taken.place:
            self._notify(f"SwanLab: metrics go to {taken.place}")
        self._failed = False

    def _tell_failure(self, exc: Exception) -> None:
        if not self._failed and not self._stopping.is_set():
            self._notify(
                f"SwanLab does not take metrics ({exc}); training goes on, the steps are sent when it does"
            )
        self._failed = True

    def _points(self) -> Iterator[Point]:
        """Yield what SwanLab lacks, waiting for more until told to stop and nothing is left."""
        position = self._position or 0
        steps_of = {0: 0} | {row.policy_version: row.step for row in self._log.policies()}
        while True:
            last = self._stopping.is_set()
            for record in self._log.journal.read(position):
                position = record.index + 1
                if isinstance(record.event, PolicyPublished):
                    steps_of[record.event.policy_version] = record.event.step
                if point := point_of(record, steps_of):
                    yield point
            if last:
                return
            self._stopping.wait(LOOK_SECONDS)


class _Child:
    """The process that talks to SwanLab."""

    def __init__(self, folder: Path) -> None:
        self._console = folder / CONSOLE
        self._started = self._console.stat().st_size if self._console.exists() else 0
        path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        with self._console.open("ab") as console:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "learner.swanlab_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=console,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,
            )

    def __repr__(self) -> str:
        return f"<SwanLab's process {self._process.pid}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a line that the process did not live to read
                    pipe.close()

    def ask(self, line: Opening | Point) -> Taken:
        """Hand over a line and wait for its answer; raises OSError or EOFError when there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says more
            self._process.stdin.write(msgspec.json.encode(line) + b"\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise EOFError(self._reason())
        return msgspec.json.decode(answer, type=Taken)

    def finish(self) -> None:
        """Let SwanLab finish, however long that takes; raises EOFError when it fails."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait() != 0:
            raise EOFError(self._reason())

    def kill(self) -> None:
        """End the process at once; a call that waits for it then fails."""
        self._process.kill()

    def _reason(self) -> str:
        """Return the last line that the process printed, which is that of an exception, if any."""
        with self._console.open("rb") as console:
            console.seek(self._started)
            lines = [line.strip() for line in console.read().decode(errors="replace").splitlines()]
        told = [line for line in lines if line]
        return told[-1] if told else f"its process ended with status {self._process.wait()}"
