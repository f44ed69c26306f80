"""Owns the actor half of the protocol: events with long polls, heartbeats and sampling."""

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.embedded import wire
from engine.embedded.calls import InputError, SampleResult
from engine.embedded.runs import Event
from engine.embedded.samplers import sample_answer, sample_request
from engine.embedded.state import Engine, engine_of, json_answer
from engine.embedded.wire import Refused

MSGPACK = "application/msgpack"
FIRST_WAIT = 0.1
"""Seconds an event's POST waits for its end: a small event then needs no poll at all."""

HEARTBEAT_MS = 60_000


def check_room(engine: Engine) -> None:
    """Raise Refused 429, which the SDK retries, while too many jobs wait."""
    if engine.worker.waiting >= engine.limits.max_waiting_jobs:
        raise Refused(429, "too_many_requests", f"{engine.worker.waiting} jobs are waiting")


def event_answer(event: Event) -> Response:
    """Return an event's state."""
    return Response(event.body(), media_type=MSGPACK)


async def wait_for(event: Event, seconds: float) -> Response:
    """Return an event's state when it ends, or after `seconds`."""
    with anyio.move_on_after(seconds):
        await event.done.wait()
    return event_answer(event)


async def post_event(request: Request) -> Response:
    """Accept one event; answered within FIRST_WAIT, ended or not."""
    engine = engine_of(request)
    envelope = wire.decode_msgpack(await request.body(), wire.Envelope)
    if envelope.version != 1:
        raise Refused(400, "unsupported_version", f"event version {envelope.version}: expected 1")
    check_room(engine)
    run = engine.registry.training_run(envelope.metadata.run_id)
    return await wait_for(run.accept(envelope), FIRST_WAIT)


def preferred_wait(request: Request, longest: float) -> float:
    """Return the seconds named by a `Prefer: wait=N` header, within what we hold a poll open."""
    name, _, seconds = request.headers.get("prefer", "").partition("=")
    if name.strip() != "wait" or not (seconds.isascii() and seconds.strip().isdecimal()):
        return 0.0
    return min(float(seconds[:9]), longest)


async def get_event(request: Request) -> Response:
    """Answer an event's state, held open until it ends."""
    engine = engine_of(request)
    event = engine.registry.find_event(request.path_params["event"])
    return await wait_for(event, preferred_wait(request, engine.limits.longest_poll))


async def heartbeat(_request: Request) -> Response:
    """Say how often to call again."""
    return json_answer({"heartbeat_ms": HEARTBEAT_MS})


async def sample(request: Request) -> Response:
    """Sample; a request whose client hangs up is not computed."""
    engine = engine_of(request)
    run = engine.registry.sampling_run(request.path_params["run"])
    body = wire.decode_json(await request.body(), wire.Sample)
    plain = sample_request(body)
    if run.weights:
        engine.store.find(run.weights)
    check_room(engine)
    future = engine.worker.submit_sample(run.weights, plain)
    outcome: SampleResult | Refused | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(cancel_on_disconnect, request, group.cancel_scope)
        try:
            outcome = await future
        except InputError as exc:
            outcome = Refused(400, "invalid_input", str(exc))
        except Refused as exc:
            outcome = exc
        group.cancel_scope.cancel()
    if outcome is None:
        return Response(status_code=499)
    if isinstance(outcome, Refused):
        raise outcome
    return json_answer(sample_answer(body, run.sampling_run, outcome))


async def cancel_on_disconnect(request: Request, scope: anyio.CancelScope) -> None:
    """Cancel `scope` once the client hangs up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


ROUTES = [
    Route("/v1/events", post_event, methods=["POST"]),
    Route("/v1/events/{event}", get_event),
    Route("/v1/client/heartbeat", heartbeat, methods=["POST"]),
    Route("/v1/sampling-runs/{run}/sample", sample, methods=["POST"]),
]
