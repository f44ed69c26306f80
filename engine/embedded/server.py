"""Owns the engine process: `python -m engine.embedded.server --dir RUN/engine`.

It takes `engine.lock`, loads the model, listens on a free loopback port, publishes its address and
serves until a client asks it to stop, its folder disappears, or nobody has used it for a while.
"""

import argparse
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import uvicorn

from engine.embedded.app import build_app
from engine.embedded.base_model import BASE_FOLDER
from engine.embedded.checkpoints import CheckpointStore, write_file
from engine.embedded.compute import BaseModel
from engine.embedded.state import Identity, Limits
from engine.locks import ADDRESS, LOCK, MODEL_NAME, USERS, Address, open_lock, try_lock, unlock

logger = logging.getLogger("rolltape.engine")

LOCK_PATIENCE = 5.0
"""Seconds to try for engine.lock, which clients take shared for an instant to see if we live."""
GRACE_SECONDS = 2
"""Seconds that open requests are given when the engine stops."""


class Options(NamedTuple):
    """How one engine process runs."""

    folder: Path
    base: Path
    """The base model's folder."""
    port: int
    """0 takes a free one."""
    idle_seconds: float | None
    """How long it stays unused; None is for ever."""
    announce: bool
    """Whether to print the variables that a program of the SDK needs."""
    limits: Limits


def take_lock(folder: Path) -> int | None:
    """Return the descriptor that holds engine.lock, or None when another engine holds it."""
    descriptor = open_lock(folder / LOCK)
    deadline = time.monotonic() + LOCK_PATIENCE
    while not try_lock(descriptor, exclusive=True):
        if time.monotonic() > deadline:
            os.close(descriptor)
            return None
        time.sleep(0.01)
    return descriptor


def same_file(descriptor: int, path: Path) -> bool:
    """Return whether `path` still names the open file."""
    try:
        named = path.stat()
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


async def watch(folder: Path, lock: int, idle_seconds: float | None) -> str:
    """Return why the engine should end: its folder is gone, or it was unused for idle_seconds.

    When it ends unused it keeps engine.users exclusively, so that a client that comes now waits
    for the end of this process and then starts a new one.
    """
    users = open_lock(folder / USERS)
    free_since: float | None = None
    pause = 1.0 if idle_seconds is None else min(1.0, idle_seconds / 4)
    while True:
        await anyio.sleep(pause)
        if not same_file(lock, folder / LOCK):
            return "its folder is gone"
        if idle_seconds is None:
            continue
        if not try_lock(users, exclusive=True):
            free_since = None
            continue
        now = time.monotonic()
        free_since = now if free_since is None else free_since
        if now - free_since >= idle_seconds:
            return f"nobody used it for {idle_seconds:g} s"
        unlock(users)


class AnnouncedServer(uvicorn.Server):
    """A server that says when it listens."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_listening()


class EngineProcess:
    """One engine process between taking its lock and its end."""

    def __init__(self, options: Options, lock: int, listener: socket.socket) -> None:
        self._options = options
        self._lock = lock
        self._listener = listener
        self._base = BaseModel.load(options.base)
        self._identity = Identity(MODEL_NAME, secrets.token_urlsafe(32), secrets.token_hex(8))
        app = build_app(
            self._base,
            CheckpointStore(options.folder),
            self._identity,
            options.limits,
            on_stop=lambda: self._end("a client asked for it"),
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ws="none",
        )
        self._server = AnnouncedServer(config, self._publish)

    def _end(self, reason: str) -> None:
        logger.info("engine %d ends: %s", os.getpid(), reason)
        self._server.should_exit = True

    def _publish(self) -> None:
        """Write engine.json, readable by this user only."""
        address = Address(
            pid=os.getpid(),
            instance=self._identity.instance,
            url=f"http://127.0.0.1:{self._listener.getsockname()[1]}",
            token=self._identity.token,
            model=MODEL_NAME,
            model_folder=str(self._base.folder),
            fingerprint=self._base.fingerprint,
        )
        write_file(self._options.folder / ADDRESS, msgspec.json.encode(address))
        logger.info("engine %d listens at %s", address.pid, address.url)
        if self._options.announce:
            print_variables(address)

    async def serve(self) -> None:
        """Serve until stopped, unused, or without a folder."""

        async def end_when_due() -> None:
            folder, idle_seconds = self._options.folder, self._options.idle_seconds
            self._end(await watch(folder, self._lock, idle_seconds))

        async with anyio.create_task_group() as group:
            group.start_soon(end_when_due)
            await self._server.serve(sockets=[self._listener])
            group.cancel_scope.cancel()
        (self._options.folder / ADDRESS).unlink(missing_ok=True)


def print_variables(address: Address) -> None:
    """Print what any program that uses the SDK needs in its environment."""
    sys.stdout.write(
        f"export PYTRIO_BASE_URL={address.url}\nexport PYTRIO_API_KEY={address.token}\n"
        f"# base model: {address.model}; Ctrl-C ends the engine\n"
    )
    sys.stdout.flush()


def run(options: Options) -> int:
    """Run one engine to its end; returns an exit status: 2 the port is taken, 3 the folder is."""
    options.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = take_lock(options.folder)
    if lock is None:
        logger.error("another engine holds %s", options.folder / LOCK)
        return 3
    (options.folder / ADDRESS).unlink(missing_ok=True)
    # With the protocol named, asyncio switches Nagle's algorithm off; else each answer takes 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", options.port))
        except OSError as exc:
            logger.error("cannot listen on port %d: %s", options.port, exc)  # noqa: TRY400 - no bug
            return 2
        listener.listen(1024)
        anyio.run(EngineProcess(options, lock, listener).serve)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; returns an exit status."""
    parser = argparse.ArgumentParser(prog="engine.embedded.server", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the run's engine folder")
    parser.add_argument("--base", type=Path, default=BASE_FOLDER, help="a base model's folder")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--idle-seconds", type=float, default=None, help="default: never ends")
    parser.add_argument("--max-batch-size", type=int, default=Limits().max_batch_size)
    parser.add_argument("--announce", action="store_true", help="print the SDK's variables")
    parsed = parser.parse_args(arguments)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    options = Options(
        folder=parsed.dir.resolve(),
        base=parsed.base.resolve(),
        port=parsed.port,
        idle_seconds=parsed.idle_seconds,
        announce=parsed.announce,
        limits=Limits(max_batch_size=parsed.max_batch_size),
    )
    try:
        return run(options)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
