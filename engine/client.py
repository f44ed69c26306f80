"""Owns the session with PyTRIO, hosted or embedded: the one way in which anything is sampled or trained.

Both kinds go through the same unmodified SDK; `connect` is the only place where they differ. Every
SDK error leaves here as one of ours. The embedded kind never leaves this machine: telemetry is off,
loopback bypasses proxies, and the SDK's files lie in the run directory, not in ~/.pytrio.
"""

import contextlib
import gc
import hashlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import anyio
import numpy as np
import pytrio
from numpy.typing import NDArray
from pytrio.types import SamplingParams

from core.config import AdamSettings, EngineSettings
from core.errors import CredentialsMissing, EngineError, ServiceRefused, WeightsGone
from engine import launch
from engine.datums import PreparedBatch, engine_digest
from engine.faults import LOGIN_ADVICE, translated
from engine.watch import Watch

T = TypeVar("T")

SAMPLES_IN_FLIGHT = 16
"""Sampling requests that one SDK client sends at once. More cost the SDK more CPU per request
(its connection pool is scanned for each), fewer leave the engine's batches small."""

LOOPBACK_HOSTS = ("127.0.0.1", "localhost")
_configuring = threading.Lock()


class Sampled(NamedTuple):
    """One sampled continuation."""

    tokens: NDArray[np.int32]
    """int32 [n], as sampled, never re-tokenised."""
    logprobs: NDArray[np.float32]
    """float32 [n], under the policy that sampled them, untempered and unfiltered (embedded)."""
    text: str
    stop_reason: str
    """"stop" or "length"."""


class StepResult(NamedTuple):
    """What an acknowledged optimizer step reports."""

    metrics: dict[str, float]
    engine_digest: str
    """SHA-256 hex over the payloads that the engine received for this step; "" on the hosted service."""


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


def connect(settings: EngineSettings, run_dir: Path) -> "Session":
    """Return a session; use it as a context manager.

    Embedded: joins the run's engine or starts it. Hosted: checks the credentials at once. Raises
    CredentialsMissing, ServiceBusy, ServiceRefused or EngineError.
    """
    if settings.kind == "embedded":
        return _connect_embedded(settings, run_dir)
    return _connect_hosted(settings, run_dir)


def _connect_embedded(settings: EngineSettings, run_dir: Path) -> "Session":
    _stay_on_this_machine()
    joined = launch.join(run_dir)
    folder = launch.engine_folder(run_dir)
    watch = Watch(folder, joined.address)
    try:
        if settings.base_model not in ("", joined.address.model, joined.address.model_folder):
            raise ServiceRefused(
                f"the embedded engine has no model {settings.base_model!r}: leave "
                f"engine.base_model empty, or use {joined.address.model!r}"
            )
        with _configuring:
            pytrio.configure_observability(enabled=False)
            pytrio.configure(
                home=str(folder / "home"),
                base_url=joined.address.url,
                api_key=joined.address.token,
                log_level="WARNING",
                control_retry_timeout_seconds=1.0,
                training_retry_timeout_seconds=settings.request_timeout,
                sampling_retry_timeout_seconds=settings.request_timeout,
                retry_initial_delay_seconds=0.05,
                retry_max_delay_seconds=1.0,
                sampling_request_max_in_flight=SAMPLES_IN_FLIGHT,
                sampling_request_queue_capacity=4096,
            )
            service = _open_service(watch)
    except BaseException:
        watch.close()
        os.close(joined.users)
        raise
    model = joined.address.model
    identity = {"base_model": joined.address.fingerprint}
    tokenizer = joined.address.model_folder
    return Session(service, watch, model, identity, tokenizer=tokenizer, users=joined.users)


