"""Owns what becomes of a command whose embedded engine dies under it: it begins again, with a new engine."""

import time
from collections.abc import Callable
from typing import TypeVar

from core.errors import EngineDied, EngineStopped

T = TypeVar("T")

SOON_SECONDS = 60.0
"""An engine that lives shorter than this is not worth another try, DEATHS times in a row."""
DEATHS = 3


def outlive(work: Callable[[], T], notify: Callable[[str], None]) -> T:
    """Return what `work` returns; begin it again when the embedded engine dies under it.

    `work` must go on from what is recorded, as every command does at its start. Raises EngineStopped when the
    engine was stopped on purpose, and EngineDied when it died soon after each of DEATHS starts.
    """
    deaths = 0
    while True:
        started = time.monotonic()
        try:
            return work()
        except EngineStopped:
            raise
        except EngineDied:
            deaths = deaths + 1 if time.monotonic() - started < SOON_SECONDS else 1
            if deaths >= DEATHS:
                raise
        notify("the embedded engine died (engine/engine.log may say why); going on with a new one")
