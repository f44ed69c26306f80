"""Rebuilds the shipped base model: supervised warm start on scripted trajectories.

Two runs on one machine write the same bytes. About five minutes on one core.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.embedded.adamw import AdamW
from engine.embedded.base_model import BaseModel, save_weights
from engine.embedded.calls import AdamParams, Example, Loss
from engine.embedded.chunks import run_examples
from engine.embedded.frames import Frame, cut_script, make_frame
from engine.embedded.model import ModelConfig, Weights, init_weights
from engine.embedded.prompts import PROMPTS
from engine.embedded.scripts import Script, ScriptRates, ScriptWriter
from engine.embedded.texts import TextWriter
from engine.embedded.tokenizer import ENGLISH, save_tokenizer
from engine.embedded.world import World, all_questions

WORLDS: Final = 150
FIRST_WORLD_SEED: Final = 10_000
"""Worlds of pretraining; those that write_world makes have small seeds."""
HOP_SHARES: Final = (0.40, 0.45, 0.15)
WORLD_SHARES: Final = {"demo": 0.58, "search-r1": 0.09, "demo-tags": 0.09, "tree-grpo": 0.09}
"""Shares of all trajectories that ask about a world, by prompt."""
TEXT_SHARES: Final = {"demo": 0.03, "search-r1": 0.06, "demo-tags": 0.01, "tree-grpo": 0.05}
"""The same for those about arbitrary text."""
STEPS: Final = 2000
BATCH: Final = 32
PEAK_RATE: Final = 5e-3
WARM_UP: Final = 50


class ExampleSource:
    """Draws scripts and turns them into examples, tokenised stretch by stretch as in a rollout."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.frames = [make_frame(tokenizer, PROMPTS[name]) for name in WORLD_SHARES]
        self.shares = [*WORLD_SHARES.values(), *TEXT_SHARES.values()]
        self.writers = [ScriptWriter(World(FIRST_WORLD_SEED + i), ScriptRates()) for i in range(WORLDS)]
        self.text_writer = TextWriter(ENGLISH, ScriptRates())
        self.questions = [all_questions(hops) for hops in (1, 2, 3)]
        self._backend = tokenizer.backend_tokenizer
        self._encode = lru_cache(maxsize=100_000)(self._encode_text)

    def __repr__(self) -> str:
        return f"ExampleSource({len(self.writers)} worlds, {len(self.frames)} prompts)"

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._backend.encode(text).ids)

    def draw(self, rng: np.random.Generator) -> Example:
        """One trajectory as next-token prediction."""
        about_text, prompt = divmod(int(rng.choice(len(self.shares), p=self.shares)), len(self.frames))
        if about_text:
            script = self.text_writer.write(rng)
        else:
            pool = self.questions[int(rng.choice(3, p=HOP_SHARES))]
            question = pool[int(rng.integers(len(pool)))]
            script = self.writers[int(rng.integers(WORLDS))].write(rng, question)
        return self.encode(self.frames[prompt], script)

    def encode(self, frame: Frame, script: Script) -> Example:
        """Tokens and loss weights of a script."""
        tokens: list[int] = []
        weights: list[float] = []
        for text, written in cut_script(frame, script):
            ids = self._encode(text)
            tokens += ids
            weights += [1.0 if written else script.seen_weight] * len(ids)
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
    source = ExampleSource(PreTrainedTokenizerFast.from_pretrained(folder))
    weights = init_weights(config, seed)
    optimizer = AdamW(weights)
    loss = Loss("cross_entropy", {})
    for step in range(steps):
        examples = [source.draw(rng) for _ in range(BATCH)]
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
