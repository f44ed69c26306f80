"""What the wire costs: a small event, and one RL step of 64 trajectories, through the SDK.

A step is 8 questions x 8 trajectories of 3 turns (the first turn of a question is one request), two
micro-batches of 32 datums, one optim_step and one save of the new weights. The engine's own share is
the time its compute thread was busy. Prints one JSON object.

    python -m benchmarks.engine_wire [--steps 9] [--in-flight 16]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytrio

from core.config import AdamSettings, EngineSettings
from core.datum import DatumArrays
from engine import connection, launch
from engine.client import Session, Trainer, connect, prepare
from engine.embedded.frames import make_frame
from engine.embedded.prompts import PROMPTS
from engine.embedded.world import split_questions

QUESTIONS, SAMPLES, TURNS = 8, 8, 3
MAX_TOKENS = 64
FACTS = "[1] Nothing was found.\n[2] Nothing was found.\n[3] Nothing was found."


class Rollout(NamedTuple):
    """One trajectory in progress: tokens, and which of them were sampled with what logprob."""

    tokens: list[int]
    logprobs: list[float]


def median_ms(work: Callable[[], object], count: int) -> float:
    """Return the median duration of `work` in milliseconds."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - started))
    return round(statistics.median(times), 2)


async def rollout(
    session: Session, uri: str, prompts: list[np.ndarray], observation: list[int]
) -> list[Rollout]:
    """Sample every trajectory of a step; after the first turn each goes its own way."""
    paths: list[Rollout] = []

    async def later_turns(path: Rollout, number: int) -> None:
        for turn in range(1, TURNS):
            path.tokens.extend(observation)
            path.logprobs.extend([0.0] * len(observation))
            (one,) = await session.sample(
                uri,
                np.array(path.tokens, np.int32),
                num_samples=1,
                seed=1000 * turn + number,
                max_tokens=MAX_TOKENS,
            )
            path.tokens.extend(one.tokens.tolist())
            path.logprobs.extend(one.logprobs.tolist())

    async def question(prompt: np.ndarray, number: int, group: Any) -> None:
        first = await session.sample(uri, prompt, num_samples=SAMPLES, seed=number, max_tokens=MAX_TOKENS)
        for sample in first:
            path = Rollout(
                [*prompt.tolist(), *sample.tokens.tolist()],
                [0.0] * len(prompt) + sample.logprobs.tolist(),
            )
            paths.append(path)
            group.start_soon(later_turns, path, len(paths))

    async with anyio.create_task_group() as group:
        for number, prompt in enumerate(prompts):
            group.start_soon(question, prompt, number, group)
    return paths


def train(trainer: Trainer, paths: list[Rollout], name: str) -> str:
    """Train one step on the trajectories and save the weights; returns their URI."""
    datums = []
    for number, path in enumerate(paths):
        tokens = np.array(path.tokens, np.int64)
        logprobs = np.array(path.logprobs, np.float32)
        advantage = np.float32(0.5 if number % 2 else -0.5)
        advantages = np.where(logprobs != 0, advantage, np.float32(0))
        datums.append(DatumArrays(tokens[:-1], tokens[1:], logprobs[1:], advantages[1:]))
    for start in range(0, len(datums), 32):
        trainer.forward_backward(prepare(datums[start : start + 32]), "importance_sampling", {})
    trainer.optim_step(1e-5, AdamSettings())
    return trainer.save_weights(name, ttl_seconds=600)


def measure(session: Session, run_dir: Path, steps: int) -> dict[str, object]:
    """Return the figures of a session."""
    tokenizer = session.tokenizer()
    frame = make_frame(tokenizer, next(p for p in PROMPTS.values() if p.protocol == "qwen3_5"))
    questions = split_questions(0)["train", 2][:QUESTIONS]
    texts = [f"{frame.before_question}{q.text}{frame.after_question}" for q in questions]
    prompts = [np.array(tokenizer.encode(text), np.int32) for text in texts]
    observation = tokenizer.encode(f"{frame.results[0]}{FACTS}{frame.results[1]}")
    trainer = session.create_trainer(lora_rank=16, seed=0)
    small = prepare([DatumArrays(np.arange(40, 48), np.arange(41, 49), *[np.ones(8, np.float32)] * 2)])
    trainer.forward_backward(small, "importance_sampling", {})

    def one() -> None:
        trainer.forward_backward(small, "importance_sampling", {})

    busy = launch.status(run_dir).busy_seconds
    event_ms = median_ms(one, 50)
    event_busy_ms = 1000 * (launch.status(run_dir).busy_seconds - busy) / 50
    uri = trainer.save_weights("w", ttl_seconds=600)
    rows = []
    for step in range(steps + 1):
        busy = launch.status(run_dir).busy_seconds
        started = time.perf_counter()
        paths = anyio.run(rollout, session, uri, prompts, observation)
        sampled = time.perf_counter()
        uri = train(trainer, paths, f"w{step}")
        ended = time.perf_counter()
        engine = launch.status(run_dir).busy_seconds - busy
        rows.append((ended - started, sampled - started, ended - sampled, engine))
    total, sampling, training, engine = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return {
        "small_event_ms": event_ms,
        "small_event_engine_ms": round(event_busy_ms, 2),
        "step_s": round(total, 3),
        "step_sampling_s": round(sampling, 3),
        "step_training_s": round(training, 3),
        "step_engine_busy_s": round(engine, 3),
        "tokens_per_trajectory": round(statistics.mean(len(path.tokens) for path in paths)),
        "steps": steps,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--in-flight", type=int, default=connection.SAMPLES_IN_FLIGHT)
    options = parser.parse_args()
    connection.SAMPLES_IN_FLIGHT = options.in_flight
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        with connect(EngineSettings(), run_dir) as session:
            figures = measure(session, run_dir, options.steps)
        launch.stop(run_dir)
    print(json.dumps(figures | {"in_flight": options.in_flight, "sdk": pytrio.__name__}))


if __name__ == "__main__":
    main()
