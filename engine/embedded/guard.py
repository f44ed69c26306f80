"""Owns who may talk to the engine, and how much at once.

The engine listens on loopback only, where any local program and, through a browser, any web page
can reach it. So every request must name the loopback host (a page that rebinds its own name does
not) and carry the random token from a file that only the user can read. Bodies are read here,
bounded in size and time, before any handler runs.
"""

import hmac
import logging

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.embedded.state import Limits, refusal
from engine.embedded.wire import Refused

logger = logging.getLogger("rolltape.engine")

LOOPBACK = frozenset({"127.0.0.1", "::1"})
HOSTS = frozenset({"127.0.0.1", "localhost"})


class Guard:
    """ASGI middleware: loopback, Host, token, number of requests, body size and time."""

    def __init__(self, app: ASGIApp, token: str, limits: Limits) -> None:
        self._app = app
        self._token = token.encode()
        self._limits = limits
        self._requests = 0
        self._bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or refuse with a 4xx."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._requests += 1
        try:
            try:
                self._check(scope)
                body = await self._read(scope, receive)
            except Refused as exc:
                await refusal(exc.status, exc.code, exc.message)(scope, receive, send)
                return
            await self._serve(scope, receive, send, body)
        finally:
            self._requests -= 1

    def _check(self, scope: Scope) -> None:
        client = scope.get("client")
        if client is None or client[0] not in LOOPBACK:
            raise Refused(403, "forbidden", "the engine serves this machine only")
        headers = Headers(scope=scope)
        host, _, port = headers.get("host", "").partition(":")
        if host not in HOSTS or (port and port != str(scope["server"][1])):
            raise Refused(403, "forbidden", "the Host header must be the engine's own address")
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        given = headers.get("x-api-key") or bearer
        if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token):
            raise Refused(401, "unauthorized", "a wrong or missing engine token")
        if self._requests > self._limits.max_requests:
            raise Refused(429, "too_many_requests", f"{self._requests} requests are in progress")

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """Return the whole body; raises Refused when it is too large or too slow."""
        limit = self._limits.max_body_bytes
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise Refused(413, "body_too_large", f"a body may hold {limit} bytes, not {declared}")
        chunks: list[bytes] = []
        size = 0
        with anyio.move_on_after(self._limits.body_timeout) as scope_:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "invalid_request_body", "the client hung up")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise Refused(413, "body_too_large", f"a body may hold {limit} bytes")
                if not message.get("more_body", False):
                    break
        if scope_.cancelled_caught:
            raise Refused(408, "request_timeout", "the request's body did not arrive in time")
        return b"".join(chunks)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, body: bytes) -> None:
        """Run the application on a request whose body is here already."""
        # Counted while it is served: many large bodies at once must not exhaust the memory.
        if self._bytes + len(body) > 4 * self._limits.max_body_bytes:
            answer = refusal(429, "too_many_requests", "too many large requests are in progress")
            await answer(scope, receive, send)
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        self._bytes += len(body)
        try:
            await self._app(scope, replay, send)
        finally:
            self._bytes -= len(body)
