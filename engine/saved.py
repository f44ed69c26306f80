"""Owns the list of what is saved at the service."""

from typing import Any, NamedTuple

import pytrio

from engine.trainer import Call

PAGE = 100


class Checkpoint(NamedTuple):
    """One saved checkpoint, as the service lists it."""

    checkpoint_id: str
    training_run: str
    uri: str
    kind: str
    """"training" (a state) or "sampler" (weights)."""
    size_bytes: int | None
    created_at: float
    """Unix seconds."""
    expires_at: float | None


def list_checkpoints(rest: pytrio.RestClient, call: Call) -> list[Checkpoint]:
    """Return the workspace's checkpoints, newest first."""
    found: list[Checkpoint] = []
    while True:
        page = call("listing checkpoints", lambda: rest.list_user_checkpoints(PAGE, len(found)).result())
        found.extend(_checkpoint(item) for item in page.checkpoints)
        if not page.checkpoints or (page.cursor and len(found) >= page.cursor.total_count):
            return found


def _checkpoint(item: Any) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=item.checkpoint_id,
        training_run=item.path.removeprefix("trio://").split("/")[0],
        uri=item.path,
        kind=item.checkpoint_type,
        size_bytes=item.size_bytes,
        created_at=item.time.timestamp(),
        expires_at=None if item.expires_at is None else item.expires_at.timestamp(),
    )
