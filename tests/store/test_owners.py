"""Owners and locks with real processes: death, stalling, eviction, a second learner."""

import asyncio
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from core.errors import LogBusy, OwnerLost, StoreError
from store.locks import LEARNER, Locks
from store.log import open_log
from store.ports import Claim, StreamWrite
from tests.store.children import Child, LogChild
from tests.store.making import OPEN_ADMISSION, busy_writer, chain, claim, open_run


def claimed(child: LogChild) -> Claim:
    """Return what a child claims."""
    found = child.do("groups.claim_sync", child.worker_id, OPEN_ADMISSION, 1.0)
    assert isinstance(found, Claim)
    return found


def test_a_killed_workers_group_is_adopted_with_what_it_wrote(tmp_path: Path) -> None:
    """After SIGKILL the next claim takes the group over, owner number raised, records kept."""
    with open_run(tmp_path / "run") as log:
        with LogChild(log.run_dir) as child:
            theirs = claimed(child)
            child.do("groups.append_sync", theirs, [StreamWrite(1, 0, chain(1)[:3])])
            assert claim(log).uid != theirs.uid
            child.kill()
            ours = claim(log)
        assert (ours.uid, ours.owner, ours.adopted) == (theirs.uid, theirs.owner + 1, True)
        assert [record.event for record in log.groups.fetch(ours.uid).records] == list(chain(1)[:3])
        assert log.group(ours.uid).worker == log.worker_id
        assert not (log.run_dir / "locks" / child.worker_id).exists()


def test_a_stalled_worker_keeps_its_group_until_it_is_evicted(tmp_path: Path) -> None:
    """A stopped process is not dead; once evicted and adopted, its late append fails with OwnerLost."""
    with open_run(tmp_path / "run") as log, LogChild(log.run_dir) as child:
        theirs = claimed(child)
        child.signal(signal.SIGSTOP)
        assert claim(log).uid != theirs.uid
        log.evict(child.worker_id)
        ours = claim(log)
        assert (ours.uid, ours.owner) == (theirs.uid, 2)
        child.signal(signal.SIGCONT)
        with pytest.raises(OwnerLost, match=log.worker_id):
            child.do("groups.append_sync", theirs, [StreamWrite(1, 0, chain(1))])
        log.groups.append_sync(ours, [StreamWrite(1, 0, chain(1))])


def test_a_worker_that_ends_well_leaves_its_groups_to_others(tmp_path: Path) -> None:
    """Closing the log gives the lock back, so an unfinished group is adopted."""
    with open_run(tmp_path / "run") as log:
        group = claim(log)
    with open_run(tmp_path / "run") as log:
        assert claim(log) == group._replace(owner=2, adopted=True)


def test_a_second_learner_names_the_first(tmp_path: Path) -> None:
    """The error holds the pid of the learner that runs; when that dies, the next may start."""
    open_run(tmp_path / "run").close()
    with LogChild(tmp_path / "run", "learner") as child:
        with pytest.raises(LogBusy, match=f"process {child.pid}"):
            open_log(tmp_path / "run", role="learner")
        child.kill()
        open_log(tmp_path / "run", role="learner").close()


def test_asking_whether_a_holder_lives_does_not_refuse_it_its_lock(tmp_path: Path) -> None:
    """The instant in which the question holds the lock is waited out."""
    folder = tmp_path / "locks"
    asking, taking = Locks(folder), Locks(folder)
    taking.take(LEARNER)
    taking.release(LEARNER)
    with Child(ask_for_ever, folder) as child:
        assert child.hear() == "asking"
        for _ in range(200):
            taking.take(LEARNER)
            assert not asking.is_dead(LEARNER)
            taking.release(LEARNER)


def ask_for_ever(connection: Connection, folder: Path) -> None:
    """Ask whether the learner lives, again and again."""
    locks = Locks(folder)
    connection.send("asking")
    while True:
        locks.is_dead(LEARNER)


def test_a_worker_id_is_a_plain_name(tmp_path: Path) -> None:
    """It names a file, so it has no path in it."""
    with open_run(tmp_path / "run") as log, pytest.raises(StoreError, match="not a worker id"):
        log.groups.claim_sync("../escape", OPEN_ADMISSION, 1.0)


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """The child closes its copies, so the lock is free when its parent dies."""
    with Child(take_and_fork, tmp_path / "locks") as child:
        grandchild = child.hear()
        assert not Locks(tmp_path / "locks").is_dead("worker-1")
        child.kill()
        assert Locks(tmp_path / "locks").is_dead("worker-1")
        os.kill(grandchild, signal.SIGKILL)


def take_and_fork(connection: Connection, folder: Path) -> None:
    """Take a lock and fork a child that outlives this process."""
    locks = Locks(folder)
    locks.take("worker-1")
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(send, b"ready")
        signal.pause()
    os.read(receive, 5)
    connection.send(pid)
    signal.pause()


def test_a_claim_whose_caller_was_cancelled_is_handed_out_again(tmp_path: Path) -> None:
    """No ticket hangs on a call that nobody waited for."""

    async def scene() -> None:
        with open_run(tmp_path / "run") as log:
            async with busy_writer(log):
                lost = asyncio.create_task(log.groups.claim(log.worker_id, OPEN_ADMISSION, 1.0))
                await asyncio.sleep(0)
                lost.cancel()
                await asyncio.gather(lost, return_exceptions=True)
            found = await log.groups.claim(log.worker_id, OPEN_ADMISSION, 1.0)
            another = await log.groups.claim(log.worker_id, OPEN_ADMISSION, 1.0)
            assert isinstance(found, Claim)
            assert isinstance(another, Claim)
            assert {(found.uid, found.adopted), (another.uid, another.adopted)} == {
                ("000000.0", True),
                ("000001.0", False),
            }
            assert found.owner == another.owner == 1

    asyncio.run(scene())
