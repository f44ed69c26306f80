"""Owns the bundle export: one file with the run and every complete group, byte for byte.

Layout: a line that names the format, then frames of u32 length (LE) and MessagePack: the run, the groups in
order of uid, and an end that holds their number and the SHA-256 of all frames before it: a cut file is known.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from core.errors import DataError, StoreError
from core.events import RunOpened
from store import codec
from store.bundle import seal_checked, unseal
from store.exchange import Arrival, Passport, complete_groups, enter_groups, passport_of
from store.log import Log
from store.outfile import writing
from store.records import RawRecord

MAGIC = b"rolltape bundles 1\n"
MAX_FRAME = 1 << 31


class RunFrame(msgspec.Struct, frozen=True, tag="run"):
    """The `run` event as stored."""

    schema: int
    raw: bytes


class GroupFrame(msgspec.Struct, frozen=True, tag="group"):
    """One group: as a bundle, or as records where it cannot be sealed."""

    passport: Passport
    digest: str
    bundle: bytes
    records: tuple[RawRecord, ...] = ()


class EndFrame(msgspec.Struct, frozen=True, tag="end"):
    """What came before."""

    groups: int
    digest: bytes


Frame = RunFrame | GroupFrame | EndFrame

_decode = msgspec.msgpack.Decoder(Frame).decode


def export_bundles(log: Log, path: Path) -> int:
    """Write every complete group of the log to `path`; return how many. Raises StoreError without a run."""
    run = next(log.journal.read(0, 1), None)
    if run is None:
        raise StoreError(f"{str(log.run_dir)!r} holds no run: nothing to export")
    digest, count = hashlib.sha256(), 0
    with writing(path) as file:
        file.write(MAGIC)
        _write(file, RunFrame(log.journal.schema(0), run.raw), digest)
        for row in complete_groups(log):
            records = tuple(log.groups.fetch_raw(row.uid))
            bundle = seal_checked(records)
            frame = GroupFrame(passport_of(row), row.digest, bundle or b"", () if bundle else records)
            _write(file, frame, digest)
            count += 1
        _write(file, EndFrame(count, digest.digest()), digest)
    return count


def import_bundles(log: Log, path: Path) -> int:
    """Enter what `export_bundles` wrote into a fresh log; return how many groups there were.

    Opens the run that the file holds when the log has none yet. Raises DataError on a file that is cut or of
    another format, StoreError when the log is not fresh or a group's digest is not what it was.
    """
    check_file(path)
    frames = read_frames(path)
    run = next(frames)
    if not isinstance(run, RunFrame):
        raise DataError(f"{str(path)!r} does not start with a run")
    event = codec.decode_journal(run.raw, run.schema)
    assert isinstance(event, RunOpened)
    log.open_run(event)
    return enter_groups(log, (_arrival(frame) for frame in frames if isinstance(frame, GroupFrame)))


def check_file(path: Path) -> None:
    """Raise DataError unless the file is whole."""
    digest, count, end = hashlib.sha256(), 0, None
    for frame in read_frames(path, digest):
        end = frame
        count += isinstance(frame, GroupFrame)
    if not isinstance(end, EndFrame) or end.groups != count:
        raise DataError(f"{str(path)!r} is cut short after {count} groups: export again")


def read_frames(
    path: Path, digest: "hashlib._Hash | None" = None
) -> Iterator[RunFrame | GroupFrame | EndFrame]:
    """Yield the frames of a file; raises DataError when it is none, or damaged."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DataError(
                f"{str(path)!r} is not a bundle export of this format ({MAGIC.decode().strip()!r})"
            )
        while head := file.read(4):
            size = int.from_bytes(head, "little")
            body = file.read(size) if size < MAX_FRAME else b""
            if len(head) != 4 or len(body) != size:
                raise DataError(f"{str(path)!r} is cut short at byte {file.tell()}: export again")
            try:
                frame = _decode(body)
            except codec.NOT_READABLE as exc:
                raise DataError(f"{str(path)!r} is damaged before byte {file.tell()}: {exc}") from exc
            if digest is not None:
                if isinstance(frame, EndFrame) and frame.digest != digest.digest():
                    raise DataError(f"{str(path)!r} is damaged: its SHA-256 is not what its end says")
                digest.update(head + body)
            yield frame


def _write(file: BinaryIO, frame: Frame, digest: "hashlib._Hash") -> None:
    body = msgspec.msgpack.encode(frame)
    framed = len(body).to_bytes(4, "little") + body
    digest.update(framed)
    file.write(framed)


def _arrival(frame: GroupFrame) -> Arrival:
    records = tuple(unseal(frame.bundle)) if frame.bundle else frame.records
    return Arrival(passport=frame.passport, records=records, digest=frame.digest)
