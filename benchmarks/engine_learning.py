"""How the shipped base model learns: held-out exact match before and after RL, in process.

Runs the demo's loop without the wire: BM25 over the world's facts, the Qwen3.5 template, groups of
trajectories, reward minus group mean, importance_sampling, one AdamW step per batch. Prints one JSON
line per seed. See docs/engine.md for recorded results.

    OPENBLAS_NUM_THREADS=1 python benchmarks/engine_learning.py --seeds 0 1 2
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.embedded.compute import (
    AdamParams,
    BaseModel,
    Example,
    Loss,
    SampleRequest,
    SamplerModel,
    Totals,
    TrainableModel,
)
from engine.embedded.base_model import BASE_FOLDER
from engine.embedded.pretrain import qwen_frame
from engine.embedded.scripts import Index, render_results
from engine.embedded.spelling import EOS
from engine.embedded.world import Question, World, split_questions

QUERY = re.compile(r"<parameter=query>\n(.*?)\n</parameter>", re.DOTALL)
ANSWER = re.compile(r"^Answer: *(\S.*)$", re.MULTILINE)
MAX_TURNS = 6
MAX_SEARCHES = 4
MAX_TURN_TOKENS = 64
MAX_TOKENS = 1024


class Trajectory(NamedTuple):
    """One finished rollout: all tokens, sampled logprobs (0 elsewhere), mask and reward."""

    tokens: list[int]
    logprobs: list[float]
    mask: list[bool]
    reward: float
    turns: int


class Room:
    """A world with its search, which can be switched off, and the prompt's fixed pieces."""

    def __init__(self, folder: Path, seed: int, *, blind: bool = False) -> None:
        self.world = World(seed)
        self.index = Index(self.world)
        self.blind = blind
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.frame = qwen_frame(self.tokenizer)
        self.eos = self.tokenizer.convert_tokens_to_ids(EOS)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text).ids

    def prompt(self, question: Question) -> list[int]:
        return self.encode(self.frame.before_question + question.text + self.frame.after_question)

    def observe(self, query: str) -> list[int]:
        # ties in the order of the facts, as a real index would break them
        found = [] if self.blind else self.index.search(query, np.random.default_rng(0))
        text = self.frame.before_results + render_results(found) + self.frame.after_results
        return self.encode(text.removeprefix(EOS))


def score(text: str, reference: str) -> float:
    """1 / 0 / -0.1: exact match, well-formed but wrong, not exactly one answer line."""
    answers = ANSWER.findall(text)
    if len(answers) != 1 or text.count("Answer:") != 1 or "<tool_call>" in text:
        return -0.1
    return float(answers[0].strip().rstrip(".").lower() == reference.lower())


def rollout(
    sampler: SamplerModel, room: Room, questions: list[Question], count: int, seed: int, temperature: float
) -> list[list[Trajectory]]:
    """`count` trajectories of each question, turn by turn over all that are still running."""
    tokens = [[room.prompt(q) for _ in range(count)] for q in questions]
    logprobs = [[[0.0] * len(row) for row in group] for group in tokens]
    done: list[list[Trajectory | None]] = [[None] * count for _ in questions]
    searches = [[0] * count for _ in questions]
    for turn in range(MAX_TURNS):
        live = [(g, j) for g in range(len(questions)) for j in range(count) if done[g][j] is None]
        if turn == 0:
            requests = [(g, [j for j in range(count)]) for g in range(len(questions))]
        else:
            requests = [(g, [j]) for g, j in live]
        answers = sampler.sample(
            [
                SampleRequest(
                    np.array(tokens[g][js[0]], np.int32),
                    MAX_TURN_TOKENS,
                    len(js),
                    (seed * 7919 + g * 101 + js[0] * 13 + turn) % 2**31,
                    temperature,
                )
                for g, js in requests
            ]
        )
        for (g, js), answer in zip(requests, answers, strict=True):
            for j, sequence in zip(js, answer.sequences, strict=True):
                tokens[g][j] += sequence.tokens
                logprobs[g][j] += sequence.logprobs
                call = QUERY.search(sequence.text)
                calls = sequence.text.count("<tool_call>")
                good = call is not None and calls == 1 and "Answer:" not in sequence.text
                reference = room.world.answer(questions[g])
                if good and call is not None and searches[g][j] < MAX_SEARCHES and turn < MAX_TURNS - 1:
                    searches[g][j] += 1
                    seen = room.observe(call.group(1))
                    if sequence.tokens[-1] != room.eos:
                        seen = [room.eos, *seen]
                    if len(tokens[g][j]) + len(seen) < MAX_TOKENS:
                        tokens[g][j] += seen
                        logprobs[g][j] += [float("nan")] * len(seen)
                        continue
                mask = [bool(x == x and i >= len(room.prompt(questions[g]))) for i, x in enumerate(logprobs[g][j])]
                clean = [x if x == x else 0.0 for x in logprobs[g][j]]
                done[g][j] = Trajectory(tokens[g][j], clean, mask, score(sequence.text, reference), turn + 1)
    return [[t for t in group if t is not None] for group in done]


