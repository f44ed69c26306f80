"""Owns the one thread that writes: a bounded queue, one transaction and one sync for all that waits in it.

A request is a `Job`: it looks at the log inside the write transaction and returns what to change, or raises.
A job that raises fails alone. When LMDB refuses a batch (map full, disk full), each of its requests is tried
again in a transaction of its own, so one that is too large does not take the others with it.
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

from core.errors import StoreError
from store.environment import Environment
from store.snapshot import Change, Rows, Snapshot

T = TypeVar("T")

MAX_QUEUED_BYTES = 64 << 20
"""Above this, callers wait before they may queue more."""
MAX_BATCH_BYTES = 8 << 20
MAX_BATCH = 1024
READER_CHECK_SECONDS = 30.0


class Plan(NamedTuple, Generic[T]):
    """What a job wants: changes to be written in order, and the value to return when they are on disk."""

    changes: Sequence[Change | Rows]
    result: T


Job = Callable[[Snapshot], Plan[T]]


class _Request:
    """One job, who waits for it, and whom to tell when nobody does any more."""

    __slots__ = ("future", "job", "loop", "lost", "size")

    def __init__(
        self,
        job: Job[Any],
        size: int,
        loop: asyncio.AbstractEventLoop | None,
        lost: Callable[[Any], None] | None,
    ) -> None:
        self.job = job
        self.size = size
        self.loop = loop
        self.lost = lost
        self.future: asyncio.Future[Any] | Future[Any] = Future() if loop is None else loop.create_future()

    def deliver(self, result: object, error: BaseException | None) -> None:
        """Wake who waits; on the thread of its loop."""
        if self.future.cancelled():
            if self.lost is not None and error is None:
                self.lost(result)
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Outcome(NamedTuple):
    request: _Request
    result: object
    error: BaseException | None


class Writer:
    """Queue and thread. The thread starts with the first request and ends with `close`."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._queue: SimpleQueue[_Request | None] = SimpleQueue()
        self._guard = threading.Lock()
        """Of the byte count, of who waits for room, and of closing; never held for long."""
        self._room = threading.Condition(self._guard)
        self._bytes = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Writer about {self._queue.qsize()} requests, {self._bytes} bytes queued>"

    async def run(self, job: Job[T], size: int, lost: Callable[[T], None] | None = None) -> T:
        """Return the job's result once its changes are on disk.

        A cancelled call may still have been written; `lost` is then told the result that nobody received.
        """
        loop = asyncio.get_running_loop()
        while self._bytes > MAX_QUEUED_BYTES:
            await self._room_in(loop)
        request = _Request(job, size, loop, lost)
        self._enqueue(request)
        future = request.future
        assert isinstance(future, asyncio.Future)
        try:
            result: T = await future
        except asyncio.CancelledError:
            if lost is not None and future.done() and not future.cancelled() and not future.exception():
                lost(future.result())
            raise
        return result

    def run_sync(self, job: Job[T], size: int) -> T:
        """As `run`, blocking the calling thread."""
        with self._room:
            while self._bytes > MAX_QUEUED_BYTES and not self._closing:
                self._room.wait()
        request = _Request(job, size, None, None)
        self._enqueue(request)
        future = request.future
        assert isinstance(future, Future)
        result: T = future.result()
        return result

    def try_run(self, job: Job[Any], size: int) -> bool:
        """Queue a job that nobody waits for, unless the queue is full; return whether it was queued."""
        if self._bytes > MAX_QUEUED_BYTES:
            return False
        self._enqueue(_Request(job, size, None, None))
        return True

    def close(self) -> None:
        """Write what is queued and end the thread."""
        with self._room:
            self._closing = True
            self._queue.put(None)
            self._room.notify_all()
        if self._thread is not None:
            self._thread.join()

    async def _room_in(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._guard:
            if self._bytes <= MAX_QUEUED_BYTES:
                return
            future = loop.create_future()
            self._waiting.append((loop, future))
        await future

    def _enqueue(self, request: _Request) -> None:
        self._environment.check_process()
        with self._guard:
            if self._closing:
                raise StoreError(f"the log {str(self._environment.path)!r} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="rolltape-writer", daemon=True)
                self._thread.start()
            self._bytes += request.size
            self._queue.put(request)

    def _loop(self) -> None:
        checked = monotonic()
        while (batch := self._take()) is not None:
            _settle(self._commit(batch))
            if monotonic() - checked > READER_CHECK_SECONDS:
                self._environment.check_readers()
                checked = monotonic()

    def _take(self) -> list[_Request] | None:
        """Return what waits, up to a batch, nothing after a while without requests, None when closed."""
        batch: list[_Request] = []
        size = 0
        try:
            request = self._queue.get(timeout=READER_CHECK_SECONDS)
            while request is not None:
                batch.append(request)
                size += request.size
                if size >= MAX_BATCH_BYTES or len(batch) == MAX_BATCH:
                    break
                request = self._queue.get_nowait()
            else:
                if not batch:
                    return None
                self._queue.put(None)  # for the next call
        except Empty:
            pass
        self._made_room(size)
        return batch

    def _made_room(self, size: int) -> None:
        with self._room:
            self._bytes -= size
            if self._bytes > MAX_QUEUED_BYTES:
                return
            self._room.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            _call(loop, functools.partial(_wake, future))

    def _commit(self, batch: list[_Request]) -> list[_Outcome]:
        if not batch:
            return []
        try:
            with self._environment.write() as snapshot:
                self._environment.make_room()
                self._environment.check_versions(snapshot)
                return [_attempt(request, snapshot) for request in batch]
        except StoreError as exc:
            if len(batch) == 1:
                return [_Outcome(batch[0], None, exc)]
        return [outcome for request in batch for outcome in self._commit([request])]


def _attempt(request: _Request, snapshot: Snapshot) -> _Outcome:
    try:
        plan = request.job(snapshot)
    except Exception as exc:  # noqa: BLE001 one request fails alone, and a dead writer would leave all waiting
        return _Outcome(request, None, exc)
    snapshot.put(plan.changes)
    return _Outcome(request, plan.result, None)


def _settle(outcomes: list[_Outcome]) -> None:
    """Deliver; one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        if outcome.request.loop is None:
            outcome.request.deliver(outcome.result, outcome.error)
        else:
            by_loop.setdefault(outcome.request.loop, []).append(outcome)
    for loop, theirs in by_loop.items():
        _call(loop, functools.partial(_deliver_all, theirs))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _deliver_all(outcomes: list[_Outcome]) -> None:
    for request, result, error in outcomes:
        request.deliver(result, error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(function)
