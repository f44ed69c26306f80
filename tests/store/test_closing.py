"""Closing a log that others still use: they hear StoreError, nobody crashes, nothing acknowledged is lost."""

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from core.errors import StoreError
from core.events import GoalSet
from store import writer
from store.locks import Locks
from store.log import Log, open_log
from store.ports import Claim, StreamWrite
from store.verify import verify
from tests.store.children import Child, until
from tests.store.making import (
    CHOSEN,
    OPEN_ADMISSION,
    asked,
    busy_writer,
    claim,
    closed,
    open_run,
    run_event,
    sampled,
)

ROUNDS = 25


class Users:
    """Threads that use one log in every way until it is closed under them."""

    def __init__(self, log: Log, group: Claim) -> None:
        self.log = log
        self.group = group
        self.acknowledged = 0
        self.goals = 0
        self.heard: Counter[str] = Counter()
        self.surprises: list[BaseException] = []
        self._begun = threading.Semaphore(0)
        uses: list[Callable[[], None]] = [self.append, self.read, self.walk, self.wait, self.aim, self.cache]
        self._threads = [threading.Thread(target=self._until_closed, args=(use,)) for use in uses]
        self._threads += [
            threading.Thread(target=self._until_closed, args=(run,))
            for run in (self.follow, self.await_appends)
        ]

    def _until_closed(self, use: Callable[[], None]) -> None:
        self._begun.release()
        try:
            while True:
                use()
        except StoreError as exc:
            self.heard[use.__name__] += "closed" in str(exc)
        except BaseException as exc:  # noqa: BLE001 told to whoever looks at the result
            self.surprises.append(exc)

    def append(self) -> None:
        """Append a record."""
        self.log.groups.append_sync(
            self.group, [StreamWrite(1, self.acknowledged, [sampled(self.acknowledged)])]
        )
        self.acknowledged += 1

    def read(self) -> None:
        """Read rows and records."""
        self.log.state()
        self.log.groups.fetch(self.group.uid)
        self.log.next_step_groups(4)

    def walk(self) -> None:
        """Read the journal and the rows with a generator."""
        assert list(self.log.journal.read())
        assert list(self.log.group_rows())

    def wait(self) -> None:
        """Wait for what never comes."""
        assert not self.log.journal.wait_sync(1 << 40, 60.0)

    def aim(self) -> None:
        """Append to the journal."""
        self.log.journal.append_sync([GoalSet(max_steps=1 << 20)])
        self.goals += 1

    def cache(self) -> None:
        """Cache and look up."""
        self.log.cache_put(b"key", b"value" * 100)
        assert self.log.cache_get(b"key") in {None, b"value" * 100}

    def follow(self) -> None:
        """Follow the journal in an event loop."""

        async def all_of_it() -> None:
            async for record in self.log.journal.follow():
                assert record.index >= 0

        asyncio.run(all_of_it())

    def await_appends(self) -> None:
        """Append from several coroutines."""

        async def one(tree: int) -> None:
            await self.log.groups.append(self.group, [StreamWrite(tree, None, [sampled(0)])])

        async def many() -> None:
            await asyncio.gather(*(one(tree) for tree in range(2, 12)))

        asyncio.run(many())

    def start(self) -> None:
        """Start all, and wait until each has begun."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            self._begun.acquire()

    def end(self) -> None:
        """Wait for all; each must have heard that the log is closed."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        if self.surprises:
            raise self.surprises[0]
        assert set(self.heard.values()) == {1}
        assert len(self.heard) == len(self._threads)


def close_in_use(run_dir: Path, seed: int) -> None:
    """Close a log at a random moment of its use, and look for all that was acknowledged."""
    draw = random.Random(seed)
    with open_run(run_dir) as log:
        group = claim(log)
        log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])])
        users = Users(log, group)
        users.start()
        for _ in range(draw.randrange(6)):
            log.state()
        goals = users.goals
        while users.goals < goals + draw.randrange(4):
            log.journal.wait_sync(0, 1.0)
    users.end()
    with open_log(run_dir, readonly=True) as log:
        trees = Counter(record.tree for record in log.groups.fetch(group.uid).records)
        assert trees[1] in {users.acknowledged, users.acknowledged + 1}
        goals = sum(isinstance(record.event, GoalSet) for record in log.journal.read())
        assert goals in {users.goals, users.goals + 1}


def close_again_and_again(connection: Connection, folder: Path, seed: int) -> None:
    """Close logs in use, in a process that a crash would kill."""
    for number in range(ROUNDS):
        close_in_use(folder / str(number), seed + number)
        connection.send(number)


