"""Owns the files by which an engine and its clients know of each other: flocks, never heartbeats.

`engine.lock` is held exclusively by the engine for life; `engine.users` is held shared by every
client, so the engine can take it exclusively only when nobody uses it; `engine.start` is held by
the one client that is starting an engine. The kernel frees them with their process, however it
ends. `engine.json` says where a live engine listens, readable by its user only.
"""

import fcntl
import os
from pathlib import Path

import msgspec

LOCK = "engine.lock"
USERS = "engine.users"
START = "engine.start"
ADDRESS = "engine.json"
LOG = "engine.log"
MODEL_NAME = "rolltape/tiny"
"""What every embedded engine calls its model."""


class Address(msgspec.Struct, frozen=True):
    """Where and as what an engine listens."""

    pid: int
    instance: str
    """Random, new with every engine process."""
    url: str
    token: str
    model: str
    """The model's name, as the SDK is told it."""
    model_folder: str
    fingerprint: str
    """SHA-256 of the base model's weights, configuration and tokenizer."""


def open_lock(path: Path) -> int:
    """Return a descriptor of a lock file, made when absent, closed in child programs."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Return whether the lock could be taken now."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Give a lock back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_held(path: Path) -> bool:
    """Return whether some process holds the lock at `path` exclusively.

    It is taken shared for an instant to find out, so whoever takes it exclusively must try again.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, exclusive=False)
    finally:
        os.close(descriptor)


def read_address(folder: Path) -> Address | None:
    """Return the published address, or None; it may be that of an engine that has ended."""
    try:
        return msgspec.json.decode((folder / ADDRESS).read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None
