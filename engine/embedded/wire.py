"""Owns the shape of every request that reaches the engine, and the one error that refuses one.

Bodies are decoded straight into typed Structs, so a handler never sees a value of the wrong type.
Unknown fields are ignored (a later SDK may send more); missing or mistyped ones are refused.
"""

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

T = TypeVar("T")

MAX_SEED = 2**63 - 1

EventType = Literal[
    "trainer.init_run",
    "trainer.forward",
    "trainer.forward_backward",
    "trainer.optimize_step",
    "trainer.save_state",
    "trainer.save_weights",
    "trainer.end_run",
]

Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Rank = Annotated[int, Meta(ge=4, le=64)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**53)]


class Refused(Exception):
    """Raised when a request cannot be served; becomes an HTTP 4xx or a failed event."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def decode(reader: Callable[..., T], body: bytes, shape: type[T]) -> T:
    """Return `body` as `shape`; raises Refused 400 with the place of the first mistake."""
    try:
        return reader(body, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as exc:
        raise Refused(400, "invalid_request_body", f"malformed request: {exc}") from exc


def decode_json(body: bytes, shape: type[T]) -> T:
    """Return a JSON body as `shape`; raises Refused 400."""
    return decode(msgspec.json.decode, body, shape)


def decode_msgpack(body: bytes, shape: type[T]) -> T:
    """Return a MessagePack body as `shape`; raises Refused 400."""
    return decode(msgspec.msgpack.decode, body, shape)


class Metadata(Struct):
    """Where an event stands in its training run."""

    index: Annotated[int, Meta(ge=1, le=2**53)]
    step: Annotated[int, Meta(ge=0, le=2**53)]
    run_id: Text


class Envelope(Struct):
    """One event as POSTed; the payload is decoded by type, on the compute thread."""

    version: int
    event_id: Annotated[str, Meta(pattern=r"^event_[0-9a-hjkmnp-tv-z]{12}$")]
    type: EventType
    metadata: Metadata
    payload: msgspec.Raw


class LoraConfig(Struct):
    """Shape of a LoRA adapter."""

    rank: Rank
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
    seed: Seed | None = None


class InitRun(Struct):
    """Payload of trainer.init_run."""

    base_model: Text
    lora_config: LoraConfig
    checkpoint_uri: Text | None = None
    load_optimizer: bool = False


class EncodedText(Struct, tag_field="type", tag="encoded_text"):
    """Token ids of a piece of the input."""

    tokens: list[int]


class ImageInput(Struct, tag_field="type", tag="image"):
    """An image, known only well enough to refuse it."""


class ModelInput(Struct):
    """Chunks whose tokens follow each other."""

    chunks: list[EncodedText | ImageInput]

    def tokens(self) -> list[int]:
        """Return all token ids; raises Refused for an image or an empty input."""
        if any(isinstance(chunk, ImageInput) for chunk in self.chunks):
            raise Refused(
                400,
                "unsupported_input",
                "the embedded engine's model reads text only: remove the image chunks",
            )
        ids = [token for chunk in self.chunks if isinstance(chunk, EncodedText) for token in chunk.tokens]
        if not ids:
            raise Refused(400, "invalid_input", "the model input holds no tokens")
        return ids


class WireDatum(Struct):
    """One training example."""

    model_input: ModelInput
    target_ids: list[int]
    weights: list[float] | None = None
    logprobs: list[float] | None = None
    advantages: list[float] | None = None


class LossSpec(Struct):
    """A loss by name, with numeric settings."""

    type: Text
    config: dict[str, float] = {}


class Accumulation(Struct):
    """Counts over the whole logical call, of which this event may be a part."""

    total_samples: Annotated[int, Meta(ge=1, le=2**53)]
    total_active_tokens: Count
    total_advantage_tokens: Count


class Forward(Struct):
    """Payload of trainer.forward and trainer.forward_backward."""

    data: Annotated[list[WireDatum], Meta(min_length=1)]
    loss: LossSpec
    gradient_accumulation: Accumulation
    auto_shift: bool = False


class Adam(Struct):
    """AdamW settings."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float


class OptimizeStep(Struct):
    """Payload of trainer.optimize_step."""

    adam_params: Adam


class Save(Struct):
    """Payload of trainer.save_state and trainer.save_weights."""

    name: str
    ttl_seconds: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    overwrite: bool = False
    visibility: Literal["WORKSPACE", "TEMPORARY"] = "WORKSPACE"


class SamplingParams(Struct):
    """How a prompt is continued; defaults are the SDK's."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31)]
    seed: Seed | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] = -1
    stop: Annotated[list[Text], Meta(max_length=64)] = []
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] = []


class Sample(Struct):
    """Body of POST /v1/sampling-runs/{id}/sample."""

    request_id: Text
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    return_text: bool = True
    return_token_logprobs: bool = True
    return_prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=1024)] = 0


class NewSession(Struct):
    """Body of POST service-sessions."""

    sdk_version: Text
    user_metadata: dict[str, object] | None = None


class NewTrainingRun(Struct):
    """Body of POST training-runs; base_model is "" when a checkpoint is restored."""

    base_model: Text
    lora_rank: Rank
    train_mlp: bool
    train_attn: bool
    train_unembed: bool
    source_checkpoint_uri: Text = ""
    restore_optimizer: bool = False
    seed: Seed | None = None


class Rebind(Struct):
    """Body of PATCH training-runs: restore this checkpoint at init."""

    source_checkpoint_uri: Annotated[str, Meta(min_length=1, max_length=4096)]
    restore_optimizer: bool


class NewSamplingRun(Struct):
    """Body of POST sampling-runs; source_checkpoint_uri "" samples the base model."""

    base_model: Text
    source_checkpoint_uri: Text = ""
