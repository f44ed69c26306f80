"""Sampling from merged weights: a result depends on its own request only.

Requests are prefilled one by one, then decoded together in waves (see decoding.py for why that
changes nothing). Logprobs are always those of the untempered, unfiltered distribution.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Self

import numpy as np

from engine.embedded.base_model import BaseModel
from engine.embedded.calls import InputError, SampleRequest, SampleResult, Sequence_
from engine.embedded.choice import draw, filtered_weights, uniforms
from engine.embedded.decoding import Batch, Prefill, prefill
from engine.embedded.lora import merge
from engine.embedded.model import Array, Weights, log_softmax
from engine.embedded.trainable import read_state

WAVE_ROWS: Final = 128
WAVE_TOKENS: Final = 64 * 1024
"""Rows and cached tokens that decode together: 1 KiB a token, so about 64 MiB."""
LIKELY_TOKENS: Final = 128
"""Length of a continuation that waves are planned for; longer ones cost memory, not correctness."""
MAX_SAMPLES: Final = 1024


@dataclass(slots=True)
class _Row:
    """One continuation in progress."""

    request: SampleRequest
    prompt: Prefill
    first_logits: Array
    draws: Array
    stop_bytes: tuple[bytes, ...]
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tail: bytes = b""
    stop_reason: Literal["stop", "length"] | None = None

    @property
    def span(self) -> int:
        """Tokens that the row is likely to hold."""
        return len(self.prompt.hidden) + min(len(self.draws), LIKELY_TOKENS)

    def choose(self, logits: Array) -> int:
        """Choose the next token by the request's own settings."""
        request, uniform = self.request, float(self.draws[len(self.tokens)])
        if request.temperature == 0:
            return int(np.argmax(logits))
        if request.temperature == 1 and request.top_p >= 1 and request.top_k <= 0:
            return draw(np.exp(logits - logits.max()), uniform)
        weights = filtered_weights(logits, request.temperature, request.top_p, request.top_k)
        return draw(weights, uniform)

    def add(self, token: int, logprob: float, spelling: bytes) -> None:
        """Append a token and see whether it ends the row."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids or self._completes_stop(spelling):
            self.stop_reason = "stop"
        elif len(self.tokens) == len(self.draws):
            self.stop_reason = "length"

    def _completes_stop(self, spelling: bytes) -> bool:
        if not self.stop_bytes:
            return False
        text = self.tail + spelling
        self.tail = text[-max(map(len, self.stop_bytes)) :]
        return any(stop in text for stop in self.stop_bytes)


class SamplerModel:
    """Weights to sample from; immutable, so one instance serves any number of calls."""

    def __init__(self, base: BaseModel, weights: Weights) -> None:
        self.base = base
        self.weights = weights

    @classmethod
    def from_base(cls, base: BaseModel) -> Self:
        """Sample from the base model itself."""
        return cls(base, base.weights)

    @classmethod
    def from_state(cls, base: BaseModel, arrays: Mapping[str, np.ndarray]) -> Self:
        """Sample from a saved training run. Raises InputError if it does not fit `base`."""
        lora, factors = read_state(base, arrays)
        return cls(base, merge(base.weights, factors, lora.scale))

    def __repr__(self) -> str:
        return f"SamplerModel({self.base!r})"

    def sample(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Answer all requests; raises InputError, naming the request, before any work is done."""
        for number, request in enumerate(requests):
            check_request(self.base, request, f"request {number}")
        prompts = [prefill(self.weights, self.base.config, r.prompt) for r in requests]
        rows = [self._open_rows(r, p) for r, p in zip(requests, prompts, strict=True)]
        for wave in plan_waves([row for group in rows for row in group]):
            self._decode(wave)
        return [
            self._result(request, prompt, group)
            for request, prompt, group in zip(requests, prompts, rows, strict=True)
        ]

    def _open_rows(self, request: SampleRequest, prompt: Prefill) -> list[_Row]:
        limit = min(request.max_tokens, self.base.context - len(request.prompt))
        logits = prompt.hidden[-1] @ self.weights["unembed"]
        stop_bytes = tuple(text.encode() for text in request.stop)
        stop_ids = frozenset((self.base.eos, *request.stop_token_ids))
        return [
            _Row(
                request=request,
                prompt=prompt,
                first_logits=logits,
                draws=uniforms(request.seed, index, request.prompt, limit),
                stop_bytes=stop_bytes,
                stop_ids=stop_ids,
            )
            for index in range(request.num_samples)
        ]

    def _advance(self, rows: Sequence[_Row], logits: Array) -> None:
        """Choose the next token of every unfinished row from its logits [R, V]."""
        if not np.isfinite(logits).all():
            raise InputError("these weights give logits that are not finite: their training diverged")
        logprobs = log_softmax(logits)
        for row, own_logits, own_logprobs in zip(rows, logits, logprobs, strict=True):
            if row.stop_reason is None:
                token = row.choose(own_logits)
                row.add(token, float(own_logprobs[token]), self.base.token_bytes[token])

    def _decode(self, rows: list[_Row]) -> None:
        self._advance(rows, np.stack([row.first_logits for row in rows]))
        rows = [row for row in rows if row.stop_reason is None]
        if not rows:
            return
        batch = Batch(self.weights, self.base.config, [row.prompt for row in rows])
        while rows:
            tokens = np.array([row.tokens[-1] for row in rows], np.int32)
            self._advance(rows, batch.step(tokens))
            alive = np.array([i for i, row in enumerate(rows) if row.stop_reason is None], np.intp)
            # copying caches costs more than a few idle rows
            if len(alive) <= 0.6 * len(rows):
                rows = [rows[i] for i in alive]
                batch.keep(alive)

    def _result(self, request: SampleRequest, prompt: Prefill, rows: Sequence[_Row]) -> SampleResult:
        decode = self.base.tokenizer.decode
        sequences = [
            Sequence_(
                row.tokens,
                row.logprobs,
                decode(row.tokens, skip_special_tokens=True),
                row.stop_reason or "length",
            )
            for row in rows
        ]
        wanted, top = request.return_prompt_logprobs, request.topk_prompt_logprobs
        if not wanted and not top:
            return SampleResult(sequences, None, None)
        logprobs = log_softmax(prompt.hidden[:-1] @ self.weights["unembed"])
        chosen = logprobs[np.arange(len(logprobs)), request.prompt[1:]]
        prompt_logprobs = [None, *map(float, chosen)] if wanted else None
        return SampleResult(sequences, prompt_logprobs, _top(logprobs, top) if top else None)


