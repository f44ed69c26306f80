"""Owns making a log: whole or not at all, whoever else tries at the same time."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import lmdb

from core.errors import StoreError
from store import disk
from store.keys import Table
from store.translation import MAP_SIZE, MAX_READERS, translate
from store.versions import THIS_RELEASE, VERSIONS_KEY, Versions, pack_versions

DEFAULT_MAP_SIZE = 1 << 40
MIN_MAP_SIZE = 1 << 16
LOG_DIR, DATA_FILE = "log", "data.mdb"


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
        raise translate(exc, folder.parent, map_size) from exc
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
