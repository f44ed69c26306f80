"""`verify` on good logs, and on logs that were damaged bit by bit, cut short, or made to contradict themselves."""

import contextlib
import hashlib
import io
import random
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from core.errors import LogForeign, StoreError
from core.events import GroupAborted
from store import codec, disk, keys
from store.environment import Environment
from store.findings import Report
from store.keys import Table
from store.log import open_log
from store.verify import verify
from store.verifying import check_log
from tests.store.children import Child
from tests.store.faults import change, entries
from tests.store.making import claim, closed, fill, open_run, trained


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a log with open, closed, trained and aborted groups, and its head."""
    run_dir = tmp_path_factory.mktemp("good") / "run"
    with open_run(run_dir) as log:
        for step in range(3):
            trained(log, step)
        closed(log, 2)
        fill(log, claim(log))
        aborted = claim(log)
        fill(log, aborted)
        log.journal.append_sync([GroupAborted(uid=aborted.uid, reason="run_ended", final=True)])
        log.cache_put(b"key", b"value")
        log.journal.wait_sync(10_000, 0.0)
        head = log.journal.head()
    return run_dir, head


@pytest.fixture
def copy(good: tuple[Path, str], tmp_path: Path) -> Path:
    """Return a copy of the good log's file that a test may damage."""
    shutil.copytree(good[0], tmp_path / "run")
    return tmp_path / "run" / "log" / "data.mdb"


def test_a_good_log_has_no_findings(good: tuple[Path, str]) -> None:
    """Nothing is found, with and without the head, while the log is open and after."""
    run_dir, head = good
    assert verify(run_dir, head) == []
    with open_log(run_dir):
        assert verify(run_dir) == []


def test_a_lost_tail_is_found_by_its_head(good: tuple[Path, str]) -> None:
    """A hash that is not in the chain is a finding."""
    assert [finding.kind for finding in verify(good[0], "0" * 64)] == ["journal"]


def serve_judge(connection: Connection, data: Path, head: str) -> None:
    """For each content sent, write it as the file; answer with the findings, or a digest of what is read."""
    with contextlib.redirect_stderr(None):
        while True:
            data.write_bytes(connection.recv_bytes())
            stream = io.StringIO()
            report = Report(stream)
            try:
                check_log(data.parent, head, report)
            except Exception as exc:  # noqa: BLE001 `verify` tells of it as of a killed child
                report.fail(exc)
                report.count += 1
            connection.send((stream.getvalue(), b"") if report.count else ("", digest_of_all(data)))


def digest_of_all(data: Path) -> bytes:
    """Return a digest of every entry, read in order and looked up."""
    digest = hashlib.sha256()
    environment = Environment(data.parent, readonly=True, map_size=None, sync=True)
    with environment.read() as snapshot:
        for table in Table:
            for key, value in snapshot.scan(table):
                digest.update(b"%d %d " % (len(key), len(value)) + key + value)
                assert snapshot.get(table, key) == value
    environment.close()
    return digest.digest()


class Judge:
    """A child that judges file contents; a new one takes over when one of them kills it."""

    def __init__(self, data: Path, head: str) -> None:
        self._start = (serve_judge, data, head)
        self._child = Child(*self._start)
        self.original = self.of(data.read_bytes())
        self.counts = {"found": 0, "killed": 0, "harmless": 0}

    def of(self, content: bytes) -> tuple[str, bytes] | None:
        """Return findings and digest, None when the content killed the child."""
        try:
            self._child.say_bytes(content)
            answer: tuple[str, bytes] = self._child.hear()
        except (EOFError, ConnectionError):
            self._child.kill()
            self._child = Child(*self._start)
            return None
        return answer

    def must_notice(self, content: bytes, what: str) -> None:
        """Fail when a damage is not found and yet changes what is read."""
        answer = self.of(content)
        if answer is None:
            self.counts["killed"] += 1
        elif answer[0]:
            self.counts["found"] += 1
        else:
            assert answer == self.original, f"{what} changed what is read, unnoticed"
            self.counts["harmless"] += 1

    def close(self) -> None:
        """End the child."""
        self._child.kill()


