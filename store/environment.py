"""Owns LMDB: opening and creating the one environment of a log, its transactions, its errors in our words.

One environment per path per process; no transaction outlives a `with` block of this package or crosses user
code; nothing is used after a fork. The map is large, sparse and the same in every process.
"""

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import lmdb
import msgspec

from core.errors import LogDamaged, LogForeign, LogTooNew, StoreError
from store import codec, disk
from store.creating import DATA_FILE, requested_map_size
from store.keys import Table
from store.probe import survives_reading
from store.snapshot import Snapshot, Tables
from store.translation import MAX_READERS, translate
from store.versions import THIS_RELEASE, VERSIONS_KEY, Versions

MIN_AHEAD, MAX_AHEAD, AHEAD_SHARE = 1 << 16, 1 << 20, 16
"""Bytes that the file is kept longer than its pages: a share of them, within bounds."""

_opened: dict[tuple[int, int], str] = {}
_opened_guard = threading.Lock()


class _Transaction:
    """`with` block around one transaction; LMDB's errors leave it in our words."""

    def __init__(self, environment: "Environment", *, write: bool) -> None:
        self._environment = environment
        self._write = write

    def __enter__(self) -> Snapshot:
        self._transaction = self._environment.begin(write=self._write)
        return Snapshot(self._transaction, self._environment.tables)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._write:
                self._transaction.commit()
            else:
                self._transaction.abort()
        except lmdb.Error as exc:
            raise self._environment.translate(exc) from exc
        finally:
            self._environment.ended()
        if isinstance(error, lmdb.Error):
            raise self._environment.translate(error) from error


