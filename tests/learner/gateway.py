"""A real HTTP gateway in front of the engine that answers some requests itself: a service with faults."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from engine.locks import Address

HANG_UP, STALL = 0, -1
FORWARDED = ("Authorization", "Content-Type", "Accept", "Prefer")


class Asked(NamedTuple):
    """A request on its way to the service."""

    method: str
    path: str
    body: bytes

    @property
    def event(self) -> str:
        """The type of the training event that is posted, "" for any other request."""
        return str(self.envelope["type"]) if self.envelope else ""

    @property
    def envelope(self) -> dict[str, Any]:
        """The training event that is posted, {} for any other request."""
        if (self.method, self.path) != ("POST", "/v1/events"):
            return {}
        decoded: dict[str, Any] = msgspec.msgpack.decode(self.body)
        return decoded


class Said(NamedTuple):
    """What the gateway answers in the service's place."""

    status: int
    """HANG_UP closes the connection at once; STALL says nothing until the gateway heals."""
    body: bytes = b""
    kind: str = "application/json"


Fault = Callable[[Asked], Said | None]


def refusal(status: int, code: str) -> Said:
    """Return an error as the service words it."""
    return Said(status, msgspec.json.encode({"code": code, "message": f"the service says {code}"}))


def failed_event(asked: Asked, code: str) -> Said:
    """Return the answer that an accepted event has failed."""
    event = msgspec.msgpack.decode(asked.body)
    answer = {
        "version": 1,
        "event_id": event["event_id"],
        "type": event["type"],
        "status": "failed",
        "error": {"code": code, "message": f"the service says {code}"},
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }
    return Said(200, msgspec.msgpack.encode(answer), "application/msgpack")


class Gateway:
    """Passes everything on, except what its fault answers; remembers the training events that passed."""

    def __init__(self, address: Address) -> None:
        self.engine = urlsplit(address.url)
        self.token = address.token
        self.url = ""
        self.passed: list[dict[str, Any]] = []
        self._fault: Fault = lambda _asked: None
        self._lock = threading.Lock()
        self._met = threading.Event()
        self.healed = threading.Event()

    def payloads(self, kind: str) -> list[dict[str, Any]]:
        """Return what the service received in the events of one type."""
        with self._lock:
            return [event["payload"] for event in self.passed if event["type"] == kind]

    def set_fault(self, fault: Fault) -> None:
        """Answer with what `fault` returns from now on; None passes a request on."""
        with self._lock:
            self._fault = fault
            self._met.clear()

    def heal(self) -> None:
        """Pass everything on."""
        self.set_fault(lambda _asked: None)
        self.healed.set()

    def wait_for_fault(self, seconds: float = 30.0) -> None:
        """Wait until the fault has answered a request."""
        assert self._met.wait(seconds), "the fault was never met"

    def answer(self, asked: Asked) -> Said | None:
        """Return what the gateway says itself."""
        with self._lock:
            said = self._fault(asked)
            if said is not None:
                self._met.set()
            elif asked.envelope:
                self.passed.append(asked.envelope)
            return said


class _Handler(BaseHTTPRequestHandler):
    gateway: Gateway
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        asked = Asked(self.command, self.path, self.rfile.read(length))
        said = self.gateway.answer(asked) or self._pass_on(asked)
        if said.status == STALL:
            self.gateway.healed.wait()
        if said.status <= HANG_UP:
            self.close_connection = True
            return
        self.send_response(said.status)
        self.send_header("Content-Type", said.kind)
        self.send_header("Content-Length", str(len(said.body)))
        self.end_headers()
        self.wfile.write(said.body)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815 the base class's names

    def _pass_on(self, asked: Asked) -> Said:
        engine = self.gateway.engine
        connection = http.client.HTTPConnection(engine.hostname or "", engine.port, timeout=60)
        headers = {name: self.headers[name] for name in FORWARDED if name in self.headers}
        try:
            connection.request(asked.method, asked.path, body=asked.body, headers=headers)
            response = connection.getresponse()
            kind = response.getheader("content-type", "application/json")
            # The engine names itself as the place of the training half.
            body = response.read().replace(engine.geturl().encode(), self.gateway.url.encode())
            return Said(response.status, body, kind)
        finally:
            connection.close()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the base class's name
        return


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def gateway_to(address: Address) -> Iterator[Gateway]:
    """Run a gateway in front of an engine while the block lasts."""
    gateway = Gateway(address)
    server = _QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"gateway": gateway}))
    gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield gateway
    finally:
        gateway.heal()
        server.shutdown()
        thread.join()
        server.server_close()
