"""Owns the child processes of the store's tests: each starts clean, and may be killed or stopped by its pid."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from core.errors import RolltapeError
from store.log import Role, open_log
from tests.store.telling import told

ROOT = Path(__file__).resolve().parent.parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
# Python 3.11's fork server finds what it is to preload by this alone

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.store.making", "tests.store.children", "store.verifying"])


class Child:
    """A process that runs `function(connection, *arguments)`; killed at the end of a `with` block."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        self._connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=function, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def say(self, message: object) -> None:
        """Send it a message."""
        self._connection.send(message)

    def say_bytes(self, message: bytes) -> None:
        """Send it raw bytes."""
        self._connection.send_bytes(message)

    def hear(self, seconds: float = 60.0) -> Any:
        """Return its next message; raises EOFError when it ended without one."""
        assert self._connection.poll(seconds), "the child says nothing"
        return self._connection.recv()

    def waiting(self) -> bool:
        """Return whether it has said something, or ended."""
        return self._connection.poll(0)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def stop(self, said: list[Any]) -> None:
        """SIGKILL, and collect what it still said."""
        self._process.kill()
        self._process.join()
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self._connection.poll(0):
                said.append(self._connection.recv())
        self._connection.close()

    def end(self, seconds: float = 60.0) -> int:
        """Wait until it ends by itself; return its exit code, the negative signal where one ended it."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, "the child does not end"
        return self._process.exitcode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class LogChild(Child):
    """A process with the log of a run open, which does what it is asked."""

    def __init__(self, run_dir: Path, role: Role = "rollout") -> None:
        super().__init__(serve_log, run_dir, role)
        self.worker_id: str = self.hear()

    def do(self, name: str, *arguments: object, **options: object) -> Any:
        """Return the result of `log.<name>(...)`, where the name may have dots; raises what it raised.

        "told" is what the log tells that the model knows too.
        """
        self.say((name, arguments, options))
        result = self.hear()
        if isinstance(result, Exception):
            raise result
        return result


def serve_log(connection: Connection, run_dir: Path, role: Role) -> None:
    """Open the log and obey until the other end is closed."""
    with open_log(run_dir, role=role) as log:
        connection.send(log.worker_id)
        while True:
            try:
                name, arguments, options = connection.recv()
            except EOFError:
                return
            target: Any = log
            for part in name.split("."):
                target = partial(told, log) if part == "told" else getattr(target, part)
            try:
                connection.send(target(*arguments, **options))
            except RolltapeError as exc:
                connection.send(exc)


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)


def die() -> None:
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)
