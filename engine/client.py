"""Owns the session with PyTRIO, hosted or embedded: the one way in which anything is sampled or trained.

Both kinds go through the same unmodified SDK. Every SDK error leaves here as one of ours.
"""

import contextlib
import gc
import hashlib
import importlib.metadata
import os
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import anyio
import numpy as np
import pytrio
from numpy.typing import NDArray
from pytrio.types import SamplingParams

from core.config import EngineSettings
from core.errors import EngineError, WeightsGone
from engine.connection import Connection, end_session, open_embedded, open_hosted
from engine.datums import PreparedBatch, prepare
from engine.faults import translated
from engine.saved import Checkpoint, list_checkpoints
from engine.trainer import StepResult, Trainer

__all__ = [
    "Checkpoint",
    "PreparedBatch",
    "Sampled",
    "Session",
    "StepResult",
    "Trainer",
    "connect",
    "prepare",
]

T = TypeVar("T")

KEPT_SAMPLERS = 16
"""Sampling clients kept; a rollout has groups pinned to a few policy versions at a time."""


class Sampled(NamedTuple):
    """One sampled continuation."""

    tokens: NDArray[np.int32]
    """int32 [n], as sampled, never re-tokenised."""
    logprobs: NDArray[np.float32]
    """float32 [n], under the policy that sampled them, untempered and unfiltered (embedded)."""
    text: str
    stop_reason: str
    """"stop" or "length"."""


def connect(settings: EngineSettings, run_dir: Path) -> "Session":
    """Return a session; use it as a context manager.

    Embedded: joins the run's engine or starts it. Hosted: checks the credentials at once. Raises
    CredentialsMissing, ServiceBusy, ServiceRefused or EngineError.
    """
    opener = open_embedded if settings.kind == "embedded" else open_hosted
    return Session(opener(settings, run_dir))


