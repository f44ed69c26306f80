"""What may go wrong with the file and its place: foreign, damaged, newer, full, opened twice, forked."""

import asyncio
import os
import resource
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import lmdb
import pytest

from core.errors import Conflict, LogBusy, LogDamaged, LogForeign, LogFull, LogTooNew, StoreError
from core.events import GoalSet
from store import creating, disk
from store.keys import Table
from store.log import open_log
from store.ports import StreamWrite
from store.snapshot import Change
from store.translation import MAP_SIZE, MAX_READERS
from store.verify import verify
from store.versions import VERSIONS_KEY, Versions, pack_versions
from tests.store.children import Child, LogChild
from tests.store.faults import on_a_small_disk
from tests.store.making import asked, busy_writer, chain, claim, closed, open_run, run_event, sampled

DATA = Path("log") / "data.mdb"


def contents(run_dir: Path) -> dict[str, bytes]:
    """Return every file of a run directory except LMDB's reader table."""
    return {
        str(path): path.read_bytes()
        for path in run_dir.rglob("*")
        if path.is_file() and path.name != "lock.mdb" and path.parent.name != "locks"
    }


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"", LogDamaged, "empty"),
        (b"\x00" * 100, LogDamaged, "cut short"),
        (b"\x00" * 20_000, LogForeign, "not a Rolltape log"),
        (b"SQLite format 3\x00" * 2_000, LogForeign, "not a Rolltape log"),
    ],
)
@pytest.mark.parametrize("readonly", [False, True])
def test_a_file_that_is_no_log_is_refused_and_not_changed(
    tmp_path: Path, content: bytes, error: type[Exception], says: str, readonly: bool
) -> None:
    """Empty, cut and foreign files: one clear error each."""
    (tmp_path / "log").mkdir()
    (tmp_path / DATA).write_bytes(content)
    before = contents(tmp_path)
    with pytest.raises(error, match=says):
        open_log(tmp_path, create=True, readonly=readonly, role="rollout")
    assert contents(tmp_path) == before


def test_another_programs_lmdb_file_is_refused_and_not_changed(tmp_path: Path) -> None:
    """LMDB's header is right, but there is no log inside."""
    (tmp_path / "log").mkdir()
    with lmdb.open(str(tmp_path / "log"), max_dbs=8) as env:
        for table in Table:
            env.open_db(table.value)
    before = contents(tmp_path)
    with pytest.raises(LogForeign, match="not a Rolltape log"):
        open_log(tmp_path, role="rollout")
    shutil.rmtree(tmp_path / "log")
    (tmp_path / "log").mkdir()
    with lmdb.open(str(tmp_path / "log")) as env, env.begin(write=True) as transaction:
        transaction.put(b"a", b"b")
    before = contents(tmp_path)
    with pytest.raises(LogForeign, match="not a Rolltape log"):
        open_log(tmp_path, role="rollout")
    assert contents(tmp_path) == before


def test_a_damaged_second_header_or_another_page_size_is_named(tmp_path: Path) -> None:
    """Both header pages are looked at before the file is mapped."""
    open_run(tmp_path).close()
    good = (tmp_path / DATA).read_bytes()
    (tmp_path / DATA).write_bytes(good[:4096] + b"\xff" * 64 + good[4160:])
    with pytest.raises(LogDamaged, match="header page 1"):
        open_log(tmp_path)
    assert [finding.kind for finding in verify(tmp_path)] == ["file"]
    (tmp_path / DATA).write_bytes(good[:40] + b"\x03" + good[41:])
    with pytest.raises(LogForeign, match="pages of"):
        open_log(tmp_path)


def test_a_log_cut_short_is_refused_and_not_changed(tmp_path: Path) -> None:
    """No SIGBUS: the length is compared with the header, and a child tries to read."""
    with open_run(tmp_path) as log:
        closed(log, 3)
    (tmp_path / DATA).write_bytes((tmp_path / DATA).read_bytes()[:20_480])
    before = contents(tmp_path)
    with pytest.raises(LogDamaged, match="cut short"):
        open_log(tmp_path, role="rollout")
    assert contents(tmp_path) == before
    assert verify(tmp_path)


