"""The collected cases of what goes wrong with logs and LMDB files, where they are at hand."""

import base64
import json
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest

from core.errors import LogBusy, LogDamaged, LogFull, StoreError
from core.events import GroupEvent, TurnSampled
from store.creating import MIN_MAP_SIZE
from store.groups import _append_job, _encode
from store.keys import Table
from store.log import Log, open_log
from store.ports import Claim, StreamWrite
from store.verify import verify
from tests.store.children import Child, LogChild
from tests.store.faults import half_done, on_a_small_disk
from tests.store.making import asked, claim, closed, open_run, run_event, sampled

CASES = Path(__file__).parents[2] / ".." / "shared" / "cases" / "g-store"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no collected cases at {CASES}")

USED = {
    "01-map-full-on-commit",
    "03-second-process-after-resize",
    "05-dupsort-values-are-keys-too",
    "06-same-store-opened-twice",
    "08-killed-readers-keep-slots",
    "10-data-file-cut-short",
    "11-disk-full",
    "13-torn-line-then-append",
}


def load(name: str) -> dict[str, Any]:
    """Return one case."""
    assert name in USED
    loaded: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    return loaded


def test_every_case_is_used() -> None:
    """A case that is added to the collection needs a test here."""
    assert {path.stem for path in CASES.glob("*.json")} == USED


def texts(log: Log, uid: str) -> list[str]:
    """Return the texts of a group's turns."""
    return [
        record.event.text for record in log.groups.fetch(uid).records if isinstance(record.event, TurnSampled)
    ]


def turn(number: int, text: str) -> GroupEvent:
    """Return a turn that says `text`."""
    return msgspec.structs.replace(sampled(number), text=text)


def test_a_map_that_is_full(tmp_path: Path) -> None:
    """What was acknowledged before is there, the refused record is written exactly once when there is room."""
    expected = load("01-map-full-on-commit")["expected"]
    with open_log(tmp_path, create=True, role="rollout", map_size=4 * MIN_MAP_SIZE) as log:
        log.open_run(run_event())
        group = claim(log)
        committed: list[str] = []
        with pytest.raises(LogFull) as full:  # noqa: PT012
            while True:
                text = f"{len(committed)}" * 1000
                log.groups.append_sync(group, [StreamWrite(1, len(committed), [turn(0, text)])])
                committed.append(text)
        assert expected["error"].startswith(f"lmdb.{type(full.value.__cause__).__name__}")
        assert (texts(log, group.uid) == committed) is expected["entries_after_error_equal_committed"]
        assert len(committed) > expected["committed_before"]
    with open_log(tmp_path, role="rollout", map_size=1 << 20) as log:
        group = claim(log)
        log.groups.append_sync(group, [StreamWrite(1, len(committed), [turn(0, text)])])
        assert (texts(log, group.uid) == [*committed, text]) is expected["after_resize_write_ok"]
    assert {finding.kind for finding in verify(tmp_path)} == {"group"}, "of turns that are no chain alone"


def test_a_second_process_after_the_map_grew(tmp_path: Path) -> None:
    """Where one process was given a larger map, the others hear so once, start again, and miss nothing."""
    expected = load("03-second-process-after-resize")["expected"]
    open_log(tmp_path, create=True, role="rollout", map_size=1 << 20).close()
    with open_log(tmp_path, map_size=1 << 20) as log:
        with Child(grow_and_write, tmp_path, 1 << 22) as child:
            uid = child.hear()
            assert child.end() == 0
        with pytest.raises(LogBusy, match="start this process again") as resized:
            log.state()
        assert type(resized.value.__cause__).__name__ in expected["b_outcome"]
    with open_log(tmp_path) as log:
        assert (len(log.groups.fetch(uid).records) != 4) is expected["data_lost"]


