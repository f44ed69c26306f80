"""Owns what lives in memory only: sessions, training runs with their events, sampling runs.

An event's terminal answer is kept as bytes, so asking again gives the same answer; posting an
event id twice answers `event_exists` and never runs it twice. Runs end with the process: after a
restart their clients are told `run_not_found`, and restore from a checkpoint on disk.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from typing import TypeVar

import msgspec

from engine.embedded import wire
from engine.embedded.calls import InputError
from engine.embedded.checkpoints import CheckpointStore, RunRecord
from engine.embedded.compute import BaseModel
from engine.embedded.training import Result, Trainer, Usage
from engine.embedded.wire import Refused
from engine.embedded.worker import Worker

T = TypeVar("T")
logger = logging.getLogger("rolltape.engine")

MAX_SESSIONS = 1024
MAX_TRAINING_RUNS = 64
MAX_SAMPLING_RUNS = 4096
"""Bounds for clients that died without closing; beyond them the least recently used is dropped."""

MAX_WAITING_EVENTS = 64
"""Events of one run that wait for their end; the SDK sends at most 16."""

KEPT_EVENTS = 32
"""Finished events of one run whose answers can still be asked for."""


class Session(msgspec.Struct):
    """One ServiceClient."""

    session: str
    sdk_version: str
    created_at: float
    training_runs: list[str] = []
    sampling_runs: list[str] = []
    ended: bool = False


class SamplingRun(msgspec.Struct, frozen=True):
    """One SamplingClient: which weights it samples ("" is the base model)."""

    sampling_run: str
    session: str
    weights: str
    created_at: float


class Event:
    """One accepted event and, in time, its terminal answer."""

    def __init__(self, event_id: str, kind: wire.EventType) -> None:
        self.event_id = event_id
        self.kind = kind
        self.done = asyncio.Event()
        self.answer: bytes | None = None

    def body(self) -> bytes:
        """Return the MessagePack answer: terminal, or `running`."""
        return self.answer if self.answer is not None else self.encode(status="running")

    def encode(self, **fields: object) -> bytes:
        """Return a MessagePack answer about this event."""
        head = {"version": 1, "event_id": self.event_id, "type": self.kind}
        return msgspec.msgpack.encode({**head, **fields})


class TrainingRun:
    """One TrainingClient: its events in order, executed on the compute thread."""

    def __init__(self, record: RunRecord, trainer: Trainer, worker: Worker) -> None:
        self.record = record
        self.used_at = time.time()
        self._trainer = trainer
        self._worker = worker
        self._next_index = 1
        self._events: OrderedDict[str, Event] = OrderedDict()

    def __repr__(self) -> str:
        return f"<TrainingRun {self.record.training_run}: {self._next_index - 1} events>"

    @property
    def started(self) -> bool:
        """Whether an event was accepted, after which the adapter's source is settled."""
        return self._next_index > 1

    def find(self, event_id: str) -> Event | None:
        """Return a known event."""
        return self._events.get(event_id)

    def accept(self, envelope: wire.Envelope) -> Event:
        """Queue the next event; raises Refused for a repeated, misplaced or excess one."""
        self.used_at = time.time()
        if envelope.event_id in self._events:
            raise Refused(409, "event_exists", f"event {envelope.event_id} was accepted before")
        if envelope.metadata.index != self._next_index:
            raise Refused(
                409,
                "event_out_of_order",
                f"event index {envelope.metadata.index} of {self.record.training_run}: expected "
                f"{self._next_index}",
            )
        waiting = sum(not event.done.is_set() for event in self._events.values())
        if waiting >= MAX_WAITING_EVENTS:
            raise Refused(429, "too_many_requests", f"{waiting} events of this run are waiting")
        self._next_index += 1
        event = Event(envelope.event_id, envelope.type)
        self._events[event.event_id] = event
        payload, step = bytes(envelope.payload), envelope.metadata.step
        future = self._worker.submit(lambda: self._run(event, step, payload))
        future.add_done_callback(lambda done: self._finish(event, done))
        return event

    def _run(self, event: Event, step: int, payload: bytes) -> None:
        """Execute one event and set its terminal answer; on the compute thread."""
        usage = Usage()
        try:
            result = self._trainer.execute(event.kind, step, payload, usage)
        except Refused as exc:
            event.answer = _failed(event, exc.code, exc.message, usage)
        except InputError as exc:
            event.answer = _failed(event, "invalid_input", str(exc), usage)
        else:
            event.answer = _succeeded(event, result, usage)

    def _finish(self, event: Event, done: "asyncio.Future[None]") -> None:
        """Wake whoever waits; a fault that nobody foresaw becomes a failed event, and is logged."""
        if event.answer is None:
            logger.error("%s failed: %r", event.kind, done.exception())
            message = f"the engine failed on {event.kind}; its log (engine.log) says why"
            event.answer = _failed(event, "engine_fault", message, Usage())
        event.done.set()
        finished = [key for key, known in self._events.items() if known.done.is_set()]
        for key in finished[:-KEPT_EVENTS]:
            del self._events[key]