def test_a_file_that_only_lacks_unused_pages_is_read(tmp_path: Path) -> None:
    """LMDB need not have written its last pages when nothing uses them."""
    with open_run(tmp_path) as log:
        log.groups.append_sync(claim(log), [StreamWrite(1, 0, chain(1, tokens=40_000))])
        log.journal.append_sync([GoalSet(max_steps=1)])
    with open_run(tmp_path) as log:
        group = claim(log)
        log.groups.abort_sync(group, "too long", 1.0)
        expected = log.groups.fetch(group.uid)
    meta = disk.read_meta(tmp_path / DATA)
    size = (meta.last_page + 1) * meta.page_size
    for pages in range(1, 8):
        os.truncate(tmp_path / DATA, size - pages * meta.page_size)
        try:
            log = open_log(tmp_path)
        except LogDamaged:
            continue
        with log:
            assert log.groups.fetch(group.uid) == expected


@pytest.mark.parametrize(
    "versions",
    [Versions(format=99), Versions(schema=99), Versions(projections=99)],
)
def test_a_newer_log_is_refused_and_not_changed(tmp_path: Path, versions: Versions) -> None:
    """Format, schema and views each have a version; a newer one of any needs a newer release."""
    creating.create(tmp_path, 1 << 24, versions)
    before = contents(tmp_path)
    with pytest.raises(LogTooNew, match="newer release"):
        open_log(tmp_path, role="rollout")
    with pytest.raises(LogTooNew):
        verify(tmp_path)
    assert contents(tmp_path) == before


def test_an_older_process_stops_writing_when_a_newer_one_takes_the_log(tmp_path: Path) -> None:
    """The versions are looked at in every write; reading goes on."""
    with open_run(tmp_path) as log:
        with log._environment.write() as snapshot:
            snapshot.put([Change(Table.META, VERSIONS_KEY, pack_versions(Versions(schema=2)))])
        with pytest.raises(LogTooNew, match="newer release"):
            log.journal.append_sync([GoalSet(max_steps=1)])
        assert log.run_event() == run_event()


def test_older_views_are_rebuilt_by_whoever_may_write(tmp_path: Path) -> None:
    """A log whose views are of an older release is brought up to date, or refused read-only."""
    with open_run(tmp_path) as log:
        closed(log, 2)
        expected = log.next_step_groups(9)
        with log._environment.write() as snapshot:
            snapshot.clear(Table.VIEWS)
            snapshot.put([Change(Table.META, VERSIONS_KEY, pack_versions(Versions(projections=0)))])
    with pytest.raises(StoreError, match="older release"):
        open_log(tmp_path, readonly=True)
    with open_log(tmp_path, role="rollout") as log:
        assert log.next_step_groups(9) == expected
    assert verify(tmp_path) == []


def test_a_log_is_opened_once_per_process(tmp_path: Path) -> None:
    """A second open of the path, through a symbolic link too, is refused; the first goes on working."""
    with open_run(tmp_path / "run") as log:
        (tmp_path / "link").symlink_to(tmp_path / "run")
        for path in (tmp_path / "run", tmp_path / "link"):
            for readonly in (False, True):
                with pytest.raises(StoreError, match="already open in this process"):
                    open_log(path, readonly=readonly)
        claim(log)
    with open_log(tmp_path / "link") as log:
        assert log.state().next_ticket == 1


