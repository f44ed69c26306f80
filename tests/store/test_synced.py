"""An acknowledged append is on disk, not only in the page cache: shown on the writer's own system calls.

`strace` records what a writer process wrote and synced, and when it acknowledged. From that the file is
rebuilt as the disk must hold it at each acknowledgement, were the power cut then, and every event that was
acknowledged is looked for in it. The same recording with syncing off must fail, or the test shows nothing.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from core.errors import StoreError
from store.log import Log, open_log
from store.ports import StreamWrite
from tests.store.children import ROOT
from tests.store.making import chain, claim, closed, open_run

WRITERS, APPENDS = 4, 6
CALLS = "openat,lseek,pwrite64,pwritev,pwritev2,write,writev,fdatasync,fsync,sync_file_range,msync"


async def acknowledge(log: Log) -> None:
    """Append from several coroutines at once, and say after each return what is acknowledged."""

    async def one(number: int) -> None:
        group = claims[number]
        for position in range(APPENDS):
            event = chain(number)[position]
            await log.groups.append(group, [StreamWrite(1, position, [event])])
            os.write(1, f"ACK {group.uid} {position}\n".encode())

    claims = [claim(log) for _ in range(WRITERS)]
    for group in claims:
        os.write(1, f"ACK {group.uid} -1\n".encode())
    await asyncio.gather(*(one(number) for number in range(WRITERS)))


def main(run_dir: str, sync: str) -> None:
    """Run as a program under strace."""
    with open_log(Path(run_dir), role="rollout", sync=sync == "on") as log:
        asyncio.run(acknowledge(log))
        closed(log, 1)


class Written(NamedTuple):
    """Bytes at a place of the file; `synced` where the call returns only when they are on disk."""

    offset: int
    content: bytes
    synced: bool


class Synced(NamedTuple):
    """All that was written before is on disk."""


class Acknowledged(NamedTuple):
    """The program was told that an append is on disk."""

    uid: str
    position: int


Moment = Written | Synced | Acknowledged
_HEX = r'"((?:\\x[0-9a-f]{2})*)"'
_CALL = re.compile(r"^(\w+)\((.*)\) += (-?\d+)")
_UNFINISHED = re.compile(r"^(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(.*)$")


def calls(trace: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (name, arguments, result) of each call in the order of their ends."""
    begun: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if cut := _UNFINISHED.match(rest):
            begun[pid] = cut[1]
            continue
        if resumed := _RESUMED.match(rest):
            rest = begun.pop(pid) + resumed[1]
        if found := _CALL.match(rest):
            yield found[1], found[2], int(found[3])


def plain(escaped: str) -> bytes:
    """Return the bytes of strace's hexadecimal text."""
    return bytes.fromhex(escaped.replace("\\x", ""))


class Files:
    """The descriptors through which the log's file was written."""

    def __init__(self, data: Path) -> None:
        self._data = str(data)
        self._dsync: dict[str, bool] = {}
        self._place: dict[str, int] = {}

    def see(self, name: str, arguments: str, result: int) -> Moment | None:
        """Return what a successful call did to the file, if anything."""
        descriptor = arguments.partition(",")[0]
        if name == "openat":
            self._dsync.pop(str(result), None)
            if text_of(arguments) == self._data:
                self._dsync[str(result)] = "O_DSYNC" in arguments or "O_SYNC" in arguments
        elif descriptor in self._dsync:
            if name == "lseek":
                self._place[descriptor] = result
            elif name in {"fdatasync", "fsync"}:
                return Synced()
            else:
                return self._written(name, arguments, result, descriptor)
        return None

    def _written(self, name: str, arguments: str, result: int, descriptor: str) -> Written:
        content = b"".join(plain(part) for part in re.findall(_HEX, arguments))[:result]
        if name in {"write", "writev"}:
            offset = self._place[descriptor]
            self._place[descriptor] += result
        else:
            assert name in {"pwrite64", "pwritev"}, f"a call that this test does not understand: {name}"
            offset = int(re.findall(r", (\d+)", arguments)[-1])
        return Written(offset, content, self._dsync[descriptor])


