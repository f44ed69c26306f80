"""Owns the checkpoints on disk: names confined to one folder, lifetimes, and their collection.

Layout: `runs/<training run>/run.json` says how the adapter was made; `weights/<name>.npz` and
`state/<name>.npz` hold arrays, each with a `<name>.json` beside it. The JSON is renamed into place
last, so a checkpoint exists completely or not at all. Arrays are never unpickled, and are compared
with their recorded SHA-256 before they are used.
"""

import hashlib
import io
import os
import re
import secrets
import threading
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.embedded.wire import Refused, Save

Kind = Literal["weights", "state"]
Arrays = Mapping[str, NDArray[np.generic]]
S = TypeVar("S")

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?")
MAX_NAME = 200
URI = re.compile(r"trio://(run-[0-9a-f]{16})/(weights|state)/([A-Za-z0-9._-]{1,200})")


class RunRecord(msgspec.Struct, frozen=True):
    """How a training run's adapter was made."""

    training_run: str
    session: str
    base_fingerprint: str
    lora_rank: int
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
    seed: int | None
    source_checkpoint_uri: str
    restore_optimizer: bool
    created_at: float
    """Unix seconds."""


class CheckpointRecord(msgspec.Struct, frozen=True):
    """One saved set of arrays."""

    cuid: str
    training_run: str
    kind: Kind
    name: str
    step: int
    """Optimizer steps behind these weights."""
    size_bytes: int
    sha256: str
    created_at: float
    """Unix seconds."""
    expires_at: float | None
    temporary: bool

    @property
    def uri(self) -> str:
        """The address that the SDK carries."""
        return f"trio://{self.training_run}/{self.kind}/{self.name}"


def check_name(name: str) -> str:
    """Return `name` when it can be a file's name and nothing else; raises Refused."""
    if len(name) > MAX_NAME or NAME.fullmatch(name) is None:
        raise Refused(
            400,
            "invalid_checkpoint_name",
            f"checkpoint name {name[:80]!r} must be 1 to {MAX_NAME} letters, digits, '.', '_' or "
            "'-', beginning with a letter or digit and not ending in '.'",
        )
    return name