class Environment:
    """The open environment of one log directory."""

    def __init__(self, path: Path, *, readonly: bool, map_size: int | None, sync: bool) -> None:
        self.path = path
        self.readonly = readonly
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._idle = threading.Condition(self._guard)
        self._active = 0
        """Transactions that are under way; closing under one would be a crash."""
        self._closed = False
        self._file: BinaryIO | None = None
        self._identity = _claim_path(path)
        try:
            self.map_size = _checked_map_size(path, map_size)
            self._env = self._open(sync=sync)
            self._page_size = int(self._env.stat()["psize"])
        except BaseException:
            _release_path(self._identity)
            raise
        try:
            self.tables: Tables = self._open_tables()
            self.versions = self.check_versions()
            self._env.reader_check()
            if sync and not readonly:
                self._file = (path / DATA_FILE).open("r+b", buffering=0)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        mode = "readonly" if self.readonly else "writable"
        return f"<Environment {str(self.path)!r} {mode} map={self.map_size}>"

    def _open(self, *, sync: bool) -> "lmdb.Environment":
        try:
            return lmdb.open(
                str(self.path),
                map_size=self.map_size,
                readonly=self.readonly,
                create=False,
                mode=0o600,
                sync=sync,
                metasync=sync,
                max_readers=MAX_READERS,
                max_dbs=len(Table),
                max_spare_txns=8,
            )
        except lmdb.Error as exc:
            raise self.translate(exc) from exc

    def _open_tables(self) -> Tables:
        try:
            return {table: self._env.open_db(table.value, create=False) for table in Table}
        except lmdb.NotFoundError as exc:
            raise LogForeign(f"an LMDB file, but not a Rolltape log: {str(self.path)!r}") from exc
        except lmdb.Error as exc:
            raise self.translate(exc) from exc

    def check_process(self) -> None:
        """Raise StoreError in a forked child."""
        if os.getpid() != self._pid:
            raise StoreError(
                f"the log {str(self.path)!r} was opened by process {self._pid} and cannot be used after a "
                f"fork (here {os.getpid()}): start processes with the spawn method, open the log in each"
            )

    def begin(self, *, write: bool) -> "lmdb.Transaction":
        """Return a new transaction; the caller ends it on the same thread and then calls `ended`."""
        self.check_process()
        with self._guard:
            if self._closed:
                raise StoreError(f"the log {str(self.path)!r} is closed")
            self._active += 1
        try:
            return self._begin(write=write)
        except lmdb.Error as exc:
            self.ended()
            raise self.translate(exc) from exc

    def ended(self) -> None:
        """Count a transaction as over."""
        with self._guard:
            self._active -= 1
            if self._closed:
                self._idle.notify()

    def _begin(self, *, write: bool) -> "lmdb.Transaction":
        try:
            return self._env.begin(write=write)
        except lmdb.ReadersFullError:
            self._env.reader_check()
        return self._env.begin(write=write)

    def read(self) -> _Transaction:
        """Return a `with` block in which the log stands still; keep it short."""
        return _Transaction(self, write=False)

    def write(self) -> _Transaction:
        """Return a `with` block whose changes are committed and synced when it ends without an error."""
        if self.readonly:
            raise StoreError(f"the log {str(self.path)!r} was opened read-only: open it with a writing role")
        return _Transaction(self, write=True)

    def make_room(self) -> None:
        """Write zeros behind the file's end when it is near; only inside a write transaction.

        Pages written into blocks that the file has already cost a flush; pages that make it longer cost the
        file system's own commit as well. A file that cannot be made longer is left for LMDB to complain of.
        """
        if self._file is None:
            return
        # What lies beyond the last page is nobody's while this transaction keeps all other writers out.
        used = (self._env.info()["last_pgno"] + 1) * self._page_size
        ahead = min(max(used // AHEAD_SHARE, MIN_AHEAD), MAX_AHEAD)
        end = os.fstat(self._file.fileno()).st_size
        if end - used < ahead // 2 and used + ahead <= self.map_size:
            with contextlib.suppress(OSError):
                os.pwrite(self._file.fileno(), bytes(used + ahead - max(end, used)), max(end, used))

    def check_versions(self, snapshot: Snapshot | None = None) -> Versions:
        """Return the stored versions; raises LogTooNew when a newer release wrote the log."""
        if snapshot is None:
            with self.read() as fresh:
                return self.check_versions(fresh)
        value = snapshot.get(Table.META, VERSIONS_KEY)
        if value is None:
            raise LogForeign(f"an LMDB file, but not a Rolltape log: {str(self.path)!r}")
        body = codec.unpack(Table.META, VERSIONS_KEY, value).body
        versions = msgspec.msgpack.decode(body, type=Versions)
        ours = THIS_RELEASE
        if versions.format > ours.format or versions.schema > ours.schema:
            raise LogTooNew(
                f"{str(self.path)!r} was written by a newer release ({versions}, this one knows {ours})"
            )
        if versions.projections > ours.projections:
            raise LogTooNew(
                f"{str(self.path)!r} has views of a newer release ({versions}, this one knows {ours})"
            )
        return versions

    def check_readers(self) -> int:
        """Free the slots of readers that died; return how many."""
        return int(self._env.reader_check())

    def copy(self, target: Path) -> None:
        """Write a consistent copy without free pages into `target` while the log is in use."""
        try:
            self._env.copy(str(target), compact=True)
        except lmdb.Error as exc:
            raise self.translate(exc) from exc

    def sync(self) -> None:
        """Flush what was written with sync=False."""
        self._env.sync(force=True)

    def close(self) -> None:
        """Close once other threads' transactions are over; in a forked child only forget it."""
        if os.getpid() != self._pid:
            return
        with self._idle:
            if self._closed:
                return
            self._closed = True
            while self._active:
                self._idle.wait()
        if self._file is not None:
            self._file.close()
        self._env.close()
        _release_path(self._identity)

    def translate(self, error: lmdb.Error) -> StoreError:
        """Return LMDB's error in our words."""
        return translate(error, self.path, self.map_size)


def _checked_map_size(path: Path, argument: int | None) -> int:
    disk.check_filesystem(path)
    data = path / DATA_FILE
    meta = disk.read_meta(data)
    if disk.missing_bytes(data, meta) and not survives_reading(path):
        raise LogDamaged(
            f"the log's file is cut short: {str(data)!r} has {data.stat().st_size} bytes, its header expects "
            f"{(meta.last_page + 1) * meta.page_size}; restore it from a backup or an export"
        )
    return max(meta.map_size, requested_map_size(argument) or 0)


def _claim_path(path: Path) -> tuple[int, int]:
    stat = path.stat()
    identity = (stat.st_dev, stat.st_ino)
    with _opened_guard:
        if identity in _opened:
            raise StoreError(
                f"the log {str(path)!r} is already open in this process (as {_opened[identity]!r}): use that "
                "Log object, LMDB breaks when a process opens one file twice"
            )
        _opened[identity] = str(path)
    return identity


def _release_path(identity: tuple[int, int]) -> None:
    with _opened_guard:
        _opened.pop(identity, None)
