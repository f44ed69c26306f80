"""Where a log lies and who holds it: creation races, read-only places, locks that change hands, LMDB's errors."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb
import pytest

from core.errors import LogBusy, LogDamaged, LogFull, StoreError
from core.events import GoalSet
from store import creating, disk
from store import locks as locks_module
from store.copying import backup, compact
from store.keys import Table, after, group_prefix
from store.locks import OPENED, Locks
from store.log import open_log
from store.ports import StreamWrite
from store.rebuilding import rebuild
from store.translation import translate
from store.verify import verify
from store.versions import THIS_RELEASE, VERSIONS_KEY, Versions, pack_versions
from tests.store.children import Child, LogChild
from tests.store.faults import change, on_a_small_disk
from tests.store.making import (
    OPEN_ADMISSION,
    asked,
    busy_writer,
    chain,
    claim,
    closed,
    fill,
    open_run,
    sampled,
)


def make_log(connection: Connection, run_dir: Path) -> None:
    """Make a log when told to, at the same time as others."""
    connection.send("ready")
    connection.recv()
    with open_run(run_dir) as log:
        connection.send((log.run_event(), log.journal.length()))


def test_processes_that_make_one_log_at_once_get_one(tmp_path: Path) -> None:
    """Each gets the whole log, made once, and nothing is left of the others' tries."""
    run_dir = tmp_path / "run"
    children = [Child(make_log, run_dir) for _ in range(4)]
    for child in children:
        assert child.hear() == "ready"
    for child in children:
        child.say("go")
    answers = [child.hear() for child in children]
    assert answers == [answers[0]] * 4
    assert answers[0][1] == 1
    assert [child.end() for child in children] == [0] * 4
    assert sorted(path.name for path in run_dir.iterdir()) == ["locks", "log"]


def test_a_log_is_made_once(tmp_path: Path) -> None:
    """A second making leaves the first as it is; a name that cannot be given is an error."""
    creating.create(tmp_path, 1 << 20)
    content = (tmp_path / "log" / "data.mdb").read_bytes()
    creating.create(tmp_path, 1 << 24)
    assert (tmp_path / "log" / "data.mdb").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    (tmp_path / "source").mkdir()
    with pytest.raises(FileExistsError):
        creating.rename_directory(tmp_path / "source", tmp_path / "log")
    with pytest.raises(FileNotFoundError):
        creating.rename_directory(tmp_path / "source", tmp_path / "nowhere" / "log")


def make_with_little_space(connection: Connection, run_dir: Path) -> None:
    """Try to make a log of the default size in little address space."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    for what in (lambda: open_log(run_dir, create=True), lambda: open_log(run_dir.parent / "made")):
        try:
            what().close()
            connection.send("opened")
        except StoreError as exc:
            connection.send(str(exc))


def test_a_map_that_does_not_fit_is_named_when_a_log_is_made_or_opened(tmp_path: Path) -> None:
    """With the setting that makes it fit; nothing is left of the try."""
    open_log(tmp_path / "made", create=True).close()
    with Child(make_with_little_space, tmp_path / "new") as child:
        for _ in range(2):
            says = child.hear()
            assert "ROLLTAPE_MAP_SIZE" in says
            assert "address space" in says
        assert child.end() == 0
    assert list((tmp_path / "new").iterdir()) == []
    open_log(tmp_path / "made").close()


READ_ONLY = """
import subprocess, sys
from pathlib import Path
from core.errors import StoreError
from store.log import open_log
from store.verify import verify
from tests.store.making import closed, open_run
run = Path(sys.argv[1]) / "run"
with open_run(run) as log:
    closed(log, 1)
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
with open_log(run, readonly=True) as log:
    assert log.state().next_ticket == 1
    assert len(log.groups.fetch("000000.0").records) == 13
assert verify(run) == []
try:
    open_log(run, role="rollout")
except StoreError as exc:
    print(exc)
"""


def test_a_log_in_a_place_that_is_read_only_is_read(tmp_path: Path) -> None:
    """Readers and `verify` need no lock there, for nobody can replace the file; a writer hears why not."""
    assert "Read-only file system" in on_a_small_disk(tmp_path, READ_ONLY, "4m")


FULL_BACKUP = """
import sys
from pathlib import Path
from core.errors import LogFull
from store.copying import backup
from tests.store.making import closed, open_run
place = Path(sys.argv[1])
with open_run(place / "run") as log:
    closed(log, 40)
