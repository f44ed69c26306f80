"""Owns copies of a whole log: a backup while it is in use, and compaction, which replaces it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from core.errors import LogDamaged, StoreError
from store import codec, creating, disk, keys
from store.creating import DATA_FILE, LOG_DIR
from store.environment import Environment
from store.keys import Table
from store.locks import LOCKS_DIR, OPENED, Locks, hold_open
from store.ports import GroupFate
from store.rows import FATES
from store.sealing import load, seal_changes, seal_group
from store.snapshot import Rows, Snapshot
from store.views import decode_group

TEMPORARY = ".compact-"
"""How the names of the directories begin in which a compaction works."""
COPY_BYTES = 32 << 20
"""What one transaction of a compaction writes at most."""


class Compaction(NamedTuple):
    """Bytes of the log's file before and after."""

    before: int
    after: int


def backup(run_dir: Path, target: Path) -> Path:
    """Write a consistent copy of the log into the new directory `target`, while the log may be in use.

    The copy is a run directory of its own, with the log alone, as it was at one moment. While it is written,
    pages that others free cannot be used again. Raises StoreError when there is no log, or `target` is not
    empty.
    """
    _expect_log(run_dir)
    if target.exists() and any(target.iterdir()):
        raise StoreError(f"the backup directory {str(target)!r} is not empty: name a new one")
    locks = hold_open(run_dir, readonly=True)
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".log-", dir=target))
        try:
            _copy_file(run_dir / LOG_DIR, temporary)
            (temporary / DATA_FILE).chmod(0o600)
            _sync_file(temporary / DATA_FILE)
            creating.rename_directory(temporary, target / LOG_DIR)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    finally:
        locks.release_all()
    return target


def compact(run_dir: Path, *, map_size: int | None = None) -> Compaction:
    """Replace the log's file by one without free space, with groups that ended unsealed sealed.

    `map_size` (bytes) is the new file's, also a smaller one; None keeps the old. Raises LogBusy while anybody
    has the log open, StoreError when there is none. The new file is compared with the old before it takes its
    place, in one rename.
    """
    _expect_log(run_dir)
    folder = run_dir / LOG_DIR
    data = folder / DATA_FILE
    locks = Locks(run_dir / LOCKS_DIR)
    locks.take(OPENED)
    for left in run_dir.glob(f"{TEMPORARY}*"):  # by one that was killed: no other can be at work
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=run_dir))
    try:
        before = data.stat().st_size
        creating.create(temporary, map_size or disk.read_meta(data).map_size)
        source = Environment(folder, readonly=False, map_size=None, sync=True)
        try:
            _seal_the_rest(source)
            _copy_all(source, temporary / LOG_DIR)
        finally:
            source.close()
        _sync_file(temporary / LOG_DIR / DATA_FILE)
        # The reader table belongs to the old file: its transaction numbers mean nothing in the new one.
        (folder / "lock.mdb").unlink(missing_ok=True)
        (temporary / LOG_DIR / DATA_FILE).replace(data)
        creating.sync_directory(folder)
        return Compaction(before, data.stat().st_size)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        locks.release(OPENED)


def _expect_log(run_dir: Path) -> None:
    if not (run_dir / LOG_DIR / DATA_FILE).is_file():
        raise StoreError(f"no log in {str(run_dir)!r}: create the run first (`rollout` or `learn`)")


def _seal_the_rest(source: Environment) -> None:
    """Seal ended groups whose records stand alone: the learner ended them, or an older release."""
    with source.read() as snapshot:
        prefixes = list(_unsealed(snapshot))
    for prefix in prefixes:
        with source.read() as snapshot:
            sealed = seal_group(load(snapshot, prefix).records())
        with source.write() as snapshot:
            snapshot.put(seal_changes(snapshot, prefix, sealed) or ())


def _unsealed(snapshot: Snapshot) -> Iterator[bytes]:
    """Yield the key prefixes of ended groups that have single records."""
    found = snapshot.first(Table.GROUPS, b"")
    while found is not None:
        prefix = found[0][:10]
        row = keys.GROUP_VIEW + prefix
        value = snapshot.get(Table.VIEWS, row)
        if value is not None:
            entry = decode_group(codec.unpack(Table.VIEWS, row, value).body)
            if FATES[entry.fate] is not GroupFate.OPEN:
                yield prefix
        found = snapshot.first(Table.GROUPS, keys.after(prefix))


def _copy_all(source: Environment, folder: Path) -> None:
    """Copy every entry, checked, in key order, so that pages come out full."""
    target = Environment(folder, readonly=False, map_size=None, sync=False)
    try:
        with source.read() as snapshot:
            for table in Table:
                for batch in _batches(snapshot, table):
                    with target.write() as copy:
                        # A new log has its versions already, and nothing else.
                        copy.put([batch]) if table is Table.META else copy.append(batch)
        with source.read() as old, target.read() as new:
            for table in Table:
                if old.count(table) != new.count(table):
                    raise LogDamaged(
                        f"table {table.value.decode()!r} has {old.count(table)} entries, {new.count(table)} "
                        "could be copied: run `verify`; the log is as it was"
                    )
        target.sync()
    finally:
        target.close()


def _batches(snapshot: Snapshot, table: Table) -> Iterator[Rows]:
    batch: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in snapshot.scan(table):
        codec.unpack(table, key, value)
        batch.append((key, value))
        size += len(value)
        if size > COPY_BYTES:
            yield Rows(table, batch)
            batch, size = [], 0
    yield Rows(table, batch)


def _copy_file(folder: Path, target: Path) -> None:
    source = Environment(folder, readonly=True, map_size=None, sync=True)
    try:
        source.copy(target)
    finally:
        source.close()


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