def _succeeded(event: Event, result: Result, usage: Usage) -> bytes:
    tokens = {"input_tokens": usage.input_tokens, "output_tokens": 0}
    return event.encode(status="succeeded", result=result, usage=tokens)


def _failed(event: Event, code: str, message: str, usage: Usage) -> bytes:
    tokens = {"input_tokens": usage.input_tokens, "output_tokens": 0}
    return event.encode(status="failed", error={"code": code, "message": message[:2000]}, usage=tokens)


class Registry:
    """Everything clients hold at the moment; used from the event loop only."""

    def __init__(self, base: BaseModel, store: CheckpointStore, worker: Worker) -> None:
        self._base = base
        self._store = store
        self._worker = worker
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.training_runs: OrderedDict[str, TrainingRun] = OrderedDict()
        self.sampling_runs: OrderedDict[str, SamplingRun] = OrderedDict()

    def __repr__(self) -> str:
        return (
            f"<Registry {len(self.sessions)} sessions, {len(self.training_runs)} training runs, "
            f"{len(self.sampling_runs)} sampling runs>"
        )

    def open_session(self, sdk_version: str) -> Session:
        """Return a new session."""
        session = Session(f"session-{secrets.token_hex(8)}", sdk_version, time.time())
        _put(self.sessions, session.session, session, MAX_SESSIONS)
        return session

    def session(self, session_id: str) -> Session:
        """Return a session; raises Refused 404."""
        return _get(self.sessions, session_id, "service_session")

    def close_session(self, session: Session) -> None:
        """End a session and drop its runs; its checkpoints stay. Safe to repeat."""
        session.ended = True
        for training_run in session.training_runs:
            self.training_runs.pop(training_run, None)
        for sampling_run in session.sampling_runs:
            self.sampling_runs.pop(sampling_run, None)

    def open_training_run(self, session: Session, request: wire.NewTrainingRun) -> TrainingRun:
        """Return a new training run; its adapter is made by its first event."""
        record = RunRecord(
            training_run=f"run-{secrets.token_hex(8)}",
            session=session.session,
            base_fingerprint=self._base.fingerprint,
            lora_rank=request.lora_rank,
            train_mlp=request.train_mlp,
            train_attn=request.train_attn,
            train_unembed=request.train_unembed,
            seed=request.seed,
            source_checkpoint_uri=request.source_checkpoint_uri,
            restore_optimizer=request.restore_optimizer,
            created_at=time.time(),
        )
        self._store.add_run(record)
        trainer = Trainer(self._base, self._store, record.training_run)
        run = TrainingRun(record, trainer, self._worker)
        session.training_runs.append(record.training_run)
        _put(self.training_runs, record.training_run, run, MAX_TRAINING_RUNS)
        return run

    def training_run(self, training_run: str) -> TrainingRun:
        """Return a live training run; raises Refused 404."""
        return _get(self.training_runs, training_run, "run")

    def find_event(self, event_id: str) -> Event:
        """Return an event of any run; raises Refused 404."""
        for run in reversed(self.training_runs.values()):
            event = run.find(event_id)
            if event is not None:
                return event
        raise Refused(404, "event_not_found", f"no event {event_id[:80]!r} in this engine process")

    def open_sampling_run(self, session: Session, weights: str) -> SamplingRun:
        """Return a new sampling run on a checkpoint URI, or on the base model for ""."""
        run = SamplingRun(f"sampling-{secrets.token_hex(8)}", session.session, weights, time.time())
        session.sampling_runs.append(run.sampling_run)
        _put(self.sampling_runs, run.sampling_run, run, MAX_SAMPLING_RUNS)
        return run

    def sampling_run(self, sampling_run: str) -> SamplingRun:
        """Return a live sampling run; raises Refused 404."""
        return _get(self.sampling_runs, sampling_run, "sampling_run")


def _put(known: "OrderedDict[str, T]", key: str, value: T, limit: int) -> None:
    known[key] = value
    while len(known) > limit:
        known.popitem(last=False)


def _get(known: "OrderedDict[str, T]", key: str, noun: str) -> T:
    value = known.get(key)
    if value is None:
        raise Refused(
            404,
            f"{noun}_not_found",
            f"no {noun.replace('_', ' ')} {key[:80]!r} in this engine process: it ended, or the "
            "engine was restarted (restore from a checkpoint)",
        )
    known.move_to_end(key)
    return value
