"""The writer's queue and the watcher: bounds, turns, cancellation, what is told to whom."""

import asyncio
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from core.errors import LogBusy, StoreError
from core.events import GoalSet
from store import writer
from store.log import Log, open_log
from store.ports import Claim, StreamWrite
from store.snapshot import Snapshot
from store.writer import Plan
from tests.store.children import Child, until
from tests.store.making import (
    OPEN_ADMISSION,
    asked,
    busy_writer,
    claim,
    closed,
    open_run,
    run_event,
    sampled,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """Return the open log of a run."""
    with open_run(tmp_path) as opened:
        yield opened


def nothing(_: Snapshot) -> Plan[str]:
    """Change nothing."""
    return Plan((), "done")


def turn(tree: int) -> list[StreamWrite]:
    """Return a request of one record."""
    return [StreamWrite(tree, None, [sampled(0)])]


def test_callers_wait_while_the_queue_is_full(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coroutines and threads queue more only when there is room again; what promises nothing is dropped."""
    monkeypatch.setattr(writer, "MAX_QUEUED_BYTES", 100)
    room = log._writer._room
    group = claim(log)

    async def scene() -> None:
        async with busy_writer(log):
            first = asyncio.create_task(log.groups.append(group, turn(1)))
            await asyncio.to_thread(until, lambda: log._writer._bytes > 100)
            log.cache_put(b"key", b"value")
            waiting = [asyncio.create_task(log.groups.append(group, turn(tree))) for tree in (2, 3)]
            waiting.append(asyncio.create_task(asyncio.to_thread(log.groups.append_sync, group, turn(4))))
            cancelled = asyncio.create_task(log.groups.append(group, turn(5)))
            await asyncio.to_thread(
                until,
                lambda: len(log._writer._waiting) == 3 and len(room._waiters) == 1,  # type: ignore[attr-defined]
            )
            cancelled.cancel()
            assert log._writer._queue.qsize() == 1
            assert not any(task.done() for task in waiting)
        await asyncio.gather(first, *waiting)
        with pytest.raises(asyncio.CancelledError):
            await cancelled

    asyncio.run(scene())
    assert sorted(record.tree for record in log.groups.fetch(group.uid).records) == [1, 2, 3, 4]
    assert log.cache_get(b"key") is None
    assert (log._writer._bytes, log._writer._waiting) == (0, [])
    log.cache_put(b"key", b"value")
    log.journal.append_sync([GoalSet(max_steps=1)])
    assert log.cache_get(b"key") == b"value"


def test_batches_are_bounded_by_number_and_by_bytes(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is written a bounded batch at a time, in order, and every caller is told."""
    monkeypatch.setattr(writer, "MAX_BATCH", 7)
    monkeypatch.setattr(writer, "MAX_BATCH_BYTES", 4_000)
    group = claim(log)

    async def scene() -> None:
        async with busy_writer(log):
            tasks = [asyncio.create_task(log.groups.append(group, turn(1))) for _ in range(40)]
            large = [StreamWrite(1, None, [sampled(0, tokens=1_000)])]
            tasks += [asyncio.create_task(log.groups.append(group, large)) for _ in range(3)]
            await asyncio.sleep(0)
            assert repr(log._writer).startswith("<Writer about 43 requests")
        await asyncio.gather(*tasks)

    asyncio.run(scene())
    assert len(log.groups.fetch(group.uid).records) == 43


def test_a_job_that_raises_fails_alone_with_its_own_error(log: Log) -> None:
    """Whatever it raises, also what is none of our errors; those queued with it are written."""

    def broken(_: Snapshot) -> Plan[None]:
        raise ZeroDivisionError("a job's own fault")

    async def scene() -> None:
        async with busy_writer(log):
            bad = asyncio.create_task(log._writer.run(broken, 1))
            good = asyncio.create_task(log.journal.append([GoalSet(max_steps=1)]))
            await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError, match="own fault"):
            await bad
        assert await good == 1

    asyncio.run(scene())
    with pytest.raises(ZeroDivisionError):
        log.write_sync(broken, 1)
    assert log.write_sync(nothing, 1) == "done"


def test_a_result_that_nobody_receives_is_told_once(log: Log) -> None:
    """Cancelled while it is queued, or just when its result was handed over: `lost` is called with the result."""
    lost: list[str] = []

    async def scene() -> None:
        async with busy_writer(log):
            late = asyncio.create_task(
                log._writer.run(nothing, 1, lambda result: lost.append(f"late {result}"))
            )

            def cancel_late(result: str) -> None:
                lost.append(f"queued {result}")
                late.cancel()  # its result was delivered in the same call, before it could wake up

            queued = asyncio.create_task(log._writer.run(nothing, 1, cancel_late))
            silent = asyncio.create_task(log._writer.run(nothing, 1))
            await asyncio.sleep(0)
            queued.cancel()
            silent.cancel()
        outcomes = await asyncio.gather(late, queued, silent, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 3

    asyncio.run(scene())
    assert lost == ["queued done", "late done"]


def test_nobody_is_told_of_a_claim_that_found_nothing(log: Log) -> None:
    """A cancelled claim that would have been told to wait leaves no orphan."""
    admission = OPEN_ADMISSION._replace(max_tickets=0)

    async def scene() -> None:
        async with busy_writer(log):
            task = asyncio.create_task(log.groups.claim(log.worker_id, admission, 1.0))
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await log._writer.run(nothing, 1)  # the results of those before it have been handed over

    asyncio.run(scene())
    assert log.groups._orphans == {log.worker_id: set()}
    assert isinstance(log.groups.claim_sync(log.worker_id, OPEN_ADMISSION, 1.0), Claim)


def test_an_event_loop_that_is_gone_disturbs_nobody(log: Log) -> None:
    """Requests, waits for room and followers of a loop that was closed are written or forgotten."""
    started, release = threading.Event(), threading.Event()

    def hold(_: Snapshot) -> Plan[None]:
        started.set()
        release.wait(60)
        return Plan((), None)

    loop = asyncio.new_event_loop()
    holding = threading.Thread(target=log.write_sync, args=(hold, 1))
    holding.start()
    started.wait(60)
    tasks = [
        loop.create_task(log.journal.append([GoalSet(max_steps=1)])),
        loop.create_task(log.journal._watcher.longer(1)),
    ]
    loop.run_until_complete(asyncio.sleep(0))
    assert repr(log.journal._watcher) == "<Watcher for 1>"
    loop.close()
    release.set()
    holding.join()
    log.journal.append_sync([GoalSet(max_steps=2)])
    until(lambda: log.journal._watcher._thread is None)
    assert log.state().journal_length == 3
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined] # as meant


def hold_reader(connection: Connection, run_dir: Path) -> None:
    """Stay inside a read transaction."""
    with open_log(run_dir) as log, log._environment.read():
        connection.send("reading")
        connection.recv()


def test_an_idle_writer_frees_the_slots_of_dead_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked for now and then, also while nothing is written."""
    monkeypatch.setattr(writer, "READER_CHECK_SECONDS", 0.01)
    with open_run(tmp_path) as log:
        with Child(hold_reader, tmp_path) as child:
            child.hear()
        until(lambda: len(log._environment._env.readers().splitlines()) == 2)


def test_followers_hear_of_records_and_are_forgotten_when_cancelled(log: Log) -> None:
    """Each is woken by what it waits for; the thread that looks ends with the last of them."""
    watcher = log.journal._watcher

    async def scene() -> None:
        near, far = (asyncio.create_task(watcher.longer(length)) for length in (1, 3))
        cancelled = asyncio.create_task(watcher.longer(50))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.to_thread(log.journal.append_sync, [GoalSet(max_steps=1)])
        await near
        assert not far.done()
        await log.journal.append([GoalSet(max_steps=2), GoalSet(max_steps=3)])
        await far
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await asyncio.to_thread(until, lambda: watcher._thread is None)
        await watcher.longer(3)

    asyncio.run(scene())


def test_a_follower_sees_what_others_write(log: Log) -> None:
    """It waits where there is nothing new, and goes on where it was."""

    async def scene() -> list[int]:
        seen: list[int] = []

        async def follow() -> None:
            async for record in log.journal.follow(1):
                seen.append(record.index)
                if record.index == 4:
                    return

        task = asyncio.create_task(follow())
        await asyncio.to_thread(until, lambda: len(log.journal._watcher._waiting) == 1)
        for _ in range(4):
            await asyncio.to_thread(log.journal.append_sync, [GoalSet(max_steps=1)])
        await task
        return seen

    assert asyncio.run(scene()) == [1, 2, 3, 4]


def enlarge(connection: Connection, run_dir: Path) -> None:
    """Open a log with a larger map and use it."""
    with open_log(run_dir, role="rollout", map_size=1 << 24) as log:
        log.open_run(run_event())
        group = claim(log)
        log.groups.append_sync(group, [StreamWrite(1, 0, [sampled(0, tokens=200_000)])])
        connection.send("used")


def test_followers_hear_why_a_log_cannot_be_read_any_more(tmp_path: Path) -> None:
    """The error that reading meets reaches whoever waits; nobody waits for ever."""
    open_log(tmp_path, create=True, role="rollout", map_size=1 << 20).close()

    async def scene() -> None:
        with open_log(tmp_path) as log:
            waiting = asyncio.create_task(anext(log.journal.follow(5)))  # type: ignore[arg-type]
            await asyncio.to_thread(until, lambda: len(log.journal._watcher._waiting) == 1)
            with Child(enlarge, tmp_path) as child:
                assert await asyncio.to_thread(child.hear) == "used"
            with pytest.raises(LogBusy, match="start this process again"):
                await waiting
            with pytest.raises(LogBusy):
                log.journal.wait_sync(5, 10.0)

    asyncio.run(scene())


def test_a_reader_does_not_write(tmp_path: Path) -> None:
    """A log that was opened read-only says so to every request, and drops what promises nothing."""
    with open_run(tmp_path) as log:
        closed(log, 1)
    with open_log(tmp_path, readonly=True) as log:
        assert "readonly" in repr(log._environment)
        with pytest.raises(StoreError, match="read-only"):
            log.journal.append_sync([GoalSet(max_steps=1)])
        with pytest.raises(StoreError, match="read-only"):
            claim(log)
        log.cache_put(b"key", b"value")
        assert log.cache_get(b"key") is None
        assert log.state().next_ticket == 1


def test_live_objects_say_what_they_are(log: Log) -> None:
    """Their place, and what they hold."""
    group = claim(log)
    log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])])
    assert repr(log) == f"<Log {str(log.run_dir)!r} as rollout>"
    assert "writable" in repr(log._environment)
    assert log.worker_id in repr(log._locks)
    assert repr(log._writer) == "<Writer about 0 requests, 0 bytes queued>"
