"""Owns the lists that the SDK's RestClient shows: training runs and checkpoints, also older ones."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.embedded.checkpoints import CheckpointRecord, RunRecord
from engine.embedded.control import API, MODEL_SPEC, WORKSPACE, cursor, page
from engine.embedded.leases import adapter
from engine.embedded.state import Engine, JsonObject, engine_of, iso, json_answer
from engine.embedded.wire import Refused


def run_view(engine: Engine, run: RunRecord) -> JsonObject:
    """Return one training run as the SDK lists it."""
    live = engine.registry.training_runs.get(run.training_run)
    used = iso(run.created_at if live is None else live.used_at)
    shape = adapter(run)
    return shape | {
        "training_run_cuid": run.training_run,
        "base_model": str(engine.base.folder),
        "service_session_cuid": run.session,
        "workspace_cuid": WORKSPACE,
        "status": "ENDED" if live is None else "RUNNING",
        "run_index": 1,
        "model_spec_cuid": MODEL_SPEC,
        "is_lora": True,
        "source_checkpoint_uri": run.source_checkpoint_uri or None,
        "restore_optimizer": run.restore_optimizer,
        "corrupted": False,
        "training_params": shape | {"restore_optimizer": run.restore_optimizer},
        "created_at": iso(run.created_at),
        "updated_at": used,
    }


async def list_runs(request: Request) -> Response:
    """List every training run of this run directory, newest first."""
    engine = engine_of(request)
    limit, offset = page(request)
    runs = engine.store.runs()
    shown = [run_view(engine, run) for run in runs[offset : offset + limit]]
    return json_answer({"training_runs": shown, "cursor": cursor(limit, offset, len(runs))})


async def get_run(request: Request) -> Response:
    """Show one training run."""
    engine = engine_of(request)
    return json_answer(run_view(engine, engine.store.run(request.path_params["run"])))


def checkpoint_view(engine: Engine, record: CheckpointRecord) -> JsonObject:
    """Return one checkpoint as the SDK lists it."""
    run = engine.store.run(record.training_run)
    live = record.training_run in engine.registry.training_runs
    created = iso(record.created_at)
    return {
        "cuid": record.cuid,
        "checkpoint_cuid": record.cuid,
        "training_run_cuid": record.training_run,
        "workspace_cuid": WORKSPACE,
        "name": record.name,
        "checkpoint_type": "TRAINING" if record.kind == "state" else "SAMPLER",
        "status": "LOCAL",
        "checkpoint_uri": record.uri,
        "model": str(engine.base.folder),
        "base_model": str(engine.base.folder),
        "model_spec_cuid": MODEL_SPEC,
        "task_id": record.training_run,
        "task_created_at": iso(run.created_at),
        "task_status": "RUNNING" if live else "ENDED",
        "step": record.step,
        "path": record.uri,
        "created_at": created,
        "size_bytes": record.size_bytes,
        "lora_rank": run.lora_rank,
        "is_uploaded": False,
        "expired_at": None if record.expires_at is None else iso(record.expires_at),
    }


def checkpoint_page(request: Request, records: list[CheckpointRecord]) -> Response:
    """Return one page of checkpoints."""
    engine = engine_of(request)
    limit, offset = page(request)
    shown = [checkpoint_view(engine, record) for record in records[offset : offset + limit]]
    return json_answer({"checkpoints": shown, "cursor": cursor(limit, offset, len(records))})


async def list_checkpoints(request: Request) -> Response:
    """List every live checkpoint, newest first."""
    return checkpoint_page(request, engine_of(request).store.checkpoints())


async def list_run_checkpoints(request: Request) -> Response:
    """List the live checkpoints of one training run, newest first."""
    store = engine_of(request).store
    run = store.run(request.path_params["run"])
    return checkpoint_page(request, store.checkpoints(run.training_run))


async def delete_checkpoint(request: Request) -> Response:
    """Delete one checkpoint."""
    store = engine_of(request).store
    store.delete(store.by_cuid(request.path_params["checkpoint"]))
    return json_answer({})


async def download_url(request: Request) -> Response:
    """Refuse: the files are on this machine already."""
    record = engine_of(request).store.by_cuid(request.path_params["checkpoint"])
    raise Refused(
        409,
        "checkpoint_is_local",
        f"{record.uri} has no download address: its file lies in the run directory under "
        f"engine/runs/{record.training_run}/{record.kind}",
    )


async def status(request: Request) -> Response:
    """Show what the engine holds and does (not part of the SDK's protocol)."""
    engine = engine_of(request)
    checkpoints = engine.store.checkpoints()
    return json_answer(
        {
            "instance": engine.identity.instance,
            "model": engine.identity.alias,
            "fingerprint": engine.base.fingerprint,
            "sessions": sum(not s.ended for s in engine.registry.sessions.values()),
            "training_runs": len(engine.registry.training_runs),
            "sampling_runs": len(engine.registry.sampling_runs),
            "checkpoints": len(checkpoints),
            "checkpoint_bytes": sum(record.size_bytes for record in checkpoints),
            "waiting_jobs": engine.worker.waiting,
            "busy_seconds": engine.worker.busy_seconds,
        }
    )


async def stop(request: Request) -> Response:
    """Ask the engine process to end (not part of the SDK's protocol)."""
    request.app.state.on_stop()
    return json_answer({})


ROUTES = [
    Route(f"{API}/training-runs", list_runs),
    Route(f"{API}/training-runs/{{run}}", get_run),
    Route(f"{API}/training-runs/{{run}}/checkpoints", list_run_checkpoints),
    Route(f"{API}/checkpoints", list_checkpoints),
    Route(f"{API}/checkpoints/{{checkpoint}}", delete_checkpoint, methods=["DELETE"]),
    Route(f"{API}/checkpoints/{{checkpoint}}/download-url", download_url),
    Route("/engine/status", status),
    Route("/engine/stop", stop, methods=["POST"]),
]
