"""Backups while the log is in use, compaction, and rebuilding: the same records in another file."""

import shutil
from pathlib import Path

import pytest

from core.errors import LogBusy, LogDamaged, LogFull, StoreError
from core.events import GroupAborted
from store import codec, copying, keys
from store.copying import backup, compact
from store.environment import Environment
from store.keys import Table
from store.log import open_log
from store.ports import StreamWrite
from store.rebuilding import rebuild
from store.snapshot import Change
from store.verify import verify
from tests.store.children import LogChild
from tests.store.faults import change
from tests.store.making import OPEN_ADMISSION, chain, claim, closed, fill, open_run, trained


def everything(run_dir: Path) -> dict[Table, list[tuple[bytes, bytes]]]:
    """Return every stored entry."""
    environment = Environment(run_dir / "log", readonly=True, map_size=None, sync=True)
    with environment.read() as snapshot:
        found = {table: list(snapshot.scan(table)) for table in Table}
    environment.close()
    return found


def test_a_backup_is_the_log_at_one_moment(tmp_path: Path) -> None:
    """It is made while another process has the log open and writes, and opens as a run of its own."""
    with open_run(tmp_path / "run") as log:
        trained(log, 0)
        head = log.journal.head()
    with LogChild(tmp_path / "run") as child:
        claimed = child.do("groups.claim_sync", child.worker_id, OPEN_ADMISSION, 1.0)
        target = backup(tmp_path / "run", tmp_path / "deep" / "copy")
        child.do("groups.append_sync", claimed, [StreamWrite(1, 0, chain(1))])
    assert verify(target, head) == []
    assert (target / "log" / "data.mdb").stat().st_mode & 0o777 == 0o600
    with open_log(target) as log:
        assert log.group(claimed.uid).worker == child.worker_id
        assert log.groups.fetch(claimed.uid).records == ()
    with pytest.raises(StoreError, match="not empty"):
        backup(tmp_path / "run", target)


def test_a_compacted_log_is_smaller_and_holds_the_same(tmp_path: Path) -> None:
    """Nothing readable changes, except that ended groups are sealed; another map size may be asked for."""
    with open_run(tmp_path) as log:
        trained(log, 0)
        closed(log, 2)
        for _ in range(20):
            fill(log, claim(log), trees=8)
        given_up = claim(log)
        fill(log, given_up)
        log.journal.append_sync([GroupAborted(uid=given_up.uid, reason="run_ended", final=True)])
        for row in list(log.group_rows()):
            if row.fate == "open":
                log.journal.append_sync([GroupAborted(uid=row.uid, reason="run_ended", final=True)])
        bundles = {row.uid: log.groups.fetch(row.uid) for row in log.group_rows()}
        state, head = log.state(), log.journal.head()
    done = compact(tmp_path, map_size=1 << 24)
    assert done.after < done.before
    assert verify(tmp_path, head) == []
    with open_log(tmp_path, role="rollout") as log:
        assert log._environment.map_size == 1 << 24
        assert log.state() == state
        assert {row.uid: log.groups.fetch(row.uid) for row in log.group_rows()} == bundles
        with log._environment.read() as snapshot:
            assert snapshot.count(Table.GROUPS) == 0
        closed(log, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["locks", "log"]


def test_compacted_pages_are_full(tmp_path: Path) -> None:
    """A log of small groups takes hardly more than its entries, where the growing one took much more."""
    with open_run(tmp_path) as log:
        for step in range(20):
            trained(log, step, groups=4)
    entries = everything(tmp_path)
    payload = sum(len(key) + len(value) for table in entries.values() for key, value in table)
    done = compact(tmp_path)
    assert done.after < 1.25 * payload + 65536 < done.before
    assert everything(tmp_path) == entries


def test_a_log_in_use_is_not_compacted(tmp_path: Path) -> None:
    """Whoever has it open keeps it as it is, reader or writer."""
    open_run(tmp_path).close()
    with LogChild(tmp_path, "reader"), pytest.raises(LogBusy, match="in use"):
        compact(tmp_path)
    compact(tmp_path)


def test_a_compaction_that_cannot_end_changes_nothing(tmp_path: Path) -> None:
    """A map that is too small, or a damaged record: an error, and the log as it was."""
    with open_run(tmp_path) as log:
        closed(log, 60)
    before = everything(tmp_path)
    with pytest.raises(LogFull):
        compact(tmp_path, map_size=1 << 16)
    assert everything(tmp_path) == before
    environment = Environment(tmp_path / "log", readonly=False, map_size=None, sync=True)
    key, value = before[Table.BUNDLES][0]
    with environment.write() as snapshot:
        snapshot.put([Change(Table.BUNDLES, key, value[:-1] + bytes([value[-1] ^ 1]))])
    environment.close()
    with pytest.raises(LogDamaged, match="bundles"):
        compact(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["locks", "log"]


def test_rebuilding_gives_identical_bytes(tmp_path: Path) -> None:
    """The views are a pure function of the journal."""
    with open_run(tmp_path) as log:
        for step in range(3):
            trained(log, step)
        closed(log, 2)
        first = claim(log)
        log.groups.abort_sync(first, "weights_expired", 1.0)
        claim(log)
    before = everything(tmp_path)
    environment = Environment(tmp_path / "log", readonly=False, map_size=None, sync=True)
    with environment.write() as snapshot:
        snapshot.clear(Table.VIEWS)
    environment.close()
    assert verify(tmp_path)
    assert rebuild(tmp_path) == len(before[Table.VIEWS])
    assert everything(tmp_path) == before


def test_a_log_without_its_views_is_not_written(tmp_path: Path) -> None:
    """Views that fell behind the journal are noticed at the next append."""
    with open_run(tmp_path) as log:
        closed(log, 1)
        with log._environment.write() as snapshot:
            snapshot.clear(Table.VIEWS)
        with pytest.raises(LogDamaged, match="rebuild"):
            claim(log)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(StoreError, match="no log"):
        rebuild(tmp_path)


def test_a_compaction_in_many_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little one of them writes, the copy holds the same entries; records that nobody knows are kept."""
    monkeypatch.setattr(copying, "COPY_BYTES", 500)
    with open_run(tmp_path) as log:
        closed(log, 5)
        fill(log, claim(log))
        head = log.journal.head()
    key = keys.group_key(keys.group_prefix("000777.0"), 1, 0)
    change(tmp_path / "log" / "data.mdb", Table.GROUPS, {key: codec.pack(Table.GROUPS, key, b"\x80")})
    before = everything(tmp_path)
    compact(tmp_path)
    assert everything(tmp_path) == before
    assert [finding.key for finding in verify(tmp_path, head)] == ["000777.0"]


def test_a_compaction_counts_what_it_copied(tmp_path: Path) -> None:
    """A table that says it has more entries than can be read is not replaced by what can be read."""
    with open_run(tmp_path) as log:
        fill(log, claim(log))
    data = tmp_path / "log" / "data.mdb"
    content = bytearray(data.read_bytes())
    at = content.find(b"groups")
    while at >= 0:
        content[at + 6 + 32] ^= 64  # its number of entries
        at = content.find(b"groups", at + 1)
    data.write_bytes(content)
    with pytest.raises(
        LogDamaged, match=r"has 77 entries, 13 could be copied: run `verify`; the log is as it was"
    ):
        compact(tmp_path)
    with open_log(tmp_path) as log:
        assert len(log.groups.fetch("000000.0").records) == 13
