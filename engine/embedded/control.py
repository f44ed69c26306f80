"""Owns the control half's plain parts: identity, models and sessions."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.embedded import wire
from engine.embedded.runs import Session
from engine.embedded.state import Engine, JsonObject, engine_of, iso, json_answer
from engine.embedded.wire import Refused

WORKSPACE = "embedded"
MODEL_SPEC = "embedded-model"


def caps(engine: Engine) -> JsonObject:
    """Return the limits by which the SDK splits and refuses batches."""
    return {
        "max_batch_size": engine.limits.max_batch_size,
        "max_tokens_per_request": engine.limits.max_tokens_per_request,
        "max_seq_len": engine.base.context,
    }


async def verify_key(_request: Request) -> Response:
    """Say who the caller is."""
    return json_answer(
        {
            "api_key_tid": "embedded",
            "api_key_name": "embedded",
            "user_cuid": "embedded-user",
            "username": "embedded",
            "display_name": None,
            "workspace_cuid": WORKSPACE,
            "workspace_name": WORKSPACE,
            "workspace_type": "personal",
            "expires_at": None,
        }
    )


async def bootstrap(request: Request) -> Response:
    """Say that every SDK version may try."""
    version = request.query_params.get("sdk_version", "")
    status = {"status": "compatible", "sdk_version": version}
    return json_answer({"compatibility": status, "notices": []})


async def models(request: Request) -> Response:
    """List the one model."""
    engine = engine_of(request)
    limit, offset = page(request)
    started = iso(0)
    model = {
        "cuid": MODEL_SPEC,
        "alias": engine.identity.alias,
        "model_id": str(engine.base.folder),
        "context_length": engine.base.context,
        "train_available": True,
        "sample_available": True,
        "trainer": caps(engine),
        "sampler": caps(engine),
        "created_at": started,
        "updated_at": started,
    }
    return json_answer({"items": [model][offset:], "total": 1, "limit": limit, "offset": offset})


def page(request: Request) -> tuple[int, int]:
    """Return (limit, offset) of a list request; raises Refused."""
    values = []
    for name, default in (("limit", "100"), ("offset", "0")):
        text = request.query_params.get(name, default)
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise Refused(400, "invalid_query_params", f"{name} must be a count, got {text[:40]!r}")
        values.append(int(text))
    return min(values[0], 1000), values[1]


def cursor(limit: int, offset: int, total: int) -> JsonObject:
    """Return a list's position."""
    return {"limit": limit, "offset": offset, "total": total}


def session_head(session: Session) -> JsonObject:
    """Return the fields that every view of a session has."""
    return {
        "service_session_cuid": session.session,
        "workspace_cuid": WORKSPACE,
        "status": "ENDED" if session.ended else "RUNNING",
        "sdk_version": session.sdk_version,
        "created_at": iso(session.created_at),
        "updated_at": iso(session.created_at),
    }


async def open_session(request: Request) -> Response:
    """Open a session."""
    body = wire.decode_json(await request.body(), wire.NewSession)
    return json_answer(session_head(engine_of(request).registry.open_session(body.sdk_version)))


async def list_sessions(request: Request) -> Response:
    """List the sessions of this engine process."""
    limit, offset = page(request)
    sessions = list(reversed(engine_of(request).registry.sessions.values()))
    shown = [session_head(session) for session in sessions[offset : offset + limit]]
    return json_answer({"service_sessions": shown, "cursor": cursor(limit, offset, len(sessions))})


async def get_session(request: Request) -> Response:
    """Show one session with its runs."""
    session = engine_of(request).registry.session(request.path_params["session"])
    runs = {
        "training_run_cuids": session.training_runs,
        "sampling_run_cuids": session.sampling_runs,
    }
    return json_answer(session_head(session) | runs)


async def renew_session(request: Request) -> Response:
    """Keep a session; it never expires here."""
    session = engine_of(request).registry.session(request.path_params["session"])
    return json_answer(session_head(session))


async def close_session(request: Request) -> Response:
    """End a session; one that this process does not know has ended already."""
    registry = engine_of(request).registry
    session = registry.sessions.get(request.path_params["session"])
    if session is not None:
        registry.close_session(session)
    return json_answer({})


async def telemetry(_request: Request) -> Response:
    """Accept and forget."""
    return json_answer({})


API = "/api/openapi/v1"
SESSION = API + "/service-sessions/{session}"
ROUTES = [
    Route(f"{API}/api-key/verify", verify_key),
    Route("/api/sdk/bootstrap", bootstrap),
    Route("/api/models", models),
    Route("/api/telemetry/event", telemetry, methods=["POST"]),
    Route(f"{API}/service-sessions", open_session, methods=["POST"]),
    Route(f"{API}/service-sessions", list_sessions),
    Route(SESSION, get_session),
    Route(f"{SESSION}/renew", renew_session, methods=["POST"]),
    Route(f"{SESSION}/close", close_session, methods=["POST"]),
]
