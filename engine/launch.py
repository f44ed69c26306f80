"""Owns the life of the embedded engine as its clients see it: join or start, watch, status, stop.

Two commands that start at once make one engine: whoever gets `engine.start` starts it, the other
joins it. A client holds `engine.users` shared from before it looks until it closes, so an engine
that it has found cannot decide to end. Nothing here depends on a clock or a heartbeat being right.
"""

import contextlib
import http.client
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from core.errors import EngineError
from engine import locks
from engine.locks import Address

IDLE_SECONDS = 30.0
"""How long an engine stays when nobody uses it."""
IDLE_VARIABLE = "ROLLTAPE_ENGINE_IDLE_SECONDS"
"""Environment variable that overrides IDLE_SECONDS, for tests and scripts."""

START_SECONDS = 60.0
STOP_SECONDS = 15.0
ANSWER_SECONDS = 4.0
"""How long a live engine may take to answer; its event loop never computes."""
ORDERLY_SECONDS = 1.0
"""How long an engine may take from clearing its address away to its end."""
PAUSE = 0.02
PROJECT = Path(__file__).resolve().parent.parent
LOG_TAIL_BYTES = 2000


class Status(msgspec.Struct, frozen=True):
    """What `engine status` shows."""

    running: bool
    in_use: bool = False
    """Whether some client holds engine.users."""
    address: Address | None = None
    sessions: int = 0
    training_runs: int = 0
    sampling_runs: int = 0
    checkpoints: int = 0
    checkpoint_bytes: int = 0
    waiting_jobs: int = 0
    busy_seconds: float = 0.0
    """Time that the engine has spent computing."""


class Joined(NamedTuple):
    """A live engine, and the descriptor that keeps it alive; close it when done."""

    address: Address
    users: int


def engine_folder(run_dir: Path) -> Path:
    """Return the folder in which a run's engine keeps its files."""
    return run_dir.resolve() / "engine"


def join(run_dir: Path, *, start_seconds: float = START_SECONDS) -> Joined:
    """Return the run's engine, started if need be, held alive until `users` is closed.

    Raises EngineError when it does not start; the message carries the end of its log.
    """
    folder = engine_folder(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as exc:
        raise EngineError(f"cannot make the engine's folder {str(folder)!r}: {exc}") from exc
    deadline = time.monotonic() + start_seconds
    with contextlib.ExitStack() as undo:
        users = locks.open_lock(folder / locks.USERS)
        undo.callback(os.close, users)
        _take(users, exclusive=False, deadline=deadline, what=folder / locks.USERS)
        with _starting(folder, deadline):
            address = _live_address(folder)
            if address is None:
                pid = None
                if not locks.is_held(folder / locks.LOCK):
                    pid = spawn(folder, idle_seconds=idle_seconds())
                address = _wait_for_address(folder, pid, deadline)
        undo.pop_all()
    return Joined(address, users)


def idle_seconds() -> float:
    """Return how long an unused engine stays; raises EngineError for a bad environment value."""
    text = os.environ.get(IDLE_VARIABLE, "")
    try:
        return float(text) if text else IDLE_SECONDS
    except ValueError as exc:
        raise EngineError(f"{IDLE_VARIABLE}={text!r} must be a number of seconds") from exc


def _take(descriptor: int, *, exclusive: bool, deadline: float, what: Path) -> None:
    while not locks.try_lock(descriptor, exclusive=exclusive):
        if time.monotonic() > deadline:
            raise EngineError(f"{str(what)!r} stayed locked: is another engine being started?")
        time.sleep(PAUSE)


@contextlib.contextmanager
def _starting(folder: Path, deadline: float) -> Iterator[None]:
    descriptor = locks.open_lock(folder / locks.START)
    try:
        _take(descriptor, exclusive=True, deadline=deadline, what=folder / locks.START)
        yield
    finally:
        os.close(descriptor)


def _live_address(folder: Path) -> Address | None:
    """Return the address of the engine that holds the lock, once it answers to it."""
    if not locks.is_held(folder / locks.LOCK):
        return None
    address = locks.read_address(folder)
    if address is None or _call(address, "GET", "/engine/status") is None:
        return None
    return address


def _wait_for_address(folder: Path, pid: int | None, deadline: float) -> Address:
    while (address := _live_address(folder)) is None:
        if pid is not None and has_ended(pid):
            raise EngineError(f"the embedded engine did not start; its log ends:\n{_tail(folder)}")
        if time.monotonic() > deadline:
            raise EngineError(
                f"the embedded engine of {str(folder)!r} did not answer in time; its log ends:\n"
                f"{_tail(folder)}"
            )
        time.sleep(PAUSE)
    return address


def _tail(folder: Path) -> str:
    try:
        data = (folder / locks.LOG).read_bytes()
    except OSError as exc:
        return f"(no log: {exc})"
    return data[-LOG_TAIL_BYTES:].decode(errors="replace").strip()


def spawn(folder: Path, *, idle_seconds: float) -> int:
    """Start a detached engine process, in a session of its own, and return its pid."""
    command = [
        *(sys.executable, "-m", "engine.embedded.server"),
        *("--dir", str(folder), "--idle-seconds", repr(idle_seconds)),
    ]
    log = str(folder / locks.LOG)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        sys.executable,
        command,
        engine_environment(),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, append, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine process: one BLAS thread, this project importable."""
    path = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def has_ended(pid: int) -> bool:
    """Return whether a process is gone; a child of ours that ended is reaped."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def is_alive(folder: Path, address: Address) -> bool:
    """Return whether the engine that listened at `address` still lives (and not a successor)."""
    if not locks.is_held(folder / locks.LOCK):
        return False
    current = locks.read_address(folder)
    return current is not None and current.instance == address.instance


def ended_in_order(folder: Path) -> bool:
    """Return whether the engine that has just ended took its address along, and no successor has come.

    Who crashes leaves the address behind. While there is none, whoever holds the lock is either about to be
    gone, or a successor that will soon publish its own.
    """
    deadline = time.monotonic() + ORDERLY_SECONDS
    while locks.read_address(folder) is None:
        if not locks.is_held(folder / locks.LOCK):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE)
    return False