def _top(logprobs: Array, count: int) -> list[list[tuple[int, float]] | None]:
    """Find the `count` most probable tokens of every row, ties by id; None for the first position."""
    order = np.argsort(-logprobs, axis=-1, kind="stable")[:, :count]
    rows: list[list[tuple[int, float]] | None] = [None]
    for ids, row in zip(order, logprobs, strict=True):
        rows.append([(int(token), float(row[token])) for token in ids])
    return rows


def plan_waves(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Cut the rows, longest prompt first, into waves that fit WAVE_ROWS and WAVE_TOKENS."""
    waves: list[list[_Row]] = []
    widest = 0
    for row in sorted(rows, key=lambda row: -len(row.prompt.hidden)):
        wave = waves[-1] if waves else []
        span = max(widest, row.span)
        if not wave or len(wave) == WAVE_ROWS or span * (len(wave) + 1) > WAVE_TOKENS:
            wave, span = [], row.span
            waves.append(wave)
        wave.append(row)
        widest = span
    return waves


def check_request(base: BaseModel, request: SampleRequest, name: str) -> None:
    """Raise InputError for anything that the sampler cannot compute with."""
    base.check_tokens(request.prompt, f"{name}: prompt")
    if len(request.prompt) >= base.context:
        raise InputError(
            f"{name}: prompt has {len(request.prompt)} tokens; the context of {base.context} "
            "leaves no room for a continuation"
        )
    if request.max_tokens < 1:
        raise InputError(f"{name}: max_tokens must be at least 1, got {request.max_tokens!r}")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise InputError(f"{name}: num_samples must be 1 to {MAX_SAMPLES}, got {request.num_samples!r}")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise InputError(f"{name}: temperature must be finite and >= 0, got {request.temperature!r}")
    if 0 < request.temperature < 1e-4:
        raise InputError(f"{name}: temperature {request.temperature!r} is too small: use 0 for greedy")
    if not 0 < request.top_p <= 1:
        raise InputError(f"{name}: top_p must be in (0, 1], got {request.top_p!r}")
    if request.top_k < -1:
        raise InputError(f"{name}: top_k must be -1 (all) or more, got {request.top_k!r}")
    if not 0 <= request.topk_prompt_logprobs <= base.vocab_size:
        raise InputError(f"{name}: topk_prompt_logprobs must be 0 to {base.vocab_size}")
    if any(not text for text in request.stop):
        raise InputError(f"{name}: stop strings must not be empty")
