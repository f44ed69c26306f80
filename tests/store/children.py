"""Owns the child processes of the store's tests: forks that may be killed by what they read, and programs."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def in_child(function: Callable[[], bytes]) -> bytes | None:
    """Return what `function` returns in a forked child, None when a signal or an error ended it."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        status = 1
        with contextlib.suppress(BaseException):
            with os.fdopen(send, "wb") as stream:
                stream.write(function())
            status = 0
        os._exit(status)
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(pid, 0)
    return answer if status == 0 else None


@contextlib.contextmanager
def program(source: str, *arguments: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a Python program in a new process, with pipes; it is killed at the end of the block."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)


def say(child: "subprocess.Popen[str]", text: str) -> None:
    """Send a line to a program."""
    assert child.stdin is not None
    child.stdin.write(text + "\n")
    child.stdin.flush()


def hear(child: "subprocess.Popen[str]") -> str:
    """Return the next line of a program; fails when it ended instead."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"the program ended with {child.poll()!r}"
    return line.rstrip("\n")


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition, with a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)


def run_all(sources: Sequence[tuple[str, Sequence[str | Path]]], seconds: float = 120.0) -> list[str]:
    """Run programs side by side to their ends; return what each printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", source, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for source, arguments in sources
    ]
    printed = [child.communicate(timeout=seconds)[0] for child in children]
    assert [child.returncode for child in children] == [0] * len(children), printed
    return printed