used = sum(path.stat().st_blocks * 512 for path in place.rglob("*"))
(place / "ballast").write_bytes(bytes((4 << 20) - used - 100_000))
try:
    backup(place / "run", place / "copy")
except LogFull as exc:
    print(exc)
print(list((place / "copy").iterdir()))
"""


def test_a_backup_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    """A full disk is named, and no half of a log is left that could be taken for one."""
    printed = on_a_small_disk(tmp_path, FULL_BACKUP, "4m")
    assert "the disk under" in printed
    assert printed.endswith("[]\n")


def test_what_needs_a_log_says_that_there_is_none(tmp_path: Path) -> None:
    """Backup, compaction, rebuilding and verification."""
    uses: list[Callable[[], object]] = [
        lambda: backup(tmp_path, tmp_path / "copy"),
        lambda: compact(tmp_path),
        lambda: rebuild(tmp_path),
        lambda: verify(tmp_path),
        lambda: open_log(tmp_path),
    ]
    for use in uses:
        with pytest.raises(StoreError, match="no log in"):
            use()
    assert list(tmp_path.iterdir()) == []


def hold_alone(connection: Connection, folder: Path) -> None:
    """Hold a log as a compaction does."""
    Locks(folder).take(OPENED)
    connection.send("held")
    connection.recv()


def test_a_log_that_is_being_compacted_is_not_opened(tmp_path: Path) -> None:
    """Whoever opens, verifies or copies it is told who has it, and to try again."""
    open_run(tmp_path).close()
    with Child(hold_alone, tmp_path / "locks") as child:
        assert child.hear() == "held"
        for use in (lambda: open_log(tmp_path), lambda: backup(tmp_path, tmp_path / "copy")):
            with pytest.raises(LogBusy, match=f"is being compacted by process {child.pid}: try again"):
                use()
        with pytest.raises(StoreError, match="being compacted"):
            verify(tmp_path)
        with pytest.raises(LogBusy, match="in use"):
            compact(tmp_path)
    open_run(tmp_path).close()


def test_locks_that_are_not_held_or_ours(tmp_path: Path) -> None:
    """Giving back what one does not hold is nothing; one's own lock is not that of a dead one."""
    locks = Locks(tmp_path / "locks")
    locks.release("worker-1")
    assert locks.is_dead("worker-1")
    locks.take("worker-1")
    locks.take("worker-1")
    assert not locks.is_dead("worker-1")
    assert "worker-1" in repr(locks)
    other = Locks(tmp_path / "locks")
    assert not other.is_dead("worker-1")
    with pytest.raises(LogBusy, match=f"worker-1 of .* is held by process {os.getpid()}"):
        other.take("worker-1")
    locks.release("worker-1")
    assert other.is_dead("worker-1")
    assert list((tmp_path / "locks").iterdir()) == []


def deleting_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next attempt at a lock find that its file was deleted after it was opened: a race, brought about."""
    real = locks_module._try

    def attempt(descriptor: int, kind: int) -> bool:
        monkeypatch.setattr(locks_module, "_try", real)
        path.unlink()
        return real(descriptor, kind)

    monkeypatch.setattr(locks_module, "_try", attempt)


def test_a_lock_whose_file_is_deleted_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds a dead worker deletes its file; a lock on a deleted file is worth nothing."""
    folder = tmp_path / "locks"
    locks, asking = Locks(folder), Locks(folder)
    deleting_first(folder / "worker-1", monkeypatch)
    locks.take("worker-1")
    assert (folder / "worker-1").read_text() == f"{os.getpid()}\n"
    assert not asking.is_dead("worker-1")
    locks.release("worker-1")
    deleting_first(folder / "worker-1", monkeypatch)
    assert asking.is_dead("worker-1")
    locks.take("worker-1")
    assert not asking.is_dead("worker-1")


def test_dead_workers_are_cleared_away_while_others_come(tmp_path: Path) -> None:
    """A lock that was taken holds, whoever else deletes the files of dead workers at the same time."""
    folder = tmp_path / "locks"
    locks, asking = Locks(folder), Locks(folder)
    with Child(clear_for_ever, folder) as child:
        assert child.hear() == "clearing"
        taken = 0
        while taken < 40:
            with contextlib.suppress(LogBusy):  # whoever asks without a pause may well hold it at every try
                locks.take("worker-1")
                assert not asking.is_dead("worker-1")
                locks.release("worker-1")
                taken += 1


def clear_for_ever(connection: Connection, folder: Path) -> None:
    """Delete the files of dead workers, again and again."""
    locks = Locks(folder)
    connection.send("clearing")
    while True:
        locks.is_dead("worker-1")


