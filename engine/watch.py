"""Owns the notice of an engine's death, and the waits that it ends.

The SDK retries a dead engine for as long as it is told to, inside calls that cannot be interrupted.
So every SDK call waits here for whichever comes first: its result, or the engine's end.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio

from core.errors import EngineDied, EngineStopped
from engine import launch, locks
from engine.locks import Address

T = TypeVar("T")

LOOK_SECONDS = 0.25
"""How often the engine's lock is looked at."""


class Waiter(NamedTuple):
    """One asynchronous wait: where it runs, and what to cancel there."""

    loop: asyncio.AbstractEventLoop
    scope: anyio.CancelScope


class Watch:
    """Waits that end when the engine does; without an address (hosted service) they only wait."""

    def __init__(self, folder: Path, address: Address | None) -> None:
        self._folder = folder
        self.address = address
        self._closed = threading.Event()
        self._death: Future[None] = Future()
        self._stopped = False
        self._lock = threading.Lock()
        self._waiters: set[Waiter] = set()
        if address is not None:
            threading.Thread(target=self._look, name="engine-watch", daemon=True).start()

    def __repr__(self) -> str:
        state = "dead" if self.dead else "closed" if self._closed.is_set() else "alive"
        return f"<Watch {state}, {len(self._waiters)} waiting>"

    @property
    def dead(self) -> bool:
        """Whether the engine has ended."""
        return self._death.done()

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def check(self) -> None:
        """Raise EngineDied if the engine has ended; for whoever waits without calling it."""
        if self.dead:
            raise self._died()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if self.address is not None and not launch.is_alive(self._folder, self.address):
                launch.has_ended(self.address.pid)
                self._stopped = launch.ended_in_order(self._folder)
                self._announce()
                return

    def _announce(self) -> None:
        with self._lock:
            self._death.set_result(None)
            waiters = list(self._waiters)
        for waiter in waiters:
            if not waiter.loop.is_closed():
                waiter.loop.call_soon_threadsafe(waiter.scope.cancel)

    def _died(self) -> EngineDied:
        if self._stopped:
            return EngineStopped(
                f"the embedded engine of {str(self._folder)!r} was stopped while it was in use. Start the "
                "command again: it resumes from the last checkpoint"
            )
        return EngineDied(
            f"the embedded engine of {str(self._folder)!r} ended while it was in use; "
            f"{str(self._folder / locks.LOG)!r} may say why. Start the command again: it resumes "
            "from the last checkpoint"
        )

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; raises EngineDied as soon as the engine has ended.

        It runs on a daemon thread, so that an abandoned call never holds up the interpreter's exit.
        """
        self.check()
        future: Future[T] = Future()

        def body() -> None:
            try:
                future.set_result(work())
            except BaseException as exc:  # noqa: BLE001 - carried to the caller's thread
                future.set_exception(exc)

        threading.Thread(target=body, name="engine-call", daemon=True).start()
        waits: tuple[Future[Any], ...] = (future, self._death)
        wait(waits, return_when=FIRST_COMPLETED)
        if not future.done():
            raise self._died()
        return future.result()

    async def run_async(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work` returns; raises EngineDied as soon as the engine has ended."""
        scope = anyio.CancelScope()
        waiter = Waiter(asyncio.get_running_loop(), scope)
        with self._lock:
            if self.dead:
                raise self._died()
            self._waiters.add(waiter)
        try:
            with scope:
                return await work()
        finally:
            with self._lock:
                self._waiters.discard(waiter)
        raise self._died()
