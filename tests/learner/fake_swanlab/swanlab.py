"""A stand-in for SwanLab's package that misbehaves as FAKE_SWANLAB says, and writes down what it is given.

Words: `no-start` (init raises), `slow` (each call takes a while), `hang` (a call never returns), `die` (the
process ends at the second point), `never-finish`.
"""

import json
import os
import signal
from pathlib import Path
from threading import Event
from typing import Any

SLOW_SECONDS = 0.3
BEHAVIOUR = Path(os.environ["FAKE_SWANLAB"])
RECORD = Path(os.environ["FAKE_SWANLAB_RECORD"])


def _is(word: str) -> bool:
    return word in BEHAVIOUR.read_text().split()


def _write(**fields: Any) -> None:
    with RECORD.open("a") as record:
        record.write(json.dumps(fields) + "\n")


def _take_time() -> None:
    if _is("hang"):
        Event().wait()
    if _is("slow"):
        Event().wait(SLOW_SECONDS)


class Settings:
    """Takes what it is given."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class Run:
    """Writes down each call."""

    dir = "the fake's folder"
    url = "https://fake.invalid/run"

    def __init__(self) -> None:
        self.points = 0

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write a point down, after misbehaving."""
        _take_time()
        self.points += 1
        if _is("die") and self.points == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        _write(call="log", step=step, metrics=metrics)

    def finish(self) -> None:
        """Write the end down, or never end."""
        if _is("never-finish"):
            Event().wait()
        _write(call="finish")


def init(**fields: Any) -> Run:
    """Start, unless the service is away."""
    print("🚀 SwanLab greets on standard output")
    if _is("no-start"):
        raise RuntimeError("no route to host")
    _take_time()
    settings = fields.pop("settings").fields
    _write(call="init", settings=settings, **fields)
    return Run()
