"""A real HTTP server on the loopback that gives scripted replies, and clocks that tests step by waiting."""

import base64
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import anyio.lowlevel

from rollout.search.timer import Timer


class Request(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Reply(NamedTuple):
    """What the server answers."""

    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    stall: threading.Event | None = None
    """The server waits for this before it answers."""
    cut: int | None = None
    """The connection ends after so many bytes of the body."""


def reported_reply(reply: dict[str, object]) -> Reply:
    """Return a reply of the reported cases."""
    if "json" in reply:
        body = json.dumps(reply["json"]).encode()
    elif "base64" in reply:
        body = base64.b64decode(str(reply["base64"]))
    else:
        body = str(reply.get("text", "")).encode()
    headers = reply.get("headers", {})
    assert isinstance(headers, dict)
    return Reply(int(str(reply["status"])), tuple(headers.items()), body)


def json_reply(value: object, status: int = 200) -> Reply:
    """Return a JSON reply."""
    return Reply(status, (("Content-Type", "application/json"),), json.dumps(value).encode())


class Server:
    """Answers with each scripted reply in turn, the last one for ever; or with what a function says."""

    def __init__(self, script: Sequence[Reply] | Callable[[Request], Reply]) -> None:
        self.requests: list[Request] = []
        self.url = ""
        self._script = script
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Reply:
        """Return the reply to a request, and note it."""
        with self._lock:
            self.requests.append(request)
            if callable(self._script):
                return self._script(request)
            return self._script[min(len(self.requests), len(self._script)) - 1]


class _Handler(BaseHTTPRequestHandler):
    served: Server

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, self.path, dict(self.headers.items()), self.rfile.read(length))
        reply = self.served.answer(request)
        if reply.stall is not None:
            reply.stall.wait(10)
        self.send_response(reply.status)
        for name, value in reply.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(reply.body if reply.cut is None else reply.body[: reply.cut])
        self.close_connection = True

    do_POST = do_GET  # noqa: N815 the base class's name

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the base class's name
        return


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def serve(script: Sequence[Reply] | Callable[[Request], Reply]) -> Iterator[Server]:
    """Run a server while the block lasts."""
    served = Server(script)
    handler = type("Handler", (_Handler,), {"served": served})
    server = _QuietServer(("127.0.0.1", 0), handler)
    served.url = f"http://127.0.0.1:{server.server_address[1]}/search"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Clock:
    """Clocks that move only when somebody sleeps."""

    def __init__(self, wall: float = 1_700_000_000.0) -> None:
        self.waits: list[float] = []
        self._now = 0.0
        self._wall = wall

    async def sleep(self, seconds: float) -> None:
        """Note a wait and let it pass at once."""
        self.waits.append(seconds)
        self._now += seconds
        await anyio.lowlevel.checkpoint()

    def timer(self) -> Timer:
        """Return the timer that goes by these clocks."""
        return Timer(self.sleep, lambda: self._now, lambda: self._wall + self._now)
