"""Owns the parts that every handler of the engine shares, and how an answer is written."""

from datetime import UTC, datetime
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.embedded.checkpoints import CheckpointStore
from engine.embedded.compute import BaseModel
from engine.embedded.runs import Registry
from engine.embedded.worker import Worker


class Limits(NamedTuple):
    """What one request may hold; the first two are announced to the SDK, which splits batches."""

    max_batch_size: int = 1024
    """Datums per trainer event: high, so that one call of ours is one event."""
    max_tokens_per_request: int = 1_048_576
    """Tokens per trainer event, some 28 MB of MessagePack."""
    max_body_bytes: int = 64 * 2**20
    max_requests: int = 2048
    """Requests in progress at once; more are told to come back (429)."""
    max_waiting_jobs: int = 4096
    """Jobs that wait for the compute thread; more are told to come back (429)."""
    body_timeout: float = 30.0
    """Seconds in which a request's body must arrive."""
    longest_poll: float = 50.0
    """Seconds after which an event poll answers `running`; the SDK gives up at 65."""


class Identity(NamedTuple):
    """What one engine process is called, and what it asks of its clients."""

    alias: str
    """The base model's name; its folder's path is accepted too."""
    token: str
    """Must come with every request."""
    instance: str
    """Random, new with every process."""


class Engine(NamedTuple):
    """Everything behind the HTTP surface."""

    base: BaseModel
    identity: Identity
    limits: Limits
    store: CheckpointStore
    worker: Worker
    registry: Registry


def engine_of(request: Request) -> Engine:
    """Return the engine that serves this request."""
    engine: Engine = request.app.state.engine
    return engine


def json_answer(body: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def refusal(status: int, code: str, message: str) -> Response:
    """Return an error in the one form that the SDK reads from both its servers."""
    return json_answer({"code": code, "message": message[:2000]}, status)


def iso(seconds: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


JsonObject = dict[str, object]