def test_a_worker_is_asked_after_by_name(tmp_path: Path) -> None:
    """Living in another process, dead once that ends, evicted though it lives."""
    with open_run(tmp_path) as log:
        assert log.worker_is_dead("nobody")
        with LogChild(tmp_path) as child:
            child.do("groups.claim_sync", child.worker_id, OPEN_ADMISSION, 1.0)
            assert not log.worker_is_dead(child.worker_id)
            log.evict(child.worker_id)
            assert log.worker_is_dead(child.worker_id)


@pytest.mark.parametrize(
    ("kind", "ours", "says"),
    [
        (lmdb.MapFullError, LogFull, "ROLLTAPE_MAP_SIZE"),
        (lmdb.DiskError, LogFull, "free space and go on"),
        (lmdb.CorruptedError, LogDamaged, "run `verify`"),
        (lmdb.PageNotFoundError, LogDamaged, "run `verify`"),
        (lmdb.InvalidError, LogDamaged, "run `verify`"),
        (lmdb.CursorFullError, LogDamaged, "run `verify`"),
        (lmdb.PanicError, LogDamaged, "run `verify`"),
        (lmdb.BadTxnError, LogDamaged, "run `verify`"),
        (lmdb.ReadersFullError, LogBusy, "reader slots"),
        (lmdb.MapResizedError, LogBusy, "start this process again"),
        (lmdb.MemoryError, StoreError, "address space"),
        (lmdb.ReadonlyError, StoreError, "no permission"),
        (lmdb.LockError, StoreError, "no permission"),
        (lmdb.BadValsizeError, StoreError, "failed: BadValsizeError: text"),
    ],
)
def test_every_error_of_lmdb_has_a_meaning(
    tmp_path: Path, kind: type[lmdb.Error], ours: type[StoreError], says: str
) -> None:
    """Its class among ours, where it happened, and what to do."""
    error = translate(kind("text"), tmp_path, 4096)
    assert type(error) is ours
    assert says in str(error)
    assert str(tmp_path) in str(error)


def header(data: Path, page: int, transaction: int) -> None:
    """Write another transaction number into a header page."""
    content = bytearray(data.read_bytes())
    at = page * disk.read_meta(data).page_size + disk.META_SIZE - 8
    content[at : at + 8] = transaction.to_bytes(8, "little")
    data.write_bytes(content)


def test_header_pages_that_are_no_neighbours(tmp_path: Path) -> None:
    """The two pages of a file name transactions that follow each other, the even one first."""
    with open_run(tmp_path) as log:
        closed(log, 1)
    data = tmp_path / "log" / "data.mdb"
    newest = disk.read_meta(data).transaction
    assert disk.header_problems(data) == []
    header(data, newest % 2, newest + 2)
    (problem,) = disk.header_problems(data)
    assert "expected neighbours" in problem
    assert [(each.kind, each.message) for each in verify(tmp_path)] == [("file", problem)]
    creating.create(tmp_path / "locks", 1 << 20)
    assert disk.header_problems(tmp_path / "locks" / "log" / "data.mdb") == []


def test_a_table_whose_record_is_damaged(tmp_path: Path) -> None:
    """A file in which a table's own record makes no sense is damaged, not foreign; the other tables are read."""
    with open_run(tmp_path) as log:
        fill(log, claim(log))
    data = tmp_path / "log" / "data.mdb"
    content = bytearray(data.read_bytes())
    at = content.find(b"groups")
    while at >= 0:
        content[at + 6 + 40 : at + 6 + 48] = (1 << 40).to_bytes(8, "little")  # its root page
        at = content.find(b"groups", at + 1)
    data.write_bytes(content)
    with open_log(tmp_path, role="rollout") as log:
        with pytest.raises(LogDamaged, match="run `verify`"):
            log.groups.fetch("000000.0")
        with pytest.raises(LogDamaged, match="run `verify`"):
            log.groups.append_sync(claim(log), [StreamWrite(1, None, chain(1))])
        assert log.state().next_ticket == 1
    assert any("damaged" in each.message for each in verify(tmp_path))