def status(run_dir: Path) -> Status:
    """Return what a run's engine is doing; never starts one."""
    folder = engine_folder(run_dir)
    address = _live_address(folder) if folder.is_dir() else None
    if address is None:
        return Status(running=False)
    facts = _call(address, "GET", "/engine/status") or {}
    counts = {key: value for key, value in facts.items() if key in Status.__struct_fields__}
    plain = {"running": True, "in_use": _in_use(folder), "address": address, **counts}
    return msgspec.convert(plain, Status, from_attributes=True)


def _in_use(folder: Path) -> bool:
    descriptor = locks.open_lock(folder / locks.USERS)
    try:
        return not locks.try_lock(descriptor, exclusive=True)
    finally:
        os.close(descriptor)


def stop(run_dir: Path, *, force: bool = False, seconds: float = STOP_SECONDS) -> bool:
    """End a run's engine and wait until it is gone; returns whether one was running.

    Raises EngineError when clients still use it (unless `force`: they then fail with EngineDied),
    or when it does not end in time.
    """
    folder = engine_folder(run_dir)
    if not folder.is_dir() or not locks.is_held(folder / locks.LOCK):
        return False
    if not force and _in_use(folder):
        raise EngineError(
            f"the engine of {str(run_dir)!r} is in use: stop its rollout and learn commands first, "
            "or stop it by force (they will fail)"
        )
    deadline = time.monotonic() + seconds
    address = _live_address(folder)
    if address is not None:
        _call(address, "POST", "/engine/stop")
    elif force:
        _kill_silent(folder)
    while locks.is_held(folder / locks.LOCK):
        if time.monotonic() > deadline:
            raise EngineError(f"the engine of {str(run_dir)!r} did not end in {seconds:g} s")
        time.sleep(PAUSE)
    if address is not None:
        has_ended(address.pid)
    return True


def _kill_silent(folder: Path) -> None:
    """End an engine that holds its lock but no longer answers, once sure that it is one."""
    address = locks.read_address(folder)
    if address is None:
        return
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{address.pid}/cmdline").read_bytes().split(b"\0")
        if b"engine.embedded.server" in command and os.fsencode(folder) in command:
            os.kill(address.pid, signal.SIGKILL)


def serve(run_dir: Path, *, port: int = 0) -> int:
    """Run an engine in this process until Ctrl-C, for use by hand with any PyTRIO program.

    Replaces the current process; prints the two variables to set once it listens. Raises
    EngineError when the run has an engine already.
    """
    folder = engine_folder(run_dir)
    if folder.is_dir() and locks.is_held(folder / locks.LOCK):
        raise EngineError(f"the engine of {str(run_dir)!r} is running already: see its status")
    command = [
        *(sys.executable, "-m", "engine.embedded.server"),
        *("--dir", str(folder), "--port", str(port), "--announce"),
    ]
    os.execve(sys.executable, command, engine_environment())  # noqa: S606 - no shell


def _call(address: Address, method: str, path: str) -> dict[str, object] | None:
    """Return the JSON answer of a live engine, or None; the environment's proxies play no part."""
    parts = urlsplit(address.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, path, headers={"X-API-Key": address.token})
        response = connection.getresponse()
        body = response.read()
        if response.status != http.HTTPStatus.OK:
            return None
        return msgspec.json.decode(body, type=dict[str, object])
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return None
    finally:
        connection.close()
