"""Rebuilds the shipped base model: supervised warm start on scripted trajectories.

Two runs on one machine write the same bytes. About five minutes on one core.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.embedded.adamw import AdamW
from engine.embedded.base_model import BaseModel, save_weights
from engine.embedded.calls import AdamParams, Example, Loss
from engine.embedded.model import ModelConfig, Weights, init_weights
from engine.embedded.scripts import Script, ScriptRates, ScriptWriter
from engine.embedded.spelling import EOS
from engine.embedded.tokenizer import save_tokenizer
from engine.embedded.trainable import run_examples
from engine.embedded.world import PROMPTS, SEARCH_TOOL, World, all_questions

WORLDS: Final = 150
FIRST_WORLD_SEED: Final = 10_000
"""Worlds of pretraining; those that write_world makes have small seeds."""
HOP_SHARES: Final = (0.40, 0.45, 0.15)
STEPS: Final = 1500
BATCH: Final = 32
PEAK_RATE: Final = 5e-3
WARM_UP: Final = 50
SEEN_WEIGHT: Final = 0.1
"""Loss weight of tokens that the model reads but does not write."""
GAP: Final = "\x00"


class Frame(NamedTuple):
    """The fixed text around the parts of a trajectory in one tool protocol."""

    before_question: str
    after_question: str
    before_query: str
    after_query: str
    before_results: str
    after_results: str
    before_answer: str
    after_answer: str


def qwen_frame(tokenizer: PreTrainedTokenizerFast) -> Frame:
    """Cut two renderings of the Qwen3.5 template apart at their variable parts."""
    call = {"function": {"name": "search", "arguments": {"query": GAP}}}
    opening = [
        {"role": "system", "content": PROMPTS["qwen3_5"]},
        {"role": "user", "content": GAP},
    ]
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": GAP},
    ]
    text = tokenizer.apply_chat_template(
        [*opening, *turn],
        tools=[SEARCH_TOOL],
        add_generation_prompt=True,
        enable_thinking=False,
        tokenize=False,
    )
    before_question, middle, observed, after_results = text.split(GAP)
    after_query, before_results = observed.split(EOS, maxsplit=1)
    after_question, before_query = middle.split("<tool_call>")
    return Frame(
        before_question=before_question,
        after_question=after_question,
        before_query="<tool_call>" + before_query,
        after_query=after_query + EOS,
        before_results=before_results,
        after_results=after_results,
        before_answer="",
        after_answer=EOS,
    )


class Encoder:
    """Turns scripts into examples, tokenised piece by piece as they come into being."""

    def __init__(self, folder: Path) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.frame = qwen_frame(tokenizer)
        self._encode = lru_cache(maxsize=100_000)(
            lambda text: tuple(tokenizer.backend_tokenizer.encode(text).ids)
        )

    def __repr__(self) -> str:
        return "Encoder(qwen3_5)"

    def pieces(self, script: Script) -> list[tuple[str, float]]:
        """Text and loss weight of every stretch."""
        frame = self.frame
        opening = frame.before_question + script.question + frame.after_question
        pieces = [(opening, SEEN_WEIGHT)]
        for turn in script.turns:
            if turn.final is not None:
                pieces.append((frame.before_answer + turn.final + frame.after_answer, 1.0))
            else:
                pieces.append((f"{frame.before_query}{turn.query}{frame.after_query}", 1.0))
                seen = f"{frame.before_results}{turn.observation}{frame.after_results}"
                pieces.append((seen, SEEN_WEIGHT))
        return pieces

    def example(self, script: Script) -> Example:
        """Next-token prediction of the whole trajectory."""
        tokens: list[int] = []
        weights: list[float] = []
        for text, weight in self.pieces(script):
            ids = self._encode(text)
            tokens += ids
            weights += [weight] * len(ids)
        row = np.array(tokens, np.int32)
        return Example(row[:-1], row[1:], np.array(weights[1:], np.float32))


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to a fiftieth."""
    if step < WARM_UP:
        return PEAK_RATE * (step + 1) / WARM_UP
    return PEAK_RATE * (1 - 0.98 * (step - WARM_UP) / max(1, steps - WARM_UP))


def train(
    folder: Path,
    config: ModelConfig,
    seed: int,
    steps: int,
    progress: Callable[[int, int, float], None] | None,
) -> Weights:
    """Train from scratch; `progress` gets (step, steps, loss per weight)."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    encoder = Encoder(folder)
    writers = [ScriptWriter(World(FIRST_WORLD_SEED + i), ScriptRates()) for i in range(WORLDS)]
    questions = [all_questions(hops) for hops in (1, 2, 3)]
    weights = init_weights(config, seed)
    optimizer = AdamW(weights)
    loss = Loss("cross_entropy", {})
    for step in range(steps):
        examples: list[Example] = []
        for _ in range(BATCH):
            pool = questions[int(rng.choice(3, p=HOP_SHARES))]
            question = pool[int(rng.integers(len(pool)))]
            writer = writers[int(rng.integers(WORLDS))]
            examples.append(encoder.example(writer.write(rng, question)))
        total = sum(float(e.weights.sum()) for e in examples if e.weights is not None)
        result = run_examples(weights, config, examples, loss, 1.0 / total)
        params = AdamParams(learning_rate(step, steps), beta2=0.98, eps=1e-9, grad_clip_norm=1.0)
        optimizer.step(weights, result.grads, params)
        if progress is not None:
            progress(step + 1, steps, result.loss_sum / total)
    return weights


def pretrain(
    out: Path,
    seed: int = 0,
    progress: Callable[[int, int, float], None] | None = None,
    steps: int = STEPS,
) -> str:
    """Build tokenizer and weights in the folder `out`; returns the model's fingerprint."""
    save_tokenizer(out)
    vocab_size = len(PreTrainedTokenizerFast.from_pretrained(out))
    config = ModelConfig(vocab_size=vocab_size)
    save_weights(out, config, train(out, config, seed, steps, progress))
    return BaseModel.load(out).fingerprint
