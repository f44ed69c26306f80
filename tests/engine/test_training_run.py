"""One training run's events: faults that nobody foresaw, and a bound on those that wait."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from engine.embedded import wire
from engine.embedded.checkpoints import RunRecord
from engine.embedded.runs import KEPT_EVENTS, MAX_WAITING_EVENTS, TrainingRun
from engine.embedded.wire import Refused
from engine.embedded.worker import Worker

RECORD = RunRecord("run-1", "session-1", "f", 4, True, True, True, 1, "", False, 0.0)


class Gate:
    """A model side that waits until it is let go, and breaks on `forward`."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def execute(self, kind: str, step: int, payload: bytes, usage: object) -> dict[str, object]:
        """Run one event."""
        self.gate.wait(20)
        if kind == "trainer.forward":
            raise ZeroDivisionError("nobody foresaw this")
        return {"step": step}


def envelope(index: int, kind: str = "trainer.optimize_step") -> wire.Envelope:
    """Return event number `index`."""
    alphabet = "0123456789abcdefghjkmnpqrstvwxyz"
    name = "".join(alphabet[index // 32**place % 32] for place in range(12))
    return wire.Envelope(1, f"event_{name}", kind, wire.Metadata(index, 0, "run-1"), msgspec.Raw(b"\x80"))  # type: ignore[arg-type]


def in_a_run(scenario: Any) -> None:
    """Run a scenario with a training run on a real worker."""

    async def body() -> None:
        model = Gate()
        worker = Worker(lambda weights, requests: [])
        try:
            await scenario(TrainingRun(RECORD, model, worker), model)  # type: ignore[arg-type]
        finally:
            model.gate.set()
            worker.stop()

    asyncio.run(body())


def test_a_fault_that_nobody_foresaw_is_a_failed_event_and_the_run_goes_on() -> None:
    """With a code of its own, and without the fault's text: the engine's log has it."""

    async def scenario(run: TrainingRun, model: Gate) -> None:
        model.gate.set()
        broken, good = run.accept(envelope(1, "trainer.forward")), run.accept(envelope(2))
        async with asyncio.timeout(10):
            await broken.done.wait()
            await good.done.wait()
        answer = msgspec.msgpack.decode(broken.body())
        assert (answer["status"], answer["error"]["code"]) == ("failed", "engine_fault")
        assert "engine.log" in answer["error"]["message"]
        assert "nobody foresaw" not in answer["error"]["message"]
        assert msgspec.msgpack.decode(good.body())["status"] == "succeeded"

    in_a_run(scenario)


def test_events_that_wait_are_bounded_and_a_refused_one_does_not_count() -> None:
    """A client that is told to come back sends the same index again."""

    async def scenario(run: TrainingRun, model: Gate) -> None:
        accepted = [run.accept(envelope(index)) for index in range(1, MAX_WAITING_EVENTS + 1)]
        assert msgspec.msgpack.decode(accepted[0].body())["status"] == "running"
        with pytest.raises(Refused, match="waiting") as refused:
            run.accept(envelope(MAX_WAITING_EVENTS + 1))
        assert (refused.value.status, refused.value.code) == (429, "too_many_requests")
        model.gate.set()
        async with asyncio.timeout(10):
            await accepted[-1].done.wait()
            await run.accept(envelope(MAX_WAITING_EVENTS + 1)).done.wait()

    in_a_run(scenario)


def test_old_answers_are_forgotten_and_the_newest_are_kept() -> None:
    """A client asks for what it was sent last; the memory of a long run is bounded."""

    async def scenario(run: TrainingRun, model: Gate) -> None:
        model.gate.set()
        count = KEPT_EVENTS + 5
        for index in range(1, count + 1):
            async with asyncio.timeout(10):
                await run.accept(envelope(index)).done.wait()
        kept = [index for index in range(1, count + 1) if run.find(envelope(index).event_id)]
        assert kept == list(range(count - KEPT_EVENTS + 1, count + 1))

    in_a_run(scenario)
