"""Owns what is said while the service keeps the learner waiting, and how often it is asked again."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from core.errors import EngineError
from store.ports import Sink

MAX_FAULTS = 6
"""Recoveries in a row without a committed step, before the fault is handed to the user."""
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0
"""Seconds between them, doubling."""
SLOW_SECONDS = 60.0
"""From here on a wait is spoken of: the SDK says nothing while it asks again."""


class Waiting:
    """Counts the faults in a row; each is told once in full, and of slow answers once in all."""

    def __init__(
        self,
        notify: Sink,
        limit: float,
        slow_seconds: float = SLOW_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`limit` is how long the SDK asks again before a fault is reported, in seconds."""
        self._notify = notify
        self._limit = limit
        self._slow_seconds = slow_seconds
        self._sleep = sleep
        self._slow_told = False
        self._faults = 0
        self._told = ""

    def __repr__(self) -> str:
        return f"<Waiting after {self._faults} of {MAX_FAULTS} faults>"

    def renew(self) -> None:
        """Count from the beginning: something went well."""
        self._faults, self._told = 0, ""

    def wait_after(self, fault: EngineError) -> None:
        """Say what happens next and pause; raises `fault` when it is the last in a row."""
        self._faults += 1
        if self._faults >= MAX_FAULTS:
            raise fault
        pause = min(FIRST_PAUSE * 2 ** (self._faults - 1), LONGEST_PAUSE)
        what = "No better." if fault.said == self._told else fault.said
        self._told = fault.said
        self._notify(
            f"{what} Trying again in {pause:.0f} s, from the last checkpoint "
            f"({self._faults} of {MAX_FAULTS - 1})."
        )
        self._sleep(pause)

    @contextlib.contextmanager
    def told_when_slow(self, what: str) -> Iterator[None]:
        """Say once, from another thread, that `what` waits for the service if the block takes long."""
        timer = threading.Timer(self._slow_seconds, self._tell_slow, [what])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _tell_slow(self, what: str) -> None:
        if self._slow_told:
            return
        self._slow_told = True
        self._notify(
            f"{what} has waited {self._slow_seconds:.0f} s for the service, which is at work, busy or "
            f"out of reach. A request that fails is asked again for {self._limit:.0f} s, then the last "
            "checkpoint is restored. Ctrl-C loses nothing."
        )
