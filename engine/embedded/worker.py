"""Owns the one thread that computes: trainer events first in first out, sampling batched between.

The event loop only ever parses, waits and answers. Between two events every sampling request that
waits for the same weights is taken at once; when both kinds wait they alternate, so neither
starves. Batching cannot change a result: a sample depends on its own request and weights only.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from engine.embedded.calls import InputError, SampleRequest, SampleResult
from engine.embedded.wire import Refused

T = TypeVar("T")
logger = logging.getLogger("rolltape.engine")

MAX_BATCH_SEQUENCES = 256
"""Sequences decoded together; bounds memory (one key-value cache each) and the wait of others."""


class Job(NamedTuple, Generic[T]):
    """Something to compute, and where its result is awaited."""

    work: Callable[[], T]
    future: "asyncio.Future[T]"


class SampleJob(NamedTuple):
    """One sampling request and the weights it samples ("" is the base model)."""

    weights: str
    request: SampleRequest
    future: "asyncio.Future[SampleResult]"


SampleBatch = Callable[[str, Sequence[SampleRequest]], list[SampleResult]]


class Worker:
    """A compute thread fed from one event loop."""

    def __init__(self, sample: SampleBatch) -> None:
        self._sample = sample
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Condition()
        self._jobs: deque[Job[Any]] = deque()
        self._samples: deque[SampleJob] = deque()
        self._stopping = False
        self.busy_seconds = 0.0
        """Time spent computing so far."""
        self._thread = threading.Thread(target=self._run, name="engine-compute", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Worker {len(self._jobs)} events, {len(self._samples)} samples waiting>"

    @property
    def waiting(self) -> int:
        """How many jobs of both kinds have not been taken yet."""
        return len(self._jobs) + len(self._samples)

    def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Queue `work`; call from the loop. Its exception becomes the future's."""
        future: asyncio.Future[T] = self._loop.create_future()
        with self._wake:
            self._jobs.append(Job(work, future))
            self._wake.notify()
        return future

    def submit_sample(self, weights: str, request: SampleRequest) -> "asyncio.Future[SampleResult]":
        """Queue one sampling request; call from the loop. A cancelled one is skipped."""
        future: asyncio.Future[SampleResult] = self._loop.create_future()
        with self._wake:
            self._samples.append(SampleJob(weights, request, future))
            self._wake.notify()
        return future

    def stop(self) -> None:
        """Let the thread end after the job it is at; what still waits is never answered."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._jobs or self._samples)
                if self._stopping:
                    return
                job = self._jobs.popleft() if self._jobs else None
                batch = self._take_batch()
            started = time.perf_counter()
            if batch:
                self._sample_batch(batch)
            if job is not None:
                self._settle(job.future, job.work)
            self.busy_seconds += time.perf_counter() - started

    def _take_batch(self) -> list[SampleJob]:
        """Take the waiting requests for the weights of the oldest one; the lock is held."""
        while self._samples and self._samples[0].future.cancelled():
            self._samples.popleft()
        batch: list[SampleJob] = []
        rest: deque[SampleJob] = deque()
        sequences = 0
        for sample in self._samples:
            if sample.future.cancelled():
                continue
            fits = not batch or sequences + sample.request.num_samples <= MAX_BATCH_SEQUENCES
            if fits and (not batch or sample.weights == batch[0].weights):
                batch.append(sample)
                sequences += sample.request.num_samples
            else:
                rest.append(sample)
        self._samples = rest
        return batch

    def _sample_batch(self, batch: list[SampleJob]) -> None:
        weights = batch[0].weights
        results, fault = attempt(lambda: self._sample(weights, [job.request for job in batch]))
        if results is not None:
            for job, result in zip(batch, results, strict=True):
                self._post(job.future, result, None)
        elif len(batch) > 1 and isinstance(fault, InputError | Refused):
            # One bad request must not fail its neighbours.
            for job in batch:
                self._sample_batch([job])
        else:
            for job in batch:
                self._post(job.future, None, fault)

    def _settle(self, future: "asyncio.Future[T]", work: Callable[[], T]) -> None:
        if not future.cancelled():
            self._post(future, *attempt(work))

    def _post(self, future: "asyncio.Future[T]", result: T | None, exc: Exception | None) -> None:
        self._loop.call_soon_threadsafe(_resolve, future, result, exc)


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `work` returns, or its exception: the thread must outlive any fault in a job."""
    try:
        return work(), None
    except Exception as exc:  # logged where it is not one that a request can cause
        if not isinstance(exc, InputError | Refused):
            logger.exception("a job failed")
        return None, exc


def _resolve(future: "asyncio.Future[Any]", result: object, exc: Exception | None) -> None:
    if future.done():
        return
    if exc is None:
        future.set_result(result)
    else:
        future.set_exception(exc)