def flip_bits(data: Path, head: str, flips: int, seed: int) -> dict[str, int]:
    """Flip one bit at a time; return how many were found, killed the reader, or changed nothing."""
    draw, content, meta = random.Random(seed), bytearray(data.read_bytes()), disk.read_meta(data)
    pages = (meta.last_page + 1) * meta.page_size  # zeros behind them keep room
    judge = Judge(data, head)
    for _ in range(flips):
        position, bit = draw.randrange(pages), 1 << draw.randrange(8)
        content[position] ^= bit
        judge.must_notice(bytes(content), f"bit {bit} of byte {position}")
        content[position] ^= bit
    judge.close()
    return judge.counts


def cut_short(data: Path, head: str, cuts: int, seed: int) -> dict[str, int]:
    """Cut the file at random places."""
    draw, content, meta = random.Random(seed), data.read_bytes(), disk.read_meta(data)
    pages = (meta.last_page + 1) * meta.page_size
    judge = Judge(data, head)
    for _ in range(cuts):
        size = draw.randrange(pages)
        judge.must_notice(content[:size], f"cutting to {size} bytes")
    judge.close()
    return judge.counts


def test_flipped_bits_are_found(copy: Path, good: tuple[Path, str]) -> None:
    """A single flipped bit is found, or changes nothing that can be read."""
    assert flip_bits(copy, good[1], 60, 1)["found"] > 10


def test_cuts_are_found(copy: Path, good: tuple[Path, str]) -> None:
    """A file cut short is found, or lacks nothing that is used."""
    assert cut_short(copy, good[1], 20, 2)["found"] > 10


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_many_flips_and_cuts_are_found(copy: Path, good: tuple[Path, str]) -> None:
    """500 flips and 100 cuts."""
    content = copy.read_bytes()
    assert sum(flip_bits(copy, good[1], 500, 3).values()) == 500
    copy.write_bytes(content)
    assert sum(cut_short(copy, good[1], 100, 4).values()) == 100


@pytest.mark.parametrize("table", [Table.JOURNAL, Table.GROUPS, Table.BUNDLES, Table.VIEWS])
def test_a_missing_entry_is_found(copy: Path, good: tuple[Path, str], table: Table) -> None:
    """A deleted record, bundle or view row is a finding."""
    found = list(entries(copy, table))
    change(copy, table, {found[len(found) // 2][0]: None})
    assert verify(copy.parent.parent, good[1])


def test_a_record_moved_to_another_key_is_found(copy: Path) -> None:
    """The checksum covers the key."""
    (key, value), *_ = entries(copy, Table.GROUPS)
    change(copy, Table.GROUPS, {key[:-1] + b"\x77": value})
    assert "checksum" in " ".join(finding.message for finding in verify(copy.parent.parent))


def test_a_replaced_record_with_a_right_checksum_breaks_the_chain(copy: Path) -> None:
    """Rewriting one journal record is found by the one after it."""
    records = list(entries(copy, Table.JOURNAL))
    key, value = records[3]
    _, other = records[4]
    forged = codec.pack(Table.JOURNAL, key, codec.unpack(Table.JOURNAL, records[4][0], other).body)
    assert forged != value
    change(copy, Table.JOURNAL, {key: forged})
    messages = " ".join(finding.message for finding in verify(copy.parent.parent))
    assert "the chain is broken" in messages


def test_records_of_a_group_that_was_never_opened_are_found(copy: Path) -> None:
    """Every record belongs to a group that the journal knows."""
    (key, value), *_ = entries(copy, Table.GROUPS)
    stray = keys.group_prefix("000999.0") + key[10:]
    body = codec.unpack(Table.GROUPS, key, value).body
    change(copy, Table.GROUPS, {stray: codec.pack(Table.GROUPS, stray, body)})
    assert [(finding.key, finding.kind) for finding in verify(copy.parent.parent)] == [("000999.0", "group")]


def test_what_is_not_there_or_not_ours_is_an_error(tmp_path: Path) -> None:
    """No log, or another program's file: an error, not a finding."""
    with pytest.raises(StoreError, match="no log"):
        verify(tmp_path)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "data.mdb").write_bytes(b"SQLite format 3\x00" * 1000)
    with pytest.raises(LogForeign, match="not a Rolltape log"):
        verify(tmp_path)