def _connect_hosted(settings: EngineSettings, run_dir: Path) -> "Session":
    if not settings.base_model:
        raise ServiceRefused(
            "engine.base_model is empty: name a model of the hosted service, such as "
            "'Qwen/Qwen3.5-4B'"
        )
    patience = settings.request_timeout
    watch = Watch(launch.engine_folder(run_dir), None)
    with _configuring:
        # An earlier embedded session in this process has pointed the SDK elsewhere.
        pytrio.configure(
            home=str(Path.home()),
            env=os.environ.get("PYTRIO_ENV"),
            api_key=os.environ.get("PYTRIO_API_KEY"),
            base_url=os.environ.get("PYTRIO_BASE_URL"),
            control_retry_timeout_seconds=patience,
            training_retry_timeout_seconds=patience,
            sampling_retry_timeout_seconds=patience,
            actor_capacity_wait_timeout_seconds=patience,
            sampling_request_max_in_flight=SAMPLES_IN_FLIGHT,
            sampling_request_queue_capacity=4096,
        )
        service = _open_service(watch)
    identity = {"base_model": settings.base_model}
    return Session(service, watch, settings.base_model, identity, tokenizer="", users=None)


def _open_service(watch: Watch) -> pytrio.ServiceClient:
    """Return an authenticated client; without a key this fails before anything is sent."""
    try:
        with translated("opening a session with PyTRIO"):
            return watch.run(pytrio.ServiceClient)
    except CredentialsMissing as exc:
        if "auth.missing_api_key" in str(exc):
            raise CredentialsMissing(f"no PyTRIO API key was found: {LOGIN_ADVICE}") from exc
        raise


def _stay_on_this_machine() -> None:
    """Keep this process's SDK off the network and away from the user's files.

    Proxies must not see loopback traffic. The tokenizer is a local folder, so nothing may be
    fetched; and the SDK prefers modelscope for it, whose import takes seconds and writes under the
    home directory: with that import blocked it uses transformers, as it does when modelscope is
    not installed.
    """
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        missing = [host for host in LOOPBACK_HOSTS if host not in hosts]
        os.environ[name] = ",".join(hosts + missing)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    sys.modules.setdefault("modelscope", None)  # type: ignore[arg-type]  # None blocks the import


