"""The compute thread: order of events, batches of samples, and faults that stay with their own job."""

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from engine.embedded.calls import InputError, SampleRequest, SampleResult
from engine.embedded.worker import MAX_BATCH_SEQUENCES, Worker

EMPTY = SampleResult([], None, None)


class Script:
    """A sampler that records its batches and waits at a gate, so that a queue can build up."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.gate = threading.Event()
        self.done: list[str] = []
        self.threads: set[int] = set()

    def sample(self, weights: str, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Answer a batch; seed 13 is refused, seed 666 breaks."""
        seeds = [request.seed for request in requests]
        if 13 in seeds:
            raise InputError("unlucky")
        if 666 in seeds:
            raise ZeroDivisionError
        self.done.append(f"{weights}:{','.join(map(str, seeds))}")
        return [EMPTY] * len(requests)

    def event(self, name: str) -> str:
        """Run an event."""
        self.started.set()
        self.gate.wait(10)
        self.threads.add(threading.get_ident())
        self.done.append(name)
        return name


def request(seed: int, count: int = 1) -> SampleRequest:
    """Return a request known by its seed."""
    return SampleRequest(np.array([1], np.int32), max_tokens=1, seed=seed, num_samples=count)


def test_events_keep_their_order_and_samples_share_batches() -> None:
    """Between two events all waiting requests for the oldest one's weights run as one batch."""

    async def scenario() -> None:
        script = Script()
        worker = Worker(script.sample)
        jobs: list[asyncio.Future[object]] = [worker.submit(lambda: script.event("a"))]
        await asyncio.to_thread(script.started.wait, 10)
        jobs += [worker.submit(lambda name=name: script.event(name)) for name in "bcd"]
        jobs += [worker.submit_sample(*pair) for pair in _pairs()]
        assert worker.waiting == 9
        assert repr(worker) == "<Worker 3 events, 6 samples waiting>"
        script.gate.set()
        await asyncio.gather(*jobs)
        assert script.done == ["a", "v1:0,2,5", "b", "v2:1,4", "c", "v1:3", "d"]
        assert script.threads != {threading.get_ident()}
        assert len(script.threads) == 1
        worker.stop()

    def _pairs() -> list[tuple[str, SampleRequest]]:
        weights = ["v1", "v2", "v1", "v1", "v2", "v1"]
        sizes = [1, 1, 1, MAX_BATCH_SEQUENCES, 1, 1]
        return [(w, request(seed, size)) for seed, (w, size) in enumerate(zip(weights, sizes, strict=True))]

    asyncio.run(scenario())


def test_faults_stay_with_their_job() -> None:
    """A refused request leaves its batch, an unforeseen fault fails it, and the thread goes on."""

    async def scenario() -> None:
        script = Script()
        script.gate.set()
        worker = Worker(script.sample)
        futures = [worker.submit_sample("", request(seed)) for seed in (1, 13, 2)]
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert results[0] is EMPTY
        assert results[2] is EMPTY
        assert isinstance(results[1], InputError)
        with pytest.raises(ZeroDivisionError):
            await worker.submit_sample("", request(666))
        with pytest.raises(ZeroDivisionError):
            await worker.submit(lambda: 1 // 0)
        assert await worker.submit(lambda: script.event("alive")) == "alive"
        worker.stop()

    asyncio.run(scenario())


def test_a_cancelled_job_is_not_computed() -> None:
    """What nobody waits for any more is skipped, whether event or request."""

    async def scenario() -> None:
        script = Script()
        worker = Worker(script.sample)
        first = worker.submit(lambda: script.event("first"))
        await asyncio.to_thread(script.started.wait, 10)
        dropped = [worker.submit_sample("", request(seed)) for seed in (1, 2)]
        kept = worker.submit_sample("", request(3))
        event = worker.submit(lambda: script.event("dropped"))
        for future in (*dropped, event):
            future.cancel()
        script.gate.set()
        await first
        await kept
        assert await worker.submit(lambda: script.event("last")) == "last"
        assert script.done == ["first", ":3", "last"]
        assert worker.busy_seconds > 0
        worker.stop()

    asyncio.run(scenario())