def test_nothing_is_used_after_a_fork(tmp_path: Path) -> None:
    """A forked child hears so at once, and does not disturb its parent."""
    with open_run(tmp_path) as log:
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:
            answers = []
            for use in (log.state, lambda: log.journal.append_sync([GoalSet(max_steps=1)])):
                try:
                    use()
                except StoreError as exc:
                    answers.append("after a fork" in str(exc))
            log._environment.close()
            os.write(send, repr(answers).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(receive, 100) == b"[True, True]"
        os.close(receive)
        os.close(send)
        log.journal.append_sync([GoalSet(max_steps=1)])
        assert log.state().max_steps == 1


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /mnt/net\\040share rw - nfs4 server:/x rw
31 22 0:41 / /mnt/fuse rw - fuse.sshfs host rw
32 22 0:42 / /mnt/host rw - 9p drvfs rw
33 32 0:43 / /mnt/host/local rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/run", "ext4"),
        ("/mnt/net share/run", "nfs4"),
        ("/mnt/fuse/run", "fuse.sshfs"),
        ("/mnt/host/run", "9p"),
        ("/mnt/host/local/run", "xfs"),
        ("/mnt/hostile", "ext4"),
    ],
)
def test_remote_file_systems_are_refused(path: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network, FUSE and 9p file systems are refused with advice, unless the user insists."""
    assert disk.mount_type(Path(path), MOUNTS) == kind
    if kind in {"ext4", "xfs"}:
        disk.check_filesystem(Path(path), MOUNTS)
        return
    with pytest.raises(StoreError, match=f"{kind} file system.*local disk"):
        disk.check_filesystem(Path(path), MOUNTS)
    monkeypatch.setenv(disk.ANY_FILESYSTEM, "1")
    disk.check_filesystem(Path(path), MOUNTS)


def test_a_full_map_is_an_error_and_goes_on_when_it_is_larger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LogFull; what was acknowledged stays readable; a larger map takes the rest."""
    with open_log(tmp_path, create=True, role="rollout", map_size=300_000) as log:
        log.open_run(run_event())
        group = claim(log)
        log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])])
        written = 0
        with pytest.raises(LogFull, match="ROLLTAPE_MAP_SIZE"):  # noqa: PT012
            while True:
                log.groups.append_sync(group, [StreamWrite(1, written, [sampled(written, tokens=200)])])
                written += 1
        assert written > 20
        assert len(log.groups.fetch(group.uid).records) == written + 1
        failed = StreamWrite(1, written, [sampled(written, tokens=200)])
    monkeypatch.setenv(MAP_SIZE, str(1 << 24))
    with open_log(tmp_path, role="rollout") as log:
        group = claim(log)
        log.groups.append_sync(group, [failed])
        log.groups.append_sync(group, [failed])
        assert len(log.groups.fetch(group.uid).records) == written + 2


def test_a_request_too_large_for_the_map_fails_alone(tmp_path: Path) -> None:
    """Those that were queued with it are written."""

    async def scene() -> None:
        with open_log(tmp_path, create=True, role="rollout", map_size=300_000) as log:
            log.open_run(run_event())
            group = claim(log)
            writes = [StreamWrite(1, 0, [sampled(0, tokens=200_000)])]
            writes += [StreamWrite(2, 0, chain(2)), StreamWrite(3, 5, chain(3)), StreamWrite(4, 0, chain(4))]
            async with busy_writer(log):
                tasks = [asyncio.create_task(log.groups.append(group, [write])) for write in writes]
                await asyncio.sleep(0)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [LogFull, type(None), Conflict, type(None)]
            assert {record.tree for record in log.groups.fetch(group.uid).records} == {2, 4}

    asyncio.run(scene())


FULL_DISK = """
import sys
from pathlib import Path
from core.errors import LogFull
from store.ports import StreamWrite
from tests.store.making import claim, open_run, sampled
ballast = Path(sys.argv[1]) / "ballast"
ballast.write_bytes(bytes(1 << 20))
with open_run(Path(sys.argv[1]) / "run") as log:
    group = claim(log)
    written = 0
    try:
        while True:
            log.groups.append_sync(group, [StreamWrite(1, written, [sampled(written, tokens=400)])])
            written += 1
    except LogFull as exc:
        assert "disk" in str(exc), exc
    assert len(log.groups.fetch(group.uid).records) == written > 10
    ballast.unlink()
    log.groups.append_sync(group, [StreamWrite(1, written, [sampled(written, tokens=400)])])
    assert len(log.groups.fetch(group.uid).records) == written + 1
print("went on after", written)
"""


def test_a_full_disk_is_an_error_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    """A real small file system, in a mount namespace of its own."""
    assert on_a_small_disk(tmp_path, FULL_DISK, "4m").startswith("went on after")