def evaluate(sampler: SamplerModel, room: Room, questions: list[Question], samples: int) -> dict[str, float]:
    """Exact match, format rate and exact match among the well-formed."""
    sampled = rollout(sampler, room, questions, samples, 10**6, 1.0)
    greedy = rollout(sampler, room, questions, 1, 0, 0.0)
    rewards = np.array([t.reward for group in sampled for t in group])
    hops = np.array([len(q.chain) for q in questions for _ in range(samples)])
    em, form = rewards == 1, rewards >= 0
    result = {
        "em": em.mean(),
        "format": form.mean(),
        "em_of_well_formed": em.sum() / max(1, form.sum()),
        "greedy_em": np.mean([g[0].reward == 1 for g in greedy]),
        "turns": np.mean([t.turns for group in sampled for t in group]),
    }
    result |= {f"em_{n}hop": em[hops == n].mean() for n in sorted(set(hops.tolist()))}
    return {name: round(float(value), 3) for name, value in result.items()}


def to_example(trajectory: Trajectory, advantage: float) -> Example:
    mask = np.array(trajectory.mask[1:], bool)
    tokens = np.array(trajectory.tokens, np.int32)
    return Example(
        tokens[:-1],
        tokens[1:],
        None,
        np.where(mask, trajectory.logprobs[1:], 0).astype(np.float32),
        np.where(mask, advantage, 0).astype(np.float32),
    )


def train(base: BaseModel, room: Room, args: argparse.Namespace, seed: int) -> tuple[TrainableModel, list[float]]:
    """RL for args.steps steps; returns the model and the mean reward of every step."""
    splits = split_questions(args.world)
    pool = [q for hops in (1, 2) for q in splits["train", hops]]
    rng = np.random.default_rng(seed)
    order = [pool[i] for _ in range(20) for i in rng.permutation(len(pool))]
    model = TrainableModel.create(base, rank=args.rank, seed=seed)
    curve: list[float] = []
    for step in range(args.steps):
        questions = order[step * args.groups : (step + 1) * args.groups]
        sampler = SamplerModel(base, model.merged())
        groups = rollout(sampler, room, questions, args.group_size, seed * 1000 + step, 1.0)
        examples: list[Example] = []
        for group in groups:
            mean = sum(t.reward for t in group) / len(group)
            examples += [to_example(t, t.reward - mean) for t in group if abs(t.reward - mean) > 1e-9]
        curve.append(round(float(np.mean([t.reward for group in groups for t in group])), 3))
        if not examples:
            continue
        totals = Totals(args.groups * args.group_size, 0, 0)
        model.forward_backward(examples, Loss(args.loss, {}), totals)
        model.optim_step(AdamParams(learning_rate=args.lr, grad_clip_norm=args.clip))
        if args.verbose:
            print(step, curve[-1], file=sys.stderr, flush=True)
    return model, curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=BASE_FOLDER)
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--loss", default="importance_sampling")
    parser.add_argument("--split", default="test", choices=("test", "dev"))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    base = BaseModel.load(args.base)
    room, blind = (Room(args.base, args.world, blind=b) for b in (False, True))
    splits = split_questions(args.world)
    held_out = [q for hops in (1, 2) for q in splits[args.split, hops]]
    sampler = SamplerModel.from_base(base)
    before = evaluate(sampler, room, held_out, args.samples)
    before["em_without_search"] = evaluate(sampler, blind, held_out, args.samples)["em"]
    print(json.dumps({"base": before, "fingerprint": base.fingerprint[:12]}), flush=True)
    for seed in args.seeds:
        start = time.perf_counter()
        model, curve = train(base, room, args, seed)
        seconds = time.perf_counter() - start
        sampler = SamplerModel(base, model.merged())
        after = evaluate(sampler, room, held_out, args.samples)
        after["em_without_search"] = evaluate(sampler, blind, held_out, args.samples)["em"]
        row = {"seed": seed, "after": after, "seconds": round(seconds, 1), "lr": args.lr, "rewards": curve[::4]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
