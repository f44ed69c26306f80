"""Owns the ASGI application: routes, errors as 4xx, and the compute thread's life."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from engine.embedded import actor, catalog, control, leases
from engine.embedded.checkpoints import CheckpointStore
from engine.embedded.compute import BaseModel
from engine.embedded.guard import Guard
from engine.embedded.runs import Registry
from engine.embedded.samplers import Samplers
from engine.embedded.state import Engine, Identity, Limits, refusal
from engine.embedded.wire import Refused
from engine.embedded.worker import Worker

COLLECT_SECONDS = 30.0
"""How often checkpoints whose lifetime has ended are deleted; they are refused at once anyway."""


async def on_refused(_request: Request, exc: Exception) -> Response:
    """Answer a refusal."""
    if not isinstance(exc, Refused):
        raise exc
    return refusal(exc.status, exc.code, exc.message)


async def on_http_error(request: Request, exc: Exception) -> Response:
    """Answer an unknown path or method in the form that the SDK reads."""
    status = exc.status_code if isinstance(exc, HTTPException) else 400
    return refusal(status, "not_found", f"{request.method} {request.url.path}: no such call")


async def on_fault(request: Request, _exc: Exception) -> Response:
    """Answer a fault of ours with a 4xx: the SDK would retry a 5xx for 15 minutes."""
    message = f"the engine failed on {request.method} {request.url.path}; engine.log says why"
    return refusal(400, "engine_fault", message)


async def collect_for_ever(store: CheckpointStore) -> None:
    """Delete ended checkpoints now and then."""
    while True:
        store.collect()
        await anyio.sleep(COLLECT_SECONDS)


def build_app(
    base: BaseModel,
    store: CheckpointStore,
    identity: Identity,
    limits: Limits,
    on_stop: Callable[[], None] = lambda: None,
) -> Starlette:
    """Return the engine as an ASGI application; its lifespan runs the compute thread.

    `on_stop` is called when a client asks the engine to end.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker = Worker(Samplers(base, store).sample)
        registry = Registry(base, store, worker)
        app.state.engine = Engine(base, identity, limits, store, worker, registry)
        app.state.on_stop = on_stop
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(collect_for_ever, store)
                yield
                group.cancel_scope.cancel()
        finally:
            worker.stop()

    app = Starlette(
        routes=[*control.ROUTES, *leases.ROUTES, *catalog.ROUTES, *actor.ROUTES],
        middleware=[Middleware(Guard, token=identity.token, limits=limits)],
        exception_handlers={
            Refused: on_refused,
            HTTPException: on_http_error,
            Exception: on_fault,
        },
        lifespan=lifespan,
    )
    # A path that is no call is refused, not sent elsewhere.
    app.router.redirect_slashes = False
    return app
