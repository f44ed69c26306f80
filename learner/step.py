"""Owns one update: the plan is on disk, then its micro-batches are sent, then the trainer acknowledges.

Between the first forward_backward and the acknowledged optim_step nothing is ever tried again in place:
gradients may have stayed behind at the trainer. Whoever calls restores a checkpoint instead.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from core.arrays import Float32
from core.batch import StepBatch
from core.datum import DatumArrays
from core.digests import payload_digest
from core.errors import ReplayError, TrainerBroken
from core.events import StepPlanned
from engine.datums import PreparedBatch, prepare
from engine.sequence_loss import LOSS as SEQUENCE_LOSS
from engine.trainer import Trainer
from learner.batch import adam_settings

Metrics = dict[str, float]
Probe = Callable[[str], None]


class Prepared(NamedTuple):
    """A logical batch as the SDK will get it."""

    micro_batches: tuple[PreparedBatch, ...]
    digests: tuple[str, ...]
    """Per datum, in datum order, computed from the finished objects."""


class Sent(NamedTuple):
    """What the trainer said of one update."""

    metrics: Metrics
    """Names begin with `trainer/`."""
    seconds: Metrics
    engine_digest: str


def prepare_batch(batch: StepBatch) -> Prepared:
    """Return the SDK's objects of every micro-batch, and the digests of what will be sent."""
    digests = [""] * len(batch.datums)
    prepared = []
    for micro in batch.micro_batches:
        one = prepare([batch.datums[position] for position in micro])
        prepared.append(one)
        for position, digest in zip(micro, one.digests, strict=True):
            digests[position] = digest
    return Prepared(tuple(prepared), tuple(digests))


def send(trainer: Trainer, batch: StepBatch, prepared: Prepared, planned: StepPlanned, probe: Probe) -> Sent:
    """Send the micro-batches and apply the update; after an EngineError the trainer is unusable."""
    if prepared.digests != planned.datum_digests:
        raise ReplayError(
            f"step {planned.step}: what is about to be sent is not what was planned; nothing was sent, "
            f"`replay --step {planned.step}` names the place"
        )
    started = time.perf_counter()
    gaps = _Gaps()
    for number, (micro, one) in enumerate(zip(batch.micro_batches, prepared.micro_batches, strict=True)):
        probe(f"micro_batch:{number}")
        logprobs = trainer.forward_backward(one, planned.loss, planned.loss_config)
        gaps.add([batch.datums[position] for position in micro], logprobs)
    probe("before_optim")
    backward = time.perf_counter()
    result = trainer.optim_step(planned.adam.learning_rate, adam_settings(planned.adam))
    probe("after_optim")
    engine_digest = _received(planned, prepared, result.engine_digest)
    seconds = {"train": backward - started, "optim": time.perf_counter() - backward}
    metrics = {f"trainer/{name}": float(value) for name, value in result.metrics.items()}
    return Sent(metrics | gaps.metrics(), seconds, engine_digest)


def _received(planned: StepPlanned, prepared: Prepared, engine_digest: str) -> str:
    """Return the engine's digest of what it received; raises TrainerBroken when it is not what was planned.

    The hosted service tells none. Nor can a sequence loss be compared: it sends gradients, which depend on
    the trainer's weights, in the place of the planned advantages.
    """
    if planned.loss == SEQUENCE_LOSS:
        return ""
    expected = payload_digest([one.digests for one in prepared.micro_batches])
    if engine_digest not in {"", expected}:
        raise TrainerBroken(
            f"step {planned.step}: the engine received payloads of digest {engine_digest!r}, planned "
            f"were {expected!r}: the update is discarded and sent again from the last checkpoint"
        )
    return engine_digest


class _Gaps:
    """Sampled against trainer's logprobs, over the trained tokens of a step."""

    def __init__(self) -> None:
        self._gaps: list[Float32] = []

    def add(self, datums: Sequence[DatumArrays], logprobs: Sequence[Float32]) -> None:
        for datum, values in zip(datums, logprobs, strict=True):
            trained = datum.advantages != 0
            self._gaps.append(values[: len(trained)][trained] - datum.logprobs[trained])

    def metrics(self) -> Metrics:
        gaps = np.concatenate(self._gaps).astype(np.float64) if self._gaps else np.zeros(0)
        if not gaps.size:
            return {}
        sizes = np.abs(gaps)
        return {
            "trainer/logprob_gap": float(sizes.mean()),
            "trainer/logprob_gap_max": float(sizes.max()),
            "trainer/ratio_mean": float(np.exp(gaps).mean()),
            "trainer/kl_sampled": float(-gaps.mean()),
        }
