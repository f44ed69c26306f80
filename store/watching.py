"""Owns the wait for a longer journal: one thread that looks, for all who wait in this process.

A look costs some microseconds, but waking an event loop for it costs a hundred; so the thread looks, and
wakes a loop only when there is something. The thread lives while somebody waits.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import NamedTuple

from core.errors import StoreError

POLL_SECONDS = 0.04
"""Between two looks: 20 ms late in the middle, 40 ms at worst."""


class _Waiting(NamedTuple):
    length: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]


class Watcher:
    """Tells when a journal has more records than a number."""

    def __init__(self, length: Callable[[], int]) -> None:
        self._length = length
        self._guard = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Watcher for {len(self._waiting)}>"

    async def longer(self, length: int) -> None:
        """Return when the journal has more than `length` records; raises StoreError when the log closes."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(length, loop, loop.create_future())
        with self._guard:
            if self._closed:
                raise StoreError("the log is closed")
            self._waiting.append(waiting)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="rolltape-watcher", daemon=True)
                self._thread.start()
        await waiting.future

    def longer_sync(self, length: int, timeout: float) -> bool:
        """Block until the journal has more than `length` records or `timeout` seconds passed; tell which."""
        deadline = monotonic() + timeout
        while self._length() <= length:
            left = deadline - monotonic()
            if left <= 0:
                return False
            sleep(min(POLL_SECONDS, left))
        return True

    def close(self) -> None:
        """End the thread; who still waits hears StoreError."""
        with self._guard:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _look(self) -> None:
        while self._wake_some():
            sleep(POLL_SECONDS)

    def _wake_some(self) -> bool:
        """Wake whoever waited for what is there; return whether anybody still waits."""
        error: StoreError | None = None
        try:
            length = self._length()
        except StoreError as exc:
            length, error = 0, exc
        with self._guard:
            if self._closed:
                error = error or StoreError("the log was closed")
            due = [each for each in self._waiting if error or each.length < length]
            self._waiting = [
                each for each in self._waiting if not (error or each.length < length or each.future.done())
            ]
            if not self._waiting:
                self._thread = None
            alive = bool(self._waiting)
        for each in due:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                each.loop.call_soon_threadsafe(_settle, each.future, error)
        return alive


def _settle(future: asyncio.Future[None], error: StoreError | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(None)
