"""Owns the clocks that waiting goes by, in one value so that tests can step them."""

import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio


class Timer(NamedTuple):
    """Sleeping and reading clocks, in seconds."""

    sleep: Callable[[float], Awaitable[None]]
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    """Unix time."""


REAL_TIME = Timer(anyio.sleep, time.monotonic, time.time)