@pytest.mark.parametrize("seed", [100, 200])
def test_closing_a_log_in_use_is_an_error_to_its_users_and_no_crash(tmp_path: Path, seed: int) -> None:
    """Many times, with readers, writers, waiters, followers and event loops in threads of one process."""
    with Child(close_again_and_again, tmp_path, seed) as child:
        assert [child.hear() for _ in range(ROUNDS)] == list(range(ROUNDS))
        assert child.end() == 0
    kinds = {finding.kind for number in range(3) for finding in verify(tmp_path / str(number))}
    assert kinds <= {"group"}, "of turns that are no chain alone"


def test_closing_here_too(tmp_path: Path) -> None:
    """The same in this process."""
    for number in range(3):
        close_in_use(tmp_path / str(number), number)


def test_a_closed_log_refuses_everything(tmp_path: Path) -> None:
    """Every use of a closed log says that it is closed; closing it again is fine."""
    log = open_run(tmp_path)
    group = claim(log)
    closed(log, 1)
    log.close()
    uses: list[Callable[[], object]] = [
        log.state,
        log.run_event,
        log.policies,
        log.pinned_weights,
        lambda: log.open_run(run_event()),
        lambda: log.group(group.uid),
        lambda: list(log.group_rows()),
        lambda: log.next_step_groups(1),
        lambda: log.step(0),
        lambda: log.cache_get(b"key"),
        lambda: log.cache_put(b"key", b"value"),
        lambda: log.journal.append_sync([GoalSet(max_steps=1)]),
        lambda: list(log.journal.read()),
        lambda: log.journal.get(0),
        log.journal.head,
        log.journal.length,
        lambda: log.journal.wait_sync(0, 1.0),
        lambda: asyncio.run(anext(log.journal.follow(1 << 40))),  # type: ignore[arg-type]
        lambda: log.groups.claim_sync(log.worker_id, OPEN_ADMISSION, 1.0),
        lambda: log.groups.take_over_sync(group.uid, "worker-2", 1.0),
        lambda: log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])]),
        lambda: log.groups.close_sync(group, CHOSEN, 1.0),
        lambda: log.groups.abort_sync(group, "reason", 1.0),
        lambda: log.groups.fetch(group.uid),
    ]
    for number, use in enumerate(uses):
        with pytest.raises(StoreError, match="closed"):
            use()
        assert not list((tmp_path / "locks").glob("rollout-*")), number
    log.close()


def test_a_closed_log_keeps_no_group_from_others(tmp_path: Path) -> None:
    """A claim that comes after the closing leaves no lock behind, so the next worker adopts the group."""
    log = open_run(tmp_path)
    group = claim(log)
    log.close()
    with pytest.raises(StoreError, match="closed"):
        log.groups.claim_sync(log.worker_id, OPEN_ADMISSION, 1.0)
    assert Locks(tmp_path / "locks").is_dead(log.worker_id)
    with open_run(tmp_path) as again:
        assert claim(again) == group._replace(owner=2, adopted=True)


def test_whoever_waits_for_room_hears_of_the_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that wait because the queue is full: those in threads and those in event loops."""
    monkeypatch.setattr(writer, "MAX_QUEUED_BYTES", 100)

    async def scene() -> list[object]:
        log = open_run(tmp_path)
        group = claim(log)

        async def late(tree: int) -> None:
            await log.groups.append(group, [StreamWrite(tree, 0, [sampled(0)])])

        async with busy_writer(log):
            full = asyncio.create_task(late(1))
            await asyncio.sleep(0)
            blocked = [asyncio.create_task(late(tree)) for tree in (2, 3)]
            in_thread = asyncio.create_task(
                asyncio.to_thread(log.groups.append_sync, group, [StreamWrite(4, 0, [sampled(0)])])
            )
            room = log._writer._room
            await asyncio.to_thread(until, lambda: len(log._writer._waiting) == 2 and len(room._waiters) == 1)  # type: ignore[attr-defined]
            closing = asyncio.create_task(asyncio.to_thread(log.close))
            await asyncio.to_thread(until, lambda: log._writer._closing)
        await closing
        return await asyncio.gather(full, *blocked, in_thread, return_exceptions=True)

    first, *others = asyncio.run(scene())
    assert first is None
    assert [type(other) for other in others] == [StoreError] * 3
    assert all("closed" in str(other) for other in others)
