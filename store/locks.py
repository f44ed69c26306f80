"""Owns `locks/<id>`: an exclusive flock that a worker or the learner holds for life.

Dead means that the lock can be taken (or its file is gone): no heartbeats, no clock. The kernel frees a lock
with its process, however that ends. Ids of workers are never used twice, so a dead one's file is deleted by
whoever finds it. Valid on one machine in one PID namespace.
"""

import fcntl
import os
import re
import weakref
from pathlib import Path
from time import sleep

from core.errors import LogBusy, StoreError

LOCKS_DIR = "locks"
LEARNER = "learner"
OPENED = "opened"
"""Held shared by every process that has the log open, exclusively by what replaces its file."""

PROBES, PROBE_SECONDS = 10, 0.01
"""Whoever asks whether a holder lives takes the lock for an instant, so a refusal counts only if it lasts."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def hold_open(run_dir: Path, *, readonly: bool) -> "Locks":
    """Return the locks of a run with OPENED held, so that nobody replaces the log's file meanwhile.

    Whoever maps the file takes it first. Raises LogBusy during a compaction. On a file system that is
    read-only nothing can be replaced either, so a reader goes without.
    """
    locks = Locks(run_dir / LOCKS_DIR)
    try:
        locks.take(OPENED, shared=True)
    except OSError:
        if not readonly:
            raise
    return locks


class Locks:
    """The locks that this process holds in one run directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}
        self._over = False
        """Everything was given back for good: what is taken later would be held for as long as we live."""
        _living.add(self)

    def __repr__(self) -> str:
        return f"<Locks {str(self._folder)!r} holding {sorted(self._held)}>"

    def take(self, name: str, *, shared: bool = False) -> None:
        """Hold `name` until `release`; raises LogBusy with the holder's pid when it is held by another.

        Raises StoreError after `release_all`, also where that came meanwhile from another thread.
        """
        if name in self._held:
            return
        path = self._path(name)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        refusals = 0
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _try(descriptor, kind):
                holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip() or "unknown"
                os.close(descriptor)
                if refusals < PROBES:
                    refusals += 1
                    sleep(PROBE_SECONDS)
                    continue
                raise LogBusy(self._refusal(name, holder, shared=shared))
            if _still_there(path, descriptor):
                break
            os.close(descriptor)
        if not shared:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._held[name] = descriptor
        if self._over:
            self.release_all()
            raise StoreError(f"the log in {str(self._folder.parent)!r} is closed: {name} is not taken")

    def release(self, name: str) -> None:
        """Give `name` back; nothing happens when it is not held."""
        descriptor = self._held.pop(name, None)
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def release_all(self) -> None:
        """Give everything back, for good. A worker's file is deleted: nobody will ask for it again."""
        self._over = True
        for name in tuple(self._held):
            if name not in {LEARNER, OPENED}:
                self._path(name).unlink(missing_ok=True)
            self.release(name)

    def is_dead(self, name: str) -> bool:
        """Return whether the holder of `name` is gone; its file is deleted then."""
        if name in self._held:
            return False
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            if not _try(descriptor, fcntl.LOCK_EX):
                return False
            if name not in {LEARNER, OPENED} and _still_there(path, descriptor):
                path.unlink()
        finally:
            os.close(descriptor)
        return True

    def evict(self, name: str) -> None:
        """Treat the holder of `name` as dead though it lives (stopped, stuck): its groups may be adopted.

        Whatever it still appends fails with OwnerLost once they are.
        """
        self._path(name).unlink(missing_ok=True)

    def _refusal(self, name: str, holder: str, *, shared: bool) -> str:
        run_dir = str(self._folder.parent)
        if name == OPENED and shared:
            return f"the log in {run_dir!r} is being compacted by process {holder}: try again"
        if name == OPENED:
            return f"the log in {run_dir!r} is in use by other processes: end them first"
        return f"{name} of {run_dir!r} is held by process {holder}: only one may have it, stop that one first"

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise StoreError(
                f"not a worker id: {name!r}, expected up to 100 letters, digits, '.', '_' or '-'"
            )
        return self._folder / name


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


_living: "weakref.WeakSet[Locks]" = weakref.WeakSet()


def _forget_in_child() -> None:
    """Close a forked child's copies: a lock must not outlive its holder in a child."""
    for locks in tuple(_living):
        for descriptor in locks._held.values():  # noqa: SLF001 the same module
            os.close(descriptor)
        locks._held.clear()  # noqa: SLF001 the same module


os.register_at_fork(after_in_child=_forget_in_child)
