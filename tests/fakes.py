"""Stand-ins with behaviour for what rollouts live in: a tokenizer of bytes, a scripted policy, a scripted search.

All of it is deterministic: what the policy says is a function of prompt, seed and sample index, what the search
finds one of the query.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import anyio
import msgspec
import numpy as np

from core.arrays import Float32, Int32
from core.config import Config, RewardSettings
from core.errors import EngineError
from rollout.chat import Chat
from rollout.observations import plain_block
from rollout.prompts import PromptTemplate
from rollout.protocols import get_protocol
from rollout.reward import get_scorer
from rollout.run import Environment
from rollout.tools import SEARCH_SPEC, ToolResult
from rollout.toolspec import Scalar, ToolSpec

ADDED = ("<|im_start|>", "<|im_end|>")


class Added(NamedTuple):
    """One added token."""

    content: str
    normalized: bool = False


class ByteTokenizer:
    """UTF-8 bytes as tokens 0..255, and two added tokens; a ChatML template that never rewrites history."""

    eos_token: str | None = "<|im_end|>"

    @property
    def added_tokens_decoder(self) -> Mapping[int, Added]:
        """The added tokens by id."""
        return {256 + index: Added(text) for index, text in enumerate(ADDED)}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, ADDED)) + ")", text):
            ids += [256 + ADDED.index(part)] if part in ADDED else list(part.encode())
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        kept = "".join(
            chr(token) if token < 256 else "" if skip_special_tokens else ADDED[token - 256]
            for token in token_ids
        )
        return kept.encode("latin-1").decode("utf-8", "replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        enable_thinking: bool,
    ) -> str:
        """Return a conversation as text."""
        text = "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in conversation
        )
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


Script = Callable[[str, int, int], str]
"""(prompt text, seed, sample index) -> what the policy says."""

Latency = Callable[[str, int], float]
"""(prompt text or query, seed) -> seconds."""


def call(query: str) -> str:
    """Return a turn that searches."""
    return (
        f"<tool_call>\n<function=search>\n<parameter=query>\n{query}\n</parameter>\n</function>\n</tool_call>"
    )


def answer(text: str) -> str:
    """Return a turn that answers."""
    return f"Answer: {text}"


def chance(*parts: object) -> float:
    """Return a number in [0, 1) that depends on the parts alone."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def wanderer(prompt: str, seed: int, index: int) -> str:
    """Search, answer well or badly, or babble, by chance."""
    roll = chance("say", prompt, seed, index)
    if roll < 0.55:
        return call(f"q{int(1e6 * chance('query', seed, index))}")
    if roll < 0.9:
        return answer("Ada" if roll < 0.75 else "Bob")
    return "I do not know"


class Turn(NamedTuple):
    """One sampled continuation."""

    tokens: Int32
    logprobs: Float32
    text: str
    stop_reason: str


class Asked(NamedTuple):
    """One request as the sampler saw it."""

    weights_uri: str
    prompt: tuple[int, ...]
    num_samples: int
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]


def no_delay(said: str, seed: int) -> float:
    """Take no time."""
    return 0.0


class ScriptedSampler:
    """A policy that says what its script says, after its latency."""

    def __init__(
        self,
        script: Script = wanderer,
        *,
        latency: Latency = no_delay,
        faults: Callable[[Asked], EngineError | None] = lambda asked: None,
    ) -> None:
        self.script = script
        self.latency = latency
        self.faults = faults
        self.requests: list[Asked] = []
        self.scored: list[tuple[int, ...]] = []
        self.running = 0
        self.most_running = 0

    def __repr__(self) -> str:
        return f"<ScriptedSampler, {len(self.requests)} requests>"

    def fingerprints(self) -> dict[str, str]:
        """Return what identifies this policy."""
        return {"base_model": "scripted"}

    async def sample(
        self,
        weights_uri: str,
        prompt: Int32,
        *,
        num_samples: int,
        seed: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop: Sequence[str],
    ) -> list[Turn]:
        """Return what the script says, cut at max_tokens."""
        asked = Asked(
            weights_uri,
            tuple(prompt.tolist()),
            num_samples,
            seed,
            max_tokens,
            temperature,
            top_p,
            top_k,
            tuple(stop),
        )
        self.requests.append(asked)
        text = TOKENIZER.decode(asked.prompt, skip_special_tokens=False)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await anyio.sleep(self.latency(text, seed))
        finally:
            self.running -= 1
        fault = self.faults(asked)
        if fault is not None:
            raise fault
        return [self._turn(text, seed, index, max_tokens) for index in range(num_samples)]

    async def compute_logprobs(self, weights_uri: str, tokens: Int32) -> Float32:
        """Return logprobs that depend on the prefix alone, as a causal model's do."""
        assert weights_uri == ""
        ids = tuple(int(token) for token in tokens)
        self.scored.append(ids)
        values = [-chance("reference", ids[: place + 1]) for place in range(len(ids))]
        return np.asarray([0.0, *values[1:]], dtype=np.float32)

    def _turn(self, prompt: str, seed: int, index: int, max_tokens: int) -> Turn:
        text = self.script(prompt, seed, index)
        tokens = [*TOKENIZER.encode(text, add_special_tokens=False), 256 + ADDED.index("<|im_end|>")]
        stop_reason = "stop" if len(tokens) <= max_tokens else "length"
        tokens = tokens[:max_tokens]
        logprobs = -3 * np.random.default_rng([seed, index]).random(len(tokens))
        said = TOKENIZER.decode(tokens, skip_special_tokens=True)
        return Turn(np.asarray(tokens, np.int32), np.asarray(logprobs, np.float32), said, stop_reason)


class ScriptedSearch:
    """A search whose one result is made of the query, and which fails for the queries it is told to."""

    spec: ToolSpec = SEARCH_SPEC

    def __init__(
        self, *, latency: Latency = no_delay, fails: Callable[[str], bool] = lambda query: False
    ) -> None:
        self.latency = latency
        self.fails = fails
        self.queries: list[str] = []

    def __repr__(self) -> str:
        return f"<ScriptedSearch, {len(self.queries)} queries>"

    async def run(self, arguments: Mapping[str, Scalar]) -> ToolResult:
        """Return the result, or a fault."""
        query = str(arguments["query"])
        self.queries.append(query)
        await anyio.sleep(self.latency(query, 0))
        if self.fails(query):
            fault = "Search failed: no answer in time"
            return ToolResult((plain_block(fault),), ok=False, status="timeout", error="no answer in time")
        return ToolResult(
            (plain_block(f"[1] All about {query}."),), backend="scripted", document_ids=(query,)
        )

    async def aclose(self) -> None:
        """Release nothing."""


TOKENIZER = ByteTokenizer()


def make_environment(
    sampler: ScriptedSampler,
    search: ScriptedSearch,
    *,
    protocol: str = "qwen3_5",
    scorer: str = "em_format",
) -> Environment:
    """Return scripted surroundings with the real protocol, chat and scorer."""
    chat = Chat(TOKENIZER, get_protocol(protocol), [SEARCH_SPEC], PromptTemplate(system="Answer."))
    return Environment(sampler, chat, {"search": search}, get_scorer(scorer, RewardSettings()))


def make_config(**rollout: object) -> Config:
    """Return a configuration with these rollout settings."""
    plain: dict[str, object] = {"rollout": {"concurrency": 64, **rollout}}
    return msgspec.convert(plain, Config)