def text_of(arguments: str) -> str:
    """Return the first quoted text of a call."""
    found = re.search(_HEX, arguments)
    return plain(found[1]).decode() if found else ""


def moments(trace: Path, data: Path) -> Iterator[Moment]:
    """Yield what happened to the file `data`, and the acknowledgements, in order."""
    files = Files(data)
    for name, arguments, result in calls(trace):
        if result < 0:
            continue
        if name == "write" and arguments.startswith("1,"):
            for line in text_of(arguments).splitlines():
                if line.startswith("ACK "):
                    _, uid, position = line.split()
                    yield Acknowledged(uid, int(position))
        elif (moment := files.see(name, arguments, result)) is not None:
            yield moment


def disk_states(start: bytes, history: Iterator[Moment]) -> Iterator[tuple[bytes, list[Acknowledged]]]:
    """Yield, at each acknowledgement, what the disk must hold and what was acknowledged by then."""
    disk, pending, acks = bytearray(start), list[Written](), list[Acknowledged]()
    for moment in history:
        match moment:
            case Written(synced=True):
                put(disk, moment)
            case Written():
                pending.append(moment)
            case Synced():
                for written in pending:
                    put(disk, written)
                pending.clear()
            case Acknowledged():
                acks.append(moment)
                yield bytes(disk), list(acks)


def put(disk: bytearray, written: Written) -> None:
    """Apply a write."""
    end = written.offset + len(written.content)
    disk.extend(bytes(max(0, end - len(disk))))
    disk[written.offset : end] = written.content


def missing(content: bytes, acks: list[Acknowledged], place: Path) -> list[Acknowledged]:
    """Return what was acknowledged and is not in a log with this content."""
    (place / "log").mkdir(parents=True)
    (place / "log" / "data.mdb").write_bytes(content)
    lost: list[Acknowledged] = []
    with open_log(place, readonly=True) as log:
        for ack in acks:
            try:
                records = log.groups.fetch(ack.uid).records
            except StoreError:
                lost.append(ack)
                continue
            if ack.position >= 0 and ack.position not in {record.index for record in records}:
                lost.append(ack)
    return lost


def record(tmp_path: Path, sync: str) -> tuple[bytes, Iterator[Moment]]:
    """Run the program under strace; return the file before it and what happened."""
    if not shutil.which("strace"):
        pytest.skip("needs strace (apt-get install strace)")
    run_dir, trace = tmp_path / "run", tmp_path / "trace"
    open_run(run_dir).close()
    data = run_dir / "log" / "data.mdb"
    start = data.read_bytes()
    program = f"from tests.store.test_synced import main; main({str(run_dir)!r}, {sync!r})"
    done = subprocess.run(
        [
            "strace",
            "-f",
            "-qq",
            "-xx",
            "-s",
            "10000000",
            "-e",
            f"trace={CALLS}",
            "-o",
            trace,
            sys.executable,
            "-c",
            program,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("strace may not trace here (ptrace is not permitted)")
    assert done.returncode == 0, done.stderr
    return start, moments(trace, data)


def test_what_is_acknowledged_is_on_disk(tmp_path: Path) -> None:
    """At every acknowledgement, the synced bytes alone hold every acknowledged event."""
    start, history = record(tmp_path, "on")
    count = 0
    for number, (content, acks) in enumerate(disk_states(start, history)):
        assert missing(content, acks, tmp_path / f"disk{number}") == []
        count = len(acks)
    assert count == WRITERS * (APPENDS + 1)


def test_with_syncing_off_the_same_test_fails(tmp_path: Path) -> None:
    """Else it would show nothing."""
    start, history = record(tmp_path, "off")
    lost = [
        missing(content, acks, tmp_path / f"disk{number}")
        for number, (content, acks) in enumerate(disk_states(start, history))
    ]
    assert len(lost) == WRITERS * (APPENDS + 1)
    assert all(lost)
