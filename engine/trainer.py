"""Owns one training run at the service: gradients, optimizer steps and saved weights, in order."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import pytrio
from numpy.typing import NDArray

from core.config import AdamSettings
from core.errors import EngineError
from engine import sequence_loss
from engine.datums import PreparedBatch, arrays_of, engine_digest

T = TypeVar("T")


class Call(Protocol):
    """Runs one SDK call, named for its error messages, with the session's watch."""

    def __call__(self, what: str, work: Callable[[], T], *, uri: str = "") -> T:
        """Return what `work` returns; raises one of our errors."""


class StepResult(NamedTuple):
    """What an acknowledged optimizer step reports."""

    metrics: dict[str, float]
    engine_digest: str
    """SHA-256 hex over the payloads the engine received for this step (see core.digests.payload_digest);
    "" on the hosted service."""


class Trainer:
    """One training run; its calls block, in order, until the service has answered.

    Each raises TrainerBroken when the run cannot go on, after which it must be restored.
    """

    def __init__(self, client: pytrio.TrainingClient, call: Call) -> None:
        self.training_run: str = client.training_run_cuid
        self._client: pytrio.TrainingClient | None = client
        self._call = call

    def __repr__(self) -> str:
        return f"<Trainer {self.training_run}{'' if self._client else ' released'}>"

    def release(self) -> None:
        """Give the run up; the session does so when it closes. Safe to repeat."""
        self._client = None

    def _open(self) -> pytrio.TrainingClient:
        if self._client is None:
            raise EngineError(f"the session of training run {self.training_run!r} is closed")
        return self._client

    def forward_backward(
        self, batch: PreparedBatch, loss: str, loss_config: Mapping[str, float]
    ) -> list[NDArray[np.float32]]:
        """Add one micro-batch's gradient; returns the trainer's logprobs, float32 [n] per datum.

        "gspo" costs one more forward pass, and what is sent are its gradients as cross-entropy weights.
        """
        client = self._open()
        if loss == sequence_loss.LOSS:
            return self._sequence_level(client, batch, loss_config)
        output = self._call(
            "forward_backward",
            lambda: client.forward_backward(
                batch.datums, loss_fn=loss, loss_fn_config=dict(loss_config)
            ).result(),
        )
        return _logprobs(output)

    def _sequence_level(
        self, client: pytrio.TrainingClient, batch: PreparedBatch, loss_config: Mapping[str, float]
    ) -> list[NDArray[np.float32]]:
        forward = self._call(
            "forward", lambda: client.forward(batch.datums, loss_fn="cross_entropy").result()
        )
        logprobs = _logprobs(forward)
        arrays = [arrays_of(datum) for datum in batch.datums]
        weights = sequence_loss.sequence_weights(arrays, logprobs, loss_config)
        sent = [
            sequence_loss.surrogate(datum, values)
            for datum, values in zip(batch.datums, weights, strict=True)
        ]
        self._call(
            "forward_backward", lambda: client.forward_backward(sent, loss_fn="cross_entropy").result()
        )
        return logprobs

    def optim_step(self, learning_rate: float, adam: AdamSettings) -> StepResult:
        """Apply the accumulated gradient; returns once the service has acknowledged it."""
        client = self._open()
        params = pytrio.AdamParams(
            learning_rate=learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=adam.grad_clip_norm,
        )
        response = self._call("optim_step", lambda: client.optim_step(params).result())
        return StepResult(*engine_digest(response.metrics))

    def save_weights(self, name: str, ttl_seconds: int | None = None) -> str:
        """Save the weights for sampling; returns their URI."""
        client = self._open()
        response = self._call(
            f"saving weights {name!r}",
            lambda: client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds).result(),
        )
        return str(response.path)

    def save_state(self, name: str, ttl_seconds: int | None = None) -> str:
        """Save weights and optimizer; returns the URI for Session.restore_trainer."""
        client = self._open()
        response = self._call(
            f"saving state {name!r}",
            lambda: client.save_state(name, ttl_seconds=ttl_seconds).result(),
        )
        return str(response.path)


def _logprobs(output: Any) -> list[NDArray[np.float32]]:
    return [np.asarray(item["logprobs"].data, dtype=np.float32) for item in output.loss_fn_outputs]