def test_a_file_whose_tables_cannot_be_found_is_damaged(tmp_path: Path) -> None:
    """The header leads to a page that is none: one clear error, before anything is done."""
    open_run(tmp_path).close()
    data = tmp_path / "log" / "data.mdb"
    content = bytearray(data.read_bytes())
    root = disk._PAGE.size + disk._META.size + disk._TREE.size + 40
    for start in (0, disk.read_meta(data).page_size):
        content[start + root : start + root + 8] = (1 << 40).to_bytes(8, "little")
    data.write_bytes(content)
    for readonly in (True, False):
        with pytest.raises(LogDamaged, match="run `verify`"):
            open_log(tmp_path, role="rollout", readonly=readonly)
    assert [each.kind for each in verify(tmp_path)] == ["file"]
    assert data.read_bytes() == bytes(content)


def test_an_older_schema_with_the_same_views_is_read_and_brought_up(tmp_path: Path) -> None:
    """A reader takes it as it is; whoever may write enters its own versions."""
    older = Versions(schema=THIS_RELEASE.schema - 1)
    open_run(tmp_path).close()
    change(tmp_path / "log" / "data.mdb", Table.META, {VERSIONS_KEY: pack_versions(older)})
    with open_log(tmp_path, readonly=True) as log:
        assert log._environment.versions == older
        assert log.journal.length() == 1
    with open_run(tmp_path) as log:
        closed(log, 1)
    with open_log(tmp_path, readonly=True) as log:
        assert log._environment.versions == THIS_RELEASE


BRANCH = 1
"""Flag of a page that leads to other pages."""


def test_pages_in_disorder_take_no_append(tmp_path: Path) -> None:
    """Where the pages above lead to a wrong page, the end of a stream that is found there is no position."""
    big = sampled(0, tokens=100)
    with open_run(tmp_path) as log:
        group = claim(log)
        writes = [StreamWrite(1, None, [big] * 2), StreamWrite(2, None, [big] * 20)]
        log.groups.append_sync(group, writes)
    prefix = group_prefix(group.uid)
    data = tmp_path / "log" / "data.mdb"
    content = bytearray(data.read_bytes())
    for start in range(0, len(content), 4096):
        page = bytes(content[start : start + 4096])
        if int.from_bytes(page[10:12], "little") == BRANCH:
            content[start : start + 4096] = page.replace(prefix + b"\x00\x02", prefix + b"\x00\x01")
    assert content != data.read_bytes()
    data.write_bytes(content)
    with open_run(tmp_path) as log:
        ours = claim(log)
        with pytest.raises(LogDamaged, match=r"a page of table 'groups' is damaged.*stands after"):
            log.groups.append_sync(ours, [StreamWrite(1, None, [big])])
        with log._environment.read() as snapshot:
            assert len(snapshot.keys(Table.GROUPS, prefix, after(prefix))) == 22


def test_keys_in_disorder_are_not_counted(tmp_path: Path) -> None:
    """Keys that are read without their values are looked at as the others."""
    with open_run(tmp_path) as log:
        fill(log, claim(log))
    prefix, data = group_prefix("000000.0"), tmp_path / "log" / "data.mdb"
    one, two = prefix + bytes(6), prefix + b"\x00\x02\x00\x00\x00\x05"
    content = data.read_bytes()
    data.write_bytes(content.replace(one, b"?" * 16).replace(two, one).replace(b"?" * 16, two))
    with open_log(tmp_path) as log, log._environment.read() as snapshot:
        with pytest.raises(LogDamaged, match="stands after"):
            snapshot.keys(Table.GROUPS, b"", after(prefix))
        assert snapshot.keys(Table.GROUPS, after(prefix), after(after(prefix))) == []


def test_watching_and_queueing_at_their_edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher of a closed log, a follower that is cancelled as it is woken, room that is there already."""
    monkeypatch.setattr("store.writer.MAX_QUEUED_BYTES", 1_000)
    monkeypatch.setattr("store.writer.MAX_BATCH", 1)
    log = open_run(tmp_path)
    watcher = log.journal._watcher

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        await log._writer._room_in(loop)
        waiting = asyncio.create_task(watcher.longer(1))
        await asyncio.sleep(0)
        log.journal.append_sync([GoalSet(max_steps=1)])
        thread = watcher._thread
        assert thread is not None
        thread.join(30)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        group = claim(log)
        small, large = [asked(group.uid)], chain(1, tokens=2_000)
        async with busy_writer(log):
            tasks = [
                asyncio.create_task(log.groups.append(group, [StreamWrite(tree, 0, events)]))
                for tree, events in ((0, small), (1, large), (2, large), (3, large))
            ]
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert len(log.groups.fetch(group.uid).records) == 19

    asyncio.run(scene())
    log.close()
    with pytest.raises(StoreError, match="closed"):
        asyncio.run(watcher.longer(0))