def write_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` for its owner only, durably, completely or not at all."""
    temporary = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class CheckpointStore:
    """Every checkpoint under one folder, indexed in memory; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "runs"
        self._lock = threading.Lock()
        self._runs: dict[str, RunRecord] = {}
        self._checkpoints: dict[str, CheckpointRecord] = {}
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._scan()

    def __repr__(self) -> str:
        return f"<CheckpointStore {len(self._runs)} runs, {len(self._checkpoints)} checkpoints>"

    def _scan(self) -> None:
        for stale in self._folder.glob("**/.*.tmp"):
            stale.unlink(missing_ok=True)
        for path in sorted(self._folder.glob("run-*/run.json")):
            record = _read(path, RunRecord)
            if record is not None and record.training_run == path.parent.name:
                self._runs[record.training_run] = record
        for path in sorted(self._folder.glob("run-*/*/*.json")):
            checkpoint = _read(path, CheckpointRecord)
            if checkpoint is not None and path == self._path(checkpoint, ".json"):
                self._checkpoints[checkpoint.uri] = checkpoint

    def _path(self, record: CheckpointRecord, suffix: str) -> Path:
        return self._folder / record.training_run / record.kind / f"{record.name}{suffix}"

    def add_run(self, record: RunRecord) -> None:
        """Remember how a run's adapter is made, also across restarts."""
        folder = self._folder / record.training_run
        for kind in ("weights", "state"):
            (folder / kind).mkdir(parents=True, exist_ok=True, mode=0o700)
        write_file(folder / "run.json", msgspec.json.encode(record))
        with self._lock:
            self._runs[record.training_run] = record

    def run(self, training_run: str) -> RunRecord:
        """Return a run's record; raises Refused 404."""
        with self._lock:
            record = self._runs.get(training_run)
        if record is None:
            raise Refused(404, "training_run_not_found", f"no training run {training_run[:80]!r}")
        return record

    def runs(self) -> list[RunRecord]:
        """Return all runs, newest first."""
        with self._lock:
            return sorted(self._runs.values(), key=lambda run: -run.created_at)

    def save(
        self, training_run: str, kind: Kind, request: Save, arrays: Arrays, *, step: int
    ) -> CheckpointRecord:
        """Write one checkpoint durably; raises Refused 409 when the name is taken."""
        uri = f"trio://{training_run}/{kind}/{check_name(request.name)}"
        if not request.overwrite and self._live(uri) is not None:
            raise Refused(409, "checkpoint_exists", f"{uri} exists already: choose a name that is new")
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **dict(arrays))
        data = buffer.getvalue()
        now = time.time()
        record = CheckpointRecord(
            cuid=f"ckpt-{secrets.token_hex(8)}",
            training_run=training_run,
            kind=kind,
            name=request.name,
            step=step,
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            created_at=now,
            expires_at=None if request.ttl_seconds is None else now + request.ttl_seconds,
            temporary=request.visibility == "TEMPORARY",
        )
        write_file(self._path(record, ".npz"), data)
        write_file(self._path(record, ".json"), msgspec.json.encode(record))
        with self._lock:
            self._checkpoints[uri] = record
        return record

    def _live(self, uri: str) -> CheckpointRecord | None:
        with self._lock:
            record = self._checkpoints.get(uri)
        if record is None or (record.expires_at is not None and record.expires_at <= time.time()):
            return None
        return record

    def find(self, uri: str) -> CheckpointRecord:
        """Return the record behind a URI; raises Refused 404 when it is absent or expired."""
        record = self._live(uri) if URI.fullmatch(uri) else None
        if record is None:
            raise Refused(
                404,
                "checkpoint_not_found",
                f"no checkpoint {uri[:300]!r} here: it was deleted, its lifetime ended, or it "
                "belongs to another run directory",
            )
        return record

    def by_cuid(self, cuid: str) -> CheckpointRecord:
        """Return the record with this id; raises Refused 404."""
        for record in self.checkpoints():
            if record.cuid == cuid:
                return record
        raise Refused(404, "checkpoint_not_found", f"no checkpoint with id {cuid[:80]!r}")

    def checkpoints(self, training_run: str | None = None) -> list[CheckpointRecord]:
        """Return the live checkpoints (of one run), newest first."""
        now = time.time()
        with self._lock:
            records = list(self._checkpoints.values())
        live = [
            record
            for record in records
            if (training_run is None or record.training_run == training_run)
            and (record.expires_at is None or record.expires_at > now)
        ]
        return sorted(live, key=lambda record: (-record.created_at, record.uri))

    def load(self, record: CheckpointRecord) -> dict[str, NDArray[np.generic]]:
        """Return a checkpoint's arrays; raises Refused when the file is gone or damaged."""
        path = self._path(record, ".npz")
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise Refused(404, "checkpoint_not_found", f"cannot read {record.uri}: {exc}") from exc
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise Refused(409, "checkpoint_damaged", f"{path} differs from what was saved: restore another")
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except (ValueError, zipfile.BadZipFile) as exc:
            raise Refused(409, "checkpoint_damaged", f"cannot decode {path}: {exc}") from exc

    def delete(self, record: CheckpointRecord) -> None:
        """Forget a checkpoint and remove its files; safe to repeat."""
        with self._lock:
            if self._checkpoints.get(record.uri) != record:
                return
            del self._checkpoints[record.uri]
        self._path(record, ".json").unlink(missing_ok=True)
        self._path(record, ".npz").unlink(missing_ok=True)

    def collect(self) -> int:
        """Delete every checkpoint whose lifetime has ended; returns how many."""
        now = time.time()
        with self._lock:
            records = list(self._checkpoints.values())
        ended = [r for r in records if r.expires_at is not None and r.expires_at <= now]
        for record in ended:
            self.delete(record)
        return len(ended)


def _read(path: Path, shape: type[S]) -> S | None:
    """Return a stored record, or None when the file is not one (it is then left alone)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=shape)
    except (OSError, msgspec.DecodeError):
        return None