def limited(connection: Connection, run_dir: Path) -> None:
    """Open a log with little address space."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    open_only(connection, run_dir)


def open_only(connection: Connection, run_dir: Path) -> None:
    """Open a log and say how it went."""
    try:
        open_log(run_dir, create=True, role="rollout").close()
        connection.send("opened")
    except StoreError as exc:
        connection.send(str(exc))


def test_little_address_space_needs_a_smaller_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default map does not fit; the error names the setting that makes it fit."""
    with open_log(tmp_path / "large", create=True, role="rollout") as log:
        assert log._environment.map_size == 1 << 40
        assert (tmp_path / "large" / DATA).stat().st_size < 100_000
    with Child(limited, tmp_path / "large") as child:
        assert "ROLLTAPE_MAP_SIZE" in child.hear()
    monkeypatch.setenv(MAP_SIZE, str(1 << 30))
    open_log(tmp_path / "small", create=True, role="rollout").close()
    with Child(limited, tmp_path / "small") as child:
        assert child.hear() == "opened"


@pytest.mark.parametrize("text", ["1 TiB", "12", str(1 << 50)])
def test_a_bad_map_size_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The setting is bytes, within what LMDB can map."""
    monkeypatch.setenv(MAP_SIZE, text)
    with pytest.raises(StoreError, match="ROLLTAPE_MAP_SIZE"):
        open_log(tmp_path, create=True)
    assert list(tmp_path.iterdir()) == []


def test_a_process_with_a_smaller_map_says_to_start_again(tmp_path: Path) -> None:
    """Where another process enlarged the map and filled it, nothing is lost and the error says what to do."""
    open_log(tmp_path, create=True, role="rollout", map_size=1 << 20).close()
    with LogChild(tmp_path) as child, open_log(tmp_path, role="rollout", map_size=1 << 24) as log:
        log.open_run(run_event())
        group = claim(log)
        log.groups.append_sync(group, [StreamWrite(1, 0, [sampled(0, tokens=200_000)])])
        with pytest.raises(LogBusy, match="start this process again"):
            child.do("state")
    with open_log(tmp_path) as log:
        assert len(log.groups.fetch(group.uid).records) == 1


def hold_readers(connection: Connection, folder: Path, count: int) -> None:
    """Hold many read transactions until told to end."""
    env = lmdb.open(str(folder), readonly=True, max_dbs=8, max_readers=MAX_READERS)
    held = [env.begin() for _ in range(count)]
    connection.send(len(held))
    connection.recv()


def test_more_than_a_thousand_readers(tmp_path: Path) -> None:
    """1,100 readers at once do not keep a writer from writing, nor another process from opening."""
    with (
        open_run(tmp_path) as log,
        Child(hold_readers, tmp_path / "log", 600) as first,
        Child(hold_readers, tmp_path / "log", 500) as second,
    ):
        assert (first.hear(), second.hear()) == (600, 500)
        closed(log, 2)
        with LogChild(tmp_path, "reader") as third:
            assert third.do("state") == log.state()


def test_slots_of_killed_readers_are_freed_by_a_running_process(tmp_path: Path) -> None:
    """Stale readers pin pages; a writer clears them while it works."""
    with open_run(tmp_path) as log:
        for _ in range(3):
            with Child(hold_readers, tmp_path / "log", 50) as child:
                child.hear()
        assert log._environment.check_readers() == 150
        assert log._environment.check_readers() == 0


def test_a_full_reader_table_is_cleared_when_it_is_met(tmp_path: Path) -> None:
    """A reader of a running process finds a place although killed ones fill the table; then others may open."""
    with open_run(tmp_path) as log:
        with Child(hold_readers, tmp_path / "log", MAX_READERS - 1) as child:
            child.hear()
        with Child(open_only, tmp_path) as child:
            assert "reader slots" in child.hear()
        with log._environment.read(), log._environment.read() as second:
            assert second.count(Table.JOURNAL) == 1
        with Child(open_only, tmp_path) as child:
            assert child.hear() == "opened"


def test_no_permission_is_one_clear_error(tmp_path: Path) -> None:
    """A log that may not be opened is left alone."""
    with pytest.raises(StoreError, match="no log in"):
        open_log(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot open the log"):
        open_log(tmp_path / "file" / "run", create=True)
    open_run(tmp_path / "run").close()
    (tmp_path / "run" / DATA).unlink()
    with pytest.raises(StoreError, match="cannot open the log"):
        open_log(tmp_path / "run")