class Session:
    """One authenticated session, from which policies are sampled and trainers are made."""

    def __init__(
        self,
        service: pytrio.ServiceClient,
        watch: Watch,
        model_name: str,
        identity: Mapping[str, str],
        *,
        tokenizer: str,
        users: int | None,
    ) -> None:
        self.model_name = model_name
        self._service: pytrio.ServiceClient | None = service
        self._watch = watch
        self._identity = dict(identity)
        self._tokenizer_folder = tokenizer
        self._users = users
        self._samplers: dict[str, pytrio.SamplingClient] = {}
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
        self._samplers.clear()
        self._service = None
        # The SDK ends its session when its last client is collected, and has no call for it.
        gc.collect()
        self._watch.close()
        if self._users is not None:
            os.close(self._users)
            self._users = None

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

                self._tokenizer = AutoTokenizer.from_pretrained(
                    self._tokenizer_folder, local_files_only=True
                )
            else:
                with self._sampler("") as sampler:
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
            **self._identity,
        }

    @contextlib.contextmanager
    def _sampler(self, weights_uri: str) -> Iterator[pytrio.SamplingClient]:
        """Yield the cached sampling client of a URI; it is forgotten when its weights are gone."""
        client = self._samplers.get(weights_uri)
        if client is None:
            what = f"opening {weights_uri or 'the base model'} for sampling"
            client = self._call(what, lambda: self._new_sampler(weights_uri), uri=weights_uri)
            self._samplers[weights_uri] = client
        try:
            yield client
        except WeightsGone:
            self._samplers.pop(weights_uri, None)
            raise

    def _new_sampler(self, weights_uri: str) -> pytrio.SamplingClient:
        return self._open().create_sampling_client(self.model_name, weights_uri or None)

    @contextlib.asynccontextmanager
    async def _async_sampler(self, weights_uri: str) -> Any:
        """Yield the cached sampling client without blocking the event loop."""
        async with self._sampler_lock:
            if weights_uri not in self._samplers:
                with translated(f"opening {weights_uri or 'the base model'}", uri=weights_uri):
                    self._samplers[weights_uri] = await self._watch.run_async(
                        lambda: self._open().create_sampling_client_async(
                            self.model_name, weights_uri or None
                        )
                    )
        with self._sampler(weights_uri) as client, translated("sampling", uri=weights_uri):
            yield client

    async def sample(
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
        async with self._async_sampler(weights_uri) as client:
            response = await self._watch.run_async(
                lambda: client.sample_async(
                    prompt=tokens, num_samples=num_samples, sampling_params=params
                )
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

    async def compute_logprobs(
        self, weights_uri: str, tokens: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Return float32 [n]: the logprob of each token given those before it, 0 for the first."""
        prompt = pytrio.ModelInput.from_ints(np.asarray(tokens).tolist())
        async with self._async_sampler(weights_uri) as client:
            values = await self._watch.run_async(lambda: client.compute_logprobs_async(prompt))
        return np.asarray([0.0 if value is None else value for value in values], dtype=np.float32)

    def can_sample(self, weights_uri: str) -> bool:
        """Return whether the weights still exist at the service."""
        self._samplers.pop(weights_uri, None)
        try:
            with self._sampler(weights_uri):
                return True
        except WeightsGone:
            return False

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
        return Trainer(client, self._call)

    def restore_trainer(self, state_uri: str) -> "Trainer":
        """Return a new trainer with a saved state's weights and optimizer; raises WeightsGone."""
        client = self._call(
            f"restoring {state_uri}",
            lambda: self._open().create_training_client_from_state_with_optimizer(state_uri),
            uri=state_uri,
        )
        return Trainer(client, self._call)

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints of this workspace (embedded: of this run directory), newest first."""
        rest = self._open().create_rest_client()
        found: list[Checkpoint] = []
        while True:
            offset = len(found)
            page = self._call(
                "listing checkpoints",
                lambda offset=offset: rest.list_user_checkpoints(100, offset).result(),
            )
            found.extend(_checkpoint(item) for item in page.checkpoints)
            if not page.checkpoints or (page.cursor and len(found) >= page.cursor.total_count):
                return found

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


class Trainer:
    """One training run; its calls block, in order, until the service has answered."""

    def __init__(self, client: pytrio.TrainingClient, call: Callable[..., Any]) -> None:
        self.training_run: str = client.training_run_cuid
        self._client = client
        self._call = call

    def __repr__(self) -> str:
        return f"<Trainer {self.training_run}>"

    def forward_backward(
        self, batch: PreparedBatch, loss: str, loss_config: Mapping[str, float]
    ) -> list[NDArray[np.float32]]:
        """Add the gradient of one micro-batch; returns the trainer's logprobs, float32 [n] per datum.

        Raises TrainerBroken when the run cannot go on, after which it must be restored.
        """
        output = self._call(
            "forward_backward",
            lambda: self._client.forward_backward(
                batch.datums, loss_fn=loss, loss_fn_config=dict(loss_config)
            ).result(),
        )
        return [
            np.asarray(item["logprobs"].data, dtype=np.float32) for item in output.loss_fn_outputs
        ]

    def optim_step(self, learning_rate: float, adam: AdamSettings) -> StepResult:
        """Apply the accumulated gradient; returns once the service has acknowledged it."""
        params = pytrio.AdamParams(
            learning_rate=learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip_norm=adam.grad_clip_norm,
        )
        response = self._call("optim_step", lambda: self._client.optim_step(params).result())
        return StepResult(*engine_digest(response.metrics))

    def save_weights(self, name: str, ttl_seconds: int | None = None) -> str:
        """Save the weights for sampling; returns their URI."""
        response = self._call(
            f"saving weights {name!r}",
            lambda: self._client.save_weights_for_sampler(name, ttl_seconds=ttl_seconds).result(),
        )
        return str(response.path)

    def save_state(self, name: str, ttl_seconds: int | None = None) -> str:
        """Save weights and optimizer; returns the URI for restore_trainer."""
        response = self._call(
            f"saving state {name!r}",
            lambda: self._client.save_state(name, ttl_seconds=ttl_seconds).result(),
        )
        return str(response.path)
