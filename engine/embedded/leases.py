"""Owns the control half's runs: who may train or sample what, and the credentials to do so."""

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.embedded import wire
from engine.embedded.checkpoints import CheckpointRecord, RunRecord
from engine.embedded.control import API, MODEL_SPEC, SESSION, WORKSPACE, caps
from engine.embedded.state import Engine, JsonObject, engine_of, iso, json_answer
from engine.embedded.wire import Refused

CREDENTIAL_SECONDS = 30 * 24 * 3600.0
"""Lifetime of a run's credential: with less than 300 s left the SDK renews before every request."""


def credentials(request: Request, engine: Engine) -> JsonObject:
    """Return where and with what token the actor half is reached: this same server."""
    return {
        "actor": {
            "actor_cuid": "embedded-actor",
            "endpoint": str(request.base_url).rstrip("/"),
            "connect_mode": "direct",
            "tls_enabled": False,
        },
        "actor_jwt": {
            "token": engine.identity.token,
            "expires_at": iso(time.time() + CREDENTIAL_SECONDS),
        },
    }


def run_head(engine: Engine, session: str) -> JsonObject:
    """Return the fields that training and sampling runs share."""
    return {
        "service_session_cuid": session,
        "workspace_cuid": WORKSPACE,
        "status": "RUNNING",
        "model_spec_cuid": MODEL_SPEC,
        "model_alias": engine.identity.alias,
        "model_id": str(engine.base.folder),
    }


def check_model(engine: Engine, base_model: str) -> None:
    """Raise Refused unless `base_model` names the one model, by alias or path."""
    if base_model not in (engine.identity.alias, str(engine.base.folder)):
        raise Refused(
            404,
            "model_not_found",
            f"no model {base_model[:200]!r}: the embedded engine has {engine.identity.alias!r} only",
        )


async def open_training_run(request: Request) -> Response:
    """Register a training run; its adapter is made by its first event."""
    engine = engine_of(request)
    session = engine.registry.session(request.path_params["session"])
    body = wire.decode_json(await request.body(), wire.NewTrainingRun)
    if body.source_checkpoint_uri:
        check_source(engine, body.source_checkpoint_uri)
    else:
        check_model(engine, body.base_model)
    run = engine.registry.open_training_run(session, body)
    return json_answer(
        run_head(engine, session.session)
        | credentials(request, engine)
        | {
            "training_run_cuid": run.record.training_run,
            "run_index": len(session.training_runs),
            "trainer": caps(engine),
            "created_at": iso(run.record.created_at),
        }
    )


def check_source(engine: Engine, uri: str) -> RunRecord:
    """Return how a training checkpoint's adapter was made; raises Refused."""
    record = engine.store.find(uri)
    if record.kind != "state":
        raise Refused(400, "checkpoint_invalid_type", f"{uri} holds sampler weights: restore a saved state")
    return check_base(engine, record)


def check_base(engine: Engine, record: CheckpointRecord) -> RunRecord:
    """Return the run of a checkpoint made on this base model; raises Refused 409."""
    run = engine.store.run(record.training_run)
    if run.base_fingerprint != engine.base.fingerprint:
        raise Refused(
            409,
            "checkpoint_other_base",
            f"{record.uri} was made on base model {run.base_fingerprint[:12]}, this engine has "
            f"{engine.base.fingerprint[:12]}",
        )
    return run


async def rebind_training_run(request: Request) -> Response:
    """Restore a checkpoint into a run that has not started."""
    engine = engine_of(request)
    run = engine.registry.training_run(request.path_params["run"])
    body = wire.decode_json(await request.body(), wire.Rebind)
    check_source(engine, body.source_checkpoint_uri)
    if run.started:
        raise Refused(409, "run_initialized", "the training run has started already")
    return json_answer(
        credentials(request, engine)
        | {
            "source_checkpoint_uri": body.source_checkpoint_uri,
            "restore_optimizer": body.restore_optimizer,
            "trainer": caps(engine),
        }
    )


async def renew_training_run(request: Request) -> Response:
    """Give a run's credential anew."""
    engine = engine_of(request)
    run = engine.registry.training_run(request.path_params["run"])
    head = run_head(engine, run.record.session) | credentials(request, engine)
    return json_answer(head | {"training_run_cuid": run.record.training_run})


async def by_checkpoint(request: Request) -> Response:
    """Say how the adapter behind a checkpoint URI was made."""
    engine = engine_of(request)
    record = engine.store.find(request.query_params.get("checkpoint_uri", ""))
    run = check_base(engine, record)
    return json_answer({"base_model": str(engine.base.folder)} | adapter(run))


def adapter(run: RunRecord) -> JsonObject:
    """Return the shape of a run's adapter."""
    return {
        "lora_rank": run.lora_rank,
        "seed": run.seed,
        "train_mlp": run.train_mlp,
        "train_attn": run.train_attn,
        "train_unembed": run.train_unembed,
    }


async def open_sampling_run(request: Request) -> Response:
    """Register a sampling run on the base model or on a checkpoint of either kind."""
    engine = engine_of(request)
    session = engine.registry.session(request.path_params["session"])
    body = wire.decode_json(await request.body(), wire.NewSamplingRun)
    check_model(engine, body.base_model)
    if body.source_checkpoint_uri:
        check_base(engine, engine.store.find(body.source_checkpoint_uri))
    run = engine.registry.open_sampling_run(session, body.source_checkpoint_uri)
    return json_answer(
        run_head(engine, session.session)
        | credentials(request, engine)
        | {
            "sampling_run_cuid": run.sampling_run,
            "run_index": len(session.sampling_runs),
            "sampler": caps(engine),
            "created_at": iso(run.created_at),
        }
    )


async def renew_sampling_run(request: Request) -> Response:
    """Give a run's credential anew."""
    engine = engine_of(request)
    run = engine.registry.sampling_run(request.path_params["run"])
    head = run_head(engine, run.session) | credentials(request, engine)
    return json_answer(head | {"sampling_run_cuid": run.sampling_run})


async def get_sampling_run(request: Request) -> Response:
    """Show one sampling run."""
    engine = engine_of(request)
    run = engine.registry.sampling_run(request.path_params["run"])
    return json_answer(
        run_head(engine, run.session)
        | {
            "sampling_run_cuid": run.sampling_run,
            "base_model": str(engine.base.folder),
            "alias": engine.identity.alias,
            "source_checkpoint_uri": run.weights or None,
            "created_at": iso(run.created_at),
            "updated_at": iso(run.created_at),
        }
    )


ROUTES = [
    Route(f"{SESSION}/training-runs", open_training_run, methods=["POST"]),
    Route(f"{SESSION}/training-runs/{{run}}", rebind_training_run, methods=["PATCH"]),
    Route(f"{SESSION}/sampling-runs", open_sampling_run, methods=["POST"]),
    Route(f"{API}/training-runs/by-checkpoint-uri", by_checkpoint),
    Route(f"{API}/training-runs/{{run}}/renew", renew_training_run, methods=["POST"]),
    Route(f"{API}/sampling-runs/{{run}}/renew", renew_sampling_run, methods=["POST"]),
    Route(f"{API}/sampling-runs/{{run}}", get_sampling_run),
]
