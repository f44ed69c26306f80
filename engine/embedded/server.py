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

import anyio
import msgspec
import uvicorn

from engine.embedded.app import build_app
from engine.embedded.checkpoints import CheckpointStore, write_file
from engine.embedded.base_model import BASE_FOLDER
from engine.embedded.compute import BaseModel
from engine.embedded.state import Limits
from engine.locks import ADDRESS, LOCK, USERS, Address, open_lock, try_lock, unlock

Announce = Callable[[Address], None]
logger = logging.getLogger("rolltape.engine")

ALIAS = "rolltape/tiny"
LOCK_PATIENCE = 5.0
"""Seconds to try for engine.lock, which clients take shared for an instant to see if we live."""
GRACE_SECONDS = 2
"""Seconds that open requests are given when the engine stops."""


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


class EngineServer:
    """One engine process between taking its lock and its end."""

    def __init__(self, folder: Path, base: Path, lock: int, limits: Limits, announce: Announce) -> None:
        self._folder = folder
        self._lock = lock
        self._announce = announce
        self._instance = secrets.token_hex(8)
        token = secrets.token_urlsafe(32)
        self._base = BaseModel.load(base)
        self._token = token
        app = build_app(
            base=self._base,
            alias=ALIAS,
            store=CheckpointStore(folder),
            token=token,
            instance=self._instance,
            limits=limits,
            on_stop=lambda: self._end("a client asked for it"),
        )
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=GRACE_SECONDS,
                ws="none",
            )
        )

    def _end(self, reason: str) -> None:
        logger.info("engine %d ends: %s", os.getpid(), reason)
        self._uvicorn.should_exit = True

    def publish(self, port: int) -> Address:
        """Write engine.json, readable by this user only."""
        address = Address(
            pid=os.getpid(),
            instance=self._instance,
            url=f"http://127.0.0.1:{port}",
            token=self._token,
            model=ALIAS,
            model_folder=str(self._base.folder),
            fingerprint=self._base.fingerprint,
        )
        write_file(self._folder / ADDRESS, msgspec.json.encode(address))
        return address

    async def serve(self, listener: socket.socket, idle_seconds: float | None) -> None:
        """Serve until stopped, unused, or without a folder."""
        port = listener.getsockname()[1]
        async with anyio.create_task_group() as group:

            async def announce() -> None:
                while not self._uvicorn.started:
                    await anyio.sleep(0.002)
                address = self.publish(port)
                logger.info("engine %d listens at %s", address.pid, address.url)
                self._announce(address)

            async def end_when_due() -> None:
                self._end(await watch(self._folder, self._lock, idle_seconds))

            group.start_soon(announce)
            group.start_soon(end_when_due)
            await self._uvicorn.serve(sockets=[listener])
            group.cancel_scope.cancel()
        (self._folder / ADDRESS).unlink(missing_ok=True)


def print_variables(address: Address) -> None:
    """Print what any program that uses the SDK needs in its environment."""
    sys.stdout.write(
        f"export PYTRIO_BASE_URL={address.url}\nexport PYTRIO_API_KEY={address.token}\n"
        f"# base model: {address.model}; Ctrl-C ends the engine\n"
    )
    sys.stdout.flush()


def run(
    folder: Path,
    *,
    base: Path,
    port: int,
    idle_seconds: float | None,
    limits: Limits,
    announce: Announce,
) -> int:
    """Run one engine to its end; returns an exit status (3: another engine has the folder)."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = take_lock(folder)
    if lock is None:
        logger.error("another engine holds %s", folder / LOCK)
        return 3
    (folder / ADDRESS).unlink(missing_ok=True)
    server = EngineServer(folder, base, lock, limits, announce)
    # With the protocol named, asyncio switches Nagle's algorithm off; else each answer takes 40 ms.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
        anyio.run(server.serve, listener, idle_seconds)
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
    options = parser.parse_args(arguments)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    limits = Limits(max_batch_size=options.max_batch_size)
    folder = options.dir.resolve()
    try:
        return run(
            folder,
            base=options.base.resolve(),
            port=options.port,
            idle_seconds=options.idle_seconds,
            limits=limits,
            announce=print_variables if options.announce else lambda _: None,
        )
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
