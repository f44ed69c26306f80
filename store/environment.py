"""Owns LMDB: opening and creating the one environment of a log, its transactions, its errors in our words.

One environment per path per process; no transaction outlives a `with` block of this package or crosses user
code; nothing is used after a fork. The map is large, sparse and the same in every process.
"""

import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from types import TracebackType

import lmdb
import msgspec

from core.errors import LogDamaged, LogForeign, LogTooNew, StoreError
from core.events import SCHEMA_VERSION
from store import codec, disk
from store.keys import Table
from store.probe import survives_reading
from store.projections import PROJECTION_VERSION
from store.snapshot import Snapshot, Tables
from store.translation import MAP_SIZE, MAX_READERS, translate

FORMAT_VERSION = 1
"""Of keys, values and bundles. A change of any of them that an older release would misread raises it."""

DEFAULT_MAP_SIZE = 1 << 40
MIN_MAP_SIZE = 1 << 16
LOG_DIR, DATA_FILE = "log", "data.mdb"
VERSIONS_KEY = b"versions"

_opened: dict[tuple[int, int], str] = {}
_opened_guard = threading.Lock()


class Versions(msgspec.Struct, frozen=True):
    """What a log says of itself; stored under VERSIONS_KEY."""

    format: int = FORMAT_VERSION
    schema: int = SCHEMA_VERSION
    projections: int = PROJECTION_VERSION


THIS_RELEASE = Versions()


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
        if isinstance(error, lmdb.Error):
            raise self._environment.translate(error) from error


class Environment:
    """The open environment of one log directory."""

    def __init__(self, path: Path, *, readonly: bool, map_size: int | None, sync: bool) -> None:
        self.path = path
        self.readonly = readonly
        self._pid = os.getpid()
        self._identity = _claim_path(path)
        try:
            self.map_size = _checked_map_size(path, map_size)
            self._env = self._open(sync=sync)
        except BaseException:
            _release_path(self._identity)
            raise
        try:
            self.tables: Tables = self._open_tables()
            self.versions = self.check_versions()
            self._env.reader_check()
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
        """Return a new transaction; the caller ends it on the same thread."""
        self.check_process()
        try:
            return self._env.begin(write=write)
        except lmdb.ReadersFullError:
            self._env.reader_check()
        except lmdb.Error as exc:
            raise self.translate(exc) from exc
        try:
            return self._env.begin(write=write)
        except lmdb.Error as exc:
            raise self.translate(exc) from exc

    def read(self) -> _Transaction:
        """Return a `with` block in which the log stands still; keep it short."""
        return _Transaction(self, write=False)

    def write(self) -> _Transaction:
        """Return a `with` block whose changes are committed and synced when it ends without an error."""
        if self.readonly:
            raise StoreError(f"the log {str(self.path)!r} was opened read-only: open it with a writing role")
        return _Transaction(self, write=True)

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
        """Close the environment; in a forked child only forget it."""
        if os.getpid() == self._pid:
            self._env.close()
            _release_path(self._identity)

    def translate(self, error: lmdb.Error) -> StoreError:
        """Return LMDB's error in our words."""
        return translate(error, self.path, self.map_size)


def requested_map_size(argument: int | None) -> int | None:
    """Return the map size asked for by argument or environment variable; raises StoreError on a bad one."""
    text = os.environ.get(MAP_SIZE, "") if argument is None else str(argument)
    if not text:
        return None
    if not text.isdecimal() or not MIN_MAP_SIZE <= int(text) < 1 << 47:
        raise StoreError(f"{MAP_SIZE} is {text!r}, expected bytes between {MIN_MAP_SIZE} and 2^47 - 1")
    return int(text) // 4096 * 4096


def create(run_dir: Path, map_size: int | None, versions: Versions = THIS_RELEASE) -> None:
    """Create an empty log in `run_dir`, whole or not at all; another process may win."""
    disk.check_filesystem(run_dir)
    temporary = Path(tempfile.mkdtemp(prefix=".log-", dir=run_dir))
    try:
        _create_in(temporary, requested_map_size(map_size) or DEFAULT_MAP_SIZE, versions)
        with contextlib.suppress(FileExistsError):
            rename_directory(temporary, run_dir / LOG_DIR)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def pack_versions(versions: Versions = THIS_RELEASE) -> bytes:
    """Return the stored form of a log's versions, by default this release's."""
    return codec.pack(Table.META, VERSIONS_KEY, msgspec.msgpack.encode(versions))


def _create_in(folder: Path, map_size: int, versions: Versions) -> None:
    value = pack_versions(versions)
    try:
        with lmdb.open(
            str(folder), map_size=map_size, mode=0o600, max_dbs=len(Table), max_readers=MAX_READERS
        ) as env:
            tables = {table: env.open_db(table.value) for table in Table}
            with env.begin(write=True) as transaction:
                transaction.put(VERSIONS_KEY, value, db=tables[Table.META])
    except lmdb.Error as exc:
        raise StoreError(f"cannot create a log in {str(folder)!r}: {exc}") from exc
    (folder / "lock.mdb").unlink()


def rename_directory(source: Path, target: Path) -> None:
    """Give a finished directory its name, for good; raises FileExistsError when another was first."""
    try:
        source.rename(target)
    except OSError as exc:
        if target.is_dir():
            raise FileExistsError(str(target)) from exc
        raise
    sync_directory(target.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
