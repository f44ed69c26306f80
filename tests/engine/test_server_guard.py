"""The engine's door, driven as the web server drives it: who is let in, and how much at once."""

from typing import Any

import anyio
import msgspec
import pytest

from engine.embedded.guard import Guard, Message, Receive, Scope, Send
from engine.embedded.state import Limits

TOKEN = "secret"


def scope(client: tuple[str, int] | None = ("127.0.0.1", 5), **headers: str) -> dict[str, Any]:
    """Return the scope of a request that is let in, unless changed."""
    given = {"host": "127.0.0.1:80", "authorization": f"Bearer {TOKEN}"} | headers
    return {
        "type": "http",
        "client": client,
        "server": ("127.0.0.1", 80),
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()],
    }


class Visit:
    """One request: the body's pieces as they arrive, and the answer."""

    def __init__(self, *pieces: bytes, ends: bool = True) -> None:
        self.pieces = list(pieces)
        self.ends = ends
        self.status = 0
        self.body = b""

    async def receive(self) -> Message:
        """Give the next piece; a body that never ends makes its reader wait."""
        if self.pieces:
            more = len(self.pieces) > 1 or not self.ends
            return {"type": "http.request", "body": self.pieces.pop(0), "more_body": more}
        if self.ends:
            return {"type": "http.disconnect"}
        await anyio.sleep_forever()
        raise AssertionError

    async def send(self, message: Message) -> None:
        """Keep the answer."""
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")


async def echo(_scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the whole body, which has arrived before the application is asked."""
    message = await receive()
    assert not message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def visit(guard: Guard, request: dict[str, Any], *pieces: bytes, ends: bool = True) -> tuple[int, Any]:
    """Return the status, and the refusal's code or the body."""
    caller = Visit(*pieces, ends=ends)
    anyio.run(guard, request, caller.receive, caller.send)
    if caller.status == 200:
        return 200, caller.body
    return caller.status, msgspec.json.decode(caller.body)["code"]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (scope(), (200, b"ab")),
        (scope(client=("::1", 5)), (200, b"ab")),
        (scope(host="localhost"), (200, b"ab")),
        (scope(authorization="", x_api_key=TOKEN), (200, b"ab")),
        (scope(client=("192.168.0.7", 5)), (403, "forbidden")),
        (scope(client=None), (403, "forbidden")),
        (scope(host="rebound.example:80"), (403, "forbidden")),
        (scope(host="127.0.0.1:81"), (403, "forbidden")),
        (scope(authorization="Bearer other"), (401, "unauthorized")),
        (scope(authorization=""), (401, "unauthorized")),
        (scope(content_length="99"), (413, "body_too_large")),
    ],
)
def test_who_is_let_in(request_: dict[str, Any], expected: tuple[int, Any]) -> None:
    """Loopback, the engine's own name, and the token; everybody else gets a reason."""
    guard = Guard(echo, TOKEN, Limits(max_body_bytes=8))
    assert visit(guard, request_, b"a", b"b") == expected


def test_bodies_are_bounded_in_size_and_time() -> None:
    """A body that grows too large, never ends, or breaks off is refused; the next one is served."""
    guard = Guard(echo, TOKEN, Limits(max_body_bytes=8, body_timeout=0.05))
    assert visit(guard, scope(), b"12345", b"6789") == (413, "body_too_large")
    assert visit(guard, scope(), b"1", ends=False) == (408, "request_timeout")
    assert visit(guard, scope()) == (400, "invalid_request_body")
    assert visit(guard, scope(), b"12345678") == (200, b"12345678")


def test_requests_and_bytes_in_progress_are_bounded() -> None:
    """Beyond the bounds a client is told to come back, and served once others are done."""
    opened = anyio.Event()

    async def slow(scope_: Scope, receive: Receive, send: Send) -> None:
        await opened.wait()
        await echo(scope_, receive, send)

    async def scenario(limits: Limits, count: int) -> list[int]:
        guard = Guard(slow, TOKEN, limits)
        callers = [Visit(b"12345678") for _ in range(count)]
        async with anyio.create_task_group() as group:
            for caller in callers:
                group.start_soon(guard, scope(), caller.receive, caller.send)
            await anyio.wait_all_tasks_blocked()
            opened.set()
        again = Visit(b"1")
        await guard(scope(), again.receive, again.send)
        return [caller.status for caller in callers] + [again.status]

    assert anyio.run(scenario, Limits(max_requests=2), 3) == [200, 200, 429, 200]
    opened = anyio.Event()
    assert anyio.run(scenario, Limits(max_body_bytes=8), 6) == [200] * 4 + [429] * 2 + [200]