def grow_and_write(connection: Connection, run_dir: Path, map_size: int) -> None:
    """Open a log with a larger map, and write half of it full."""
    with open_log(run_dir, role="rollout", map_size=map_size) as log:
        log.open_run(run_event())
        group = claim(log)
        for number in range(4):
            big = sampled(number, tokens=map_size // 64)
            log.groups.append_sync(group, [StreamWrite(1, number, [big])])
        connection.send(group.uid)


def test_no_table_takes_values_for_keys(tmp_path: Path) -> None:
    """A table that sorts its values refuses long ones; none of ours does, so a value may have any length."""
    case = load("05-dupsort-values-are-keys-too")
    with lmdb.open(str(tmp_path / "raw"), max_dbs=1) as env:
        table = env.open_db(b"table", dupsort=True)
        outcomes = [accepts(env, table, size) for size in (511, 512)]
    assert outcomes == [None, case["expected"]["error"].removeprefix("lmdb.")]
    assert [outcome is None for outcome in outcomes] == case["expected"]["ok"]
    with open_run(tmp_path / "run") as log, log._environment.read() as snapshot:
        for each in Table:
            assert not log._environment.tables[each].flags(snapshot._transaction)["dupsort"]


def accepts(env: lmdb.Environment, table: Any, size: int) -> str | None:
    """Return the name of the error that a value of `size` bytes gives, None when it is taken."""
    try:
        with env.begin(write=True) as transaction:
            transaction.put(b"key", bytes(size), db=table)
    except lmdb.Error as exc:
        return type(exc).__name__
    return None


def test_a_log_that_is_opened_twice(tmp_path: Path) -> None:
    """The second open through a symbolic link is refused, the first handle goes on."""
    expected = load("06-same-store-opened-twice")["expected"]
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with open_run(tmp_path / "run") as log:
        with pytest.raises(StoreError, match="already open in this process"):
            open_log(tmp_path / "link", role="rollout")
        closed(log, 1)
        assert (log.state().next_ticket == 1) is expected["first_handle_still_works"]


def hold_a_reader(connection: Connection, run_dir: Path) -> None:
    """Open the log and stay inside a read transaction."""
    with open_log(run_dir) as log, log._environment.read():
        connection.send("reading")
        connection.recv()


def test_readers_that_are_killed(tmp_path: Path) -> None:
    """Their slots stay taken until somebody looks; then all of them are free."""
    expected = load("08-killed-readers-keep-slots")["expected"]
    with open_run(tmp_path) as log:
        env = log._environment
        children = [Child(hold_a_reader, tmp_path) for _ in range(3)]
        for child in children:
            assert child.hear() == "reading"
        for child in children:
            child.kill()
        ours = 1
        listed = len(env._env.readers().splitlines()) - 1 - ours
        assert (listed == 3) is expected["before_check_still_listed"]
        assert env.check_readers() == expected["reader_check_returns"]
        assert len(env._env.readers().splitlines()) - 1 - ours == expected["readers_left"]


def read_all(connection: Connection, folder: Path) -> None:
    """Read an LMDB file without looking at its length first."""
    with lmdb.open(str(folder), readonly=True, max_dbs=8) as env, env.begin() as transaction:
        table = env.open_db(Table.GROUPS.value, transaction)
        connection.send(transaction.stat(table)["entries"])
        connection.send(len(list(transaction.cursor(table))))


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    """LMDB is killed by it; opening the log is an error that says so, and `verify` has a finding."""
    expected = load("10-data-file-cut-short")["expected"]
    with open_run(tmp_path) as log:
        group = claim(log)
        log.groups.append_sync(group, [StreamWrite(1, 0, [turn(0, "x" * 500)] * 200)])
    data = tmp_path / "log" / "data.mdb"
    data.write_bytes(data.read_bytes()[:10_000])
    with Child(read_all, tmp_path / "log") as child:
        signal = -child.end()
    assert f"signal {signal}" in expected["child_exit"]
    with pytest.raises(LogDamaged, match="cut short"):
        open_log(tmp_path)
    assert "damaged" in expected["product_rule"]
    assert [finding.kind for finding in verify(tmp_path)] == ["file"]


SMALL_WRITES = """
import sys
from pathlib import Path
import lmdb
from core.errors import LogFull
from store.ports import StreamWrite
from tests.store.making import claim, open_run, sampled
with open_run(Path(sys.argv[1]) / "run") as log:
    assert not log._environment._env.flags()["writemap"]
    group = claim(log)
    written = 0
    try:
        for written in range(4 << 10):
            log.groups.append_sync(group, [StreamWrite(1, written, [sampled(written, tokens=100)])])
    except LogFull as exc:
        print(type(exc.__cause__).__name__)
    assert len(log.groups.fetch(group.uid).records) == written
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """The file is not written through the map, so a full disk is an error and what was committed is intact."""
    expected = load("11-disk-full")["expected"]
    assert f"lmdb.{on_a_small_disk(tmp_path, SMALL_WRITES, '1m').strip()}" in expected["writemap_false"]


def append_and_die(_: Connection, run_dir: Path, group: Claim, text: str) -> None:
    """Die inside the transaction that appends a record."""
    with open_log(run_dir, role="rollout") as log:
        streams, size = _encode(group.uid, [StreamWrite(1, None, [turn(1, text)])])
        log.write_sync(half_done(_append_job(group, streams)), size)


def test_a_record_that_was_torn(tmp_path: Path) -> None:
    """A record that was not wholly written is not seen, and the one after it is whole and in its place."""
    case = load("13-torn-line-then-append")
    first, torn = base64.b64decode(case["input"]["file_base64"]).split(b"\n")
    third = base64.b64decode(case["input"]["append_record_base64"])
    expected = case["expected"]
    wanted = {line["seq"]: line["text"] for line in (json.loads(first), json.loads(third))}
    with open_run(tmp_path) as log:
        group = claim(log)
        log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])])
        log.groups.append_sync(group, [StreamWrite(1, None, [turn(0, wanted[1])])])
        with Child(append_and_die, tmp_path, group, torn.decode("utf-8", "replace")) as child:
            assert child.end() == -9
        log.groups.append_sync(group, [StreamWrite(1, None, [turn(1, wanted[3])])])
        assert texts(log, group.uid) == [wanted[number] for number in expected["readable_seq_after_append"]]
    with LogChild(tmp_path, "reader") as child:
        assert len(child.do("groups.fetch", group.uid).records) == 3
    assert {finding.kind for finding in verify(tmp_path)} == {"group"}, "of turns that are no chain alone"
