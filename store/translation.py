"""Owns what LMDB's errors mean to a user: their class among ours, and what to do."""

import os
from pathlib import Path

import lmdb

from core.errors import LogBusy, LogDamaged, LogFull, StoreError

MAP_SIZE = "ROLLTAPE_MAP_SIZE"
"""Environment variable: bytes of a new log's map, and the least of an existing one's."""
MAX_READERS = 4096
LOW_SPACE = 1 << 20
"""Bytes free on a disk below which an unexplained write error means that it is full."""

_MEANINGS: tuple[tuple[tuple[type[lmdb.Error], ...], type[StoreError], str], ...] = (
    (
        (lmdb.MapFullError,),
        LogFull,
        (
            f"the map of {{where}} is full ({{map_size}} bytes): it stays readable; stop its processes and "
            f"open it with a larger {MAP_SIZE}, or run `compact`"
        ),
    ),
    (
        (lmdb.DiskError,),
        LogFull,
        "the disk under {where} is full ({text}): free space and go on, nothing acknowledged is lost",
    ),
    (
        (
            lmdb.CorruptedError,
            lmdb.PageNotFoundError,
            lmdb.InvalidError,
            lmdb.CursorFullError,
            lmdb.PanicError,
            lmdb.BadTxnError,  # of what is tried after the first damaged page
        ),
        LogDamaged,
        "the log {where} is damaged ({text}): run `verify`, restore it from a backup or an export",
    ),
    (
        (lmdb.ReadersFullError,),
        LogBusy,
        (
            f"all {MAX_READERS} reader slots of {{where}} are taken: try again in a minute, a process that "
            "writes frees those of killed readers; else stop all its processes"
        ),
    ),
    (
        (lmdb.MapResizedError,),
        LogBusy,
        "another process enlarged the map of {where}: start this process again",
    ),
    (
        (lmdb.MemoryError,),
        StoreError,
        (
            "a map of {map_size} bytes does not fit this process's address space (ulimit -v): create the log "
            f"with a smaller {MAP_SIZE}, or shrink it with `compact --map-size` ({{where}})"
        ),
    ),
    (
        (lmdb.ReadonlyError, lmdb.LockError),
        StoreError,
        "no permission to use {where} ({text}): check owner and mode of the run directory",
    ),
)


def translate(error: lmdb.Error, path: Path, map_size: int) -> StoreError:
    """Return LMDB's error about the log at `path` in our words."""
    where, text = repr(str(path)), str(error)
    for classes, ours, message in _MEANINGS:
        if isinstance(error, classes) or (lmdb.DiskError in classes and disk_is_full(path)):
            return ours(message.format(where=where, text=text, map_size=map_size))
    return StoreError(f"the log {where} failed: {type(error).__name__}: {text}")


def disk_is_full(path: Path) -> bool:
    """Return whether hardly anything is free where `path` lies. LMDB reports some full disks as EIO."""
    free = os.statvfs(path)
    return free.f_bavail * free.f_frsize < LOW_SPACE