class Session:
    """One authenticated session, from which policies are sampled and trainers are made."""

    def __init__(self, connection: Connection) -> None:
        self.model_name = connection.model
        """The base model, as the service names it."""
        self._service: pytrio.ServiceClient | None = connection.service
        self._watch = connection.watch
        self._fingerprint = connection.fingerprint
        self._tokenizer_folder = connection.tokenizer_folder
        self._users = connection.users
        self._trainers: weakref.WeakSet[Trainer] = weakref.WeakSet()
        self._samplers: OrderedDict[str, pytrio.SamplingClient] = OrderedDict()
        self._sampler_lock = anyio.Lock()
        self._tokenizer: Any = None

    def __repr__(self) -> str:
        state = "closed" if self._service is None else "open"
        return f"<Session {self.model_name} {state}, {len(self._samplers)} samplers>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session at the service, then let the embedded engine go. Safe to repeat."""
        for trainer in list(self._trainers):
            trainer.release()
        self._samplers.clear()
        service, self._service = self._service, None
        if service is not None and not end_session(service):
            del service
            gc.collect()
        self._watch.close()
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def check(self) -> None:
        """Raise EngineDied if the embedded engine has ended; for whoever waits without calling it."""
        self._watch.check()

    def _open(self) -> pytrio.ServiceClient:
        if self._service is None:
            raise EngineError("the session is closed")
        return self._service

    def _call(self, what: str, work: Callable[[], T], *, uri: str = "") -> T:
        with translated(what, uri=uri):
            return self._watch.run(work)

    def tokenizer(self) -> Any:
        """Return the base model's tokenizer (a transformers PreTrainedTokenizerBase), loaded once."""
        if self._tokenizer is None:
            if self._tokenizer_folder:
                # transformers takes a second to import, and commands that never encode do without.
                from transformers import AutoTokenizer  # noqa: PLC0415

                self._tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_folder, local_files_only=True)
            else:
                sampler = self._sampler("")
                self._tokenizer = self._call("loading the tokenizer", sampler.get_tokenizer)
        return self._tokenizer

    def fingerprints(self) -> dict[str, str]:
        """Return what identifies the SDK, the base model, and the tokenizer with its template."""
        tokenizer = self.tokenizer()
        digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
        digest.update(b"\0" + str(tokenizer.chat_template or "").encode())
        return {
            "sdk": f"pytrio {importlib.metadata.version('pytrio')}",
            "tokenizer": digest.hexdigest(),
            "base_model": self._fingerprint,
        }

    def _sampler(self, weights_uri: str) -> pytrio.SamplingClient:
        """Return the sampling client of a URI, blocking while it is made."""
        if weights_uri not in self._samplers:
            what = f"opening {weights_uri or 'the base model'} for sampling"
            client = self._call(what, lambda: self._new_sampler(weights_uri), uri=weights_uri)
            self._keep_sampler(weights_uri, client)
        return self._samplers[weights_uri]

    def _new_sampler(self, weights_uri: str) -> pytrio.SamplingClient:
        return self._open().create_sampling_client(self.model_name, weights_uri or None)

    def _keep_sampler(self, weights_uri: str, client: pytrio.SamplingClient) -> None:
        self._samplers[weights_uri] = client
        while len(self._samplers) > KEPT_SAMPLERS:
            self._samplers.popitem(last=False)

    @contextlib.asynccontextmanager
    async def _sampling(self, weights_uri: str) -> AsyncIterator[pytrio.SamplingClient]:
        """Yield the sampling client of a URI; it is forgotten when its weights are gone."""
        with translated(f"sampling {weights_uri or 'the base model'}", uri=weights_uri):
            async with self._sampler_lock:
                client = self._samplers.get(weights_uri)
                if client is None:
                    service = self._open()
                    client = await self._watch.run_async(
                        lambda: service.create_sampling_client_async(self.model_name, weights_uri or None)
                    )
                    self._keep_sampler(weights_uri, client)
                self._samplers.move_to_end(weights_uri)
            try:
                yield client
            except pytrio.PyTrioError:
                self._samplers.pop(weights_uri, None)
                raise

    async def sample(  # noqa: PLR0913 - the sampling parameters by name
        self,
        weights_uri: str,
        prompt: NDArray[np.int32],
        *,
        num_samples: int,
        seed: int,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop: Sequence[str] | Sequence[int] = (),
    ) -> list[Sampled]:
        """Return num_samples continuations of `prompt`; "" samples the base model.

        Cancelling the caller cancels the request. Raises WeightsGone, ServiceBusy, ServiceRefused,
        EngineDied or EngineError.
        """
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            stop=list(stop) or None,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        tokens = pytrio.ModelInput.from_ints(np.asarray(prompt).tolist())
        async with self._sampling(weights_uri) as client:
            response = await self._watch.run_async(
                lambda: client.sample_async(prompt=tokens, num_samples=num_samples, sampling_params=params)
            )
        return [
            Sampled(
                np.asarray(sequence.tokens, dtype=np.int32),
                np.asarray(sequence.logprobs, dtype=np.float32),
                sequence.text or "",
                sequence.stop_reason,
            )
            for sequence in response.sequences
        ]

    async def compute_logprobs(self, weights_uri: str, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return float32 [n]: the logprob of each token given those before it, 0 for the first."""
        prompt = pytrio.ModelInput.from_ints(np.asarray(tokens).tolist())
        async with self._sampling(weights_uri) as client:
            values = await self._watch.run_async(lambda: client.compute_logprobs_async(prompt))
        return np.asarray([0.0 if value is None else value for value in values], dtype=np.float32)

    def can_sample(self, weights_uri: str) -> bool:
        """Return whether the weights still exist at the service."""
        self._samplers.pop(weights_uri, None)
        try:
            self._sampler(weights_uri)
        except WeightsGone:
            return False
        return True

    def create_trainer(
        self,
        *,
        lora_rank: int,
        seed: int,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
    ) -> "Trainer":
        """Return a trainer with a fresh LoRA adapter on the base model."""
        client = self._call(
            "creating a training run",
            lambda: self._open().create_lora_training_client(
                self.model_name,
                rank=lora_rank,
                seed=seed,
                train_attn=train_attn,
                train_mlp=train_mlp,
                train_unembed=train_unembed,
            ),
        )
        return self._trainer(client)

    def restore_trainer(self, state_uri: str) -> "Trainer":
        """Return a new trainer with a saved state's weights and optimizer; raises WeightsGone."""
        client = self._call(
            f"restoring {state_uri}",
            lambda: self._open().create_training_client_from_state_with_optimizer(state_uri),
            uri=state_uri,
        )
        return self._trainer(client)

    def _trainer(self, client: pytrio.TrainingClient) -> Trainer:
        trainer = Trainer(client, self._call)
        self._trainers.add(trainer)
        return trainer

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of this workspace (embedded: of this run directory), newest first."""
        return list_checkpoints(self._open().create_rest_client(), self._call)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint; one that is gone already is no error."""
        rest = self._open().create_rest_client()
        with contextlib.suppress(WeightsGone):
            self._call(
                f"deleting {checkpoint.uri}",
                lambda: rest.delete_checkpoint(
                    checkpoint.training_run or "unknown", checkpoint.checkpoint_id
                ).result(),
                uri=checkpoint.uri,
            )
        self._samplers.pop(checkpoint.uri, None)
