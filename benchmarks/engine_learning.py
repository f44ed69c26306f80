"""How the shipped base model learns: held-out exact match before and after RL, in process.

Runs the demo's loop without the wire: BM25 over the world's facts, the Qwen3.5 template, groups of
trajectories, reward minus group mean, importance_sampling, one AdamW step per batch. Prints one JSON
line for the base and one per seed. See docs/engine.md for recorded results.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.engine_learning --seeds 0 1 2
"""

import argparse
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.embedded.base_model import BASE_FOLDER
from engine.embedded.compute import (
    AdamParams,
    BaseModel,
    Example,
    Loss,
    SampleRequest,
    SampleResult,
    SamplerModel,
    Totals,
    TrainableModel,
)
from engine.embedded.frames import Frame, make_frame
from engine.embedded.prompts import PROMPTS
from engine.embedded.scripts import Index, render_results
from engine.embedded.spelling import EOS
from engine.embedded.world import Question, World, split_questions

QUERY = {
    "qwen3_5": re.compile(r"<parameter=query>\n(.*?)\n</parameter>", re.DOTALL),
    "search_r1": re.compile(r"<search>(.*?)</search>", re.DOTALL),
}
ANSWER = {
    "qwen3_5": re.compile(r"^Answer: *(\S.*)$", re.MULTILINE),
    "search_r1": re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
}
MARKS = {"qwen3_5": ("<tool_call>", "Answer:"), "search_r1": ("<search>", "<answer>")}
STOPS = {"qwen3_5": (), "search_r1": ("</search>", "</answer>")}
MAX_TURNS = 5
MAX_SEARCHES = 4
MAX_TURN_TOKENS = 64
MAX_TOKENS = 2048


@dataclass
class Trajectory:
    """One rollout; the lists have one entry per token, logprobs are 0 where nothing was sampled."""

    question: Question
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    searches: int = 0
    turns: int = 0
    reward: float | None = None

    def append(self, tokens: list[int], logprobs: list[float] | None) -> None:
        """Add sampled tokens, or seen ones when there are no logprobs."""
        self.tokens += tokens
        self.logprobs += logprobs or [0.0] * len(tokens)
        self.sampled += [logprobs is not None] * len(tokens)


class Room:
    """A world with its search, which can be switched off, and the fixed text of a protocol."""

    def __init__(self, folder: Path, seed: int, prompt: str = "demo", *, blind: bool = False) -> None:
        self.world = World(seed)
        self.index = Index(self.world)
        self.blind = blind
        self.protocol = PROMPTS[prompt].protocol
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.frame: Frame = make_frame(tokenizer, PROMPTS[prompt])
        self.backend = tokenizer.backend_tokenizer
        self.eos = self.backend.token_to_id(EOS)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ids: list[int] = self.backend.encode(text).ids
        return ids

    def open(self, question: Question) -> Trajectory:
        """Start a trajectory that holds its prompt only."""
        trajectory = Trajectory(question, [])
        opening = self.frame.before_question + question.text + self.frame.after_question
        trajectory.append(self.encode(opening), None)
        return trajectory

    def answer(self, trajectory: Trajectory, text: str) -> None:
        """Run the call in the last turn, or score the turn and end the trajectory."""
        trajectory.turns += 1
        call_mark, answer_mark = MARKS[self.protocol]
        call = QUERY[self.protocol].search(text)
        valid = call and text.count(call_mark) == 1 and answer_mark not in text
        if call and valid and trajectory.searches < MAX_SEARCHES and trajectory.turns < MAX_TURNS:
            trajectory.searches += 1
            # ties in the order of the facts, as a real index would break them
            found = [] if self.blind else self.index.search(call.group(1), np.random.default_rng(0))
            before, after = self.frame.results
            seen = self.encode(before + render_results(found) + after)
            if self.frame.ends_turn and trajectory.tokens[-1] != self.eos:
                seen = [self.eos, *seen]
            if len(trajectory.tokens) + len(seen) < MAX_TOKENS - MAX_TURN_TOKENS:
                trajectory.append(seen, None)
                return
        trajectory.reward = self.score(text, self.world.answer(trajectory.question))

    def score(self, text: str, reference: str) -> float:
        """1 / 0 / -0.1: exact match, well-formed but wrong, not exactly one answer and no call."""
        call_mark, answer_mark = MARKS[self.protocol]
        answers = ANSWER[self.protocol].findall(text)
        if len(answers) != 1 or text.count(answer_mark) != 1 or call_mark in text:
            return -0.1
        return float(answers[0].strip().rstrip(".").lower() == reference.lower())


def rollout(
    sampler: SamplerModel, room: Room, questions: list[Question], count: int, seed: int, temperature: float
) -> list[list[Trajectory]]:
    """`count` trajectories of each question, turn by turn over all that are still running."""
    groups = [[room.open(q) for _ in range(count)] for q in questions]
    everything = [t for group in groups for t in group]
    ordinal = 0

    def request(trajectory: Trajectory, samples: int) -> SampleRequest:
        nonlocal ordinal
        ordinal += 1
        prompt = np.array(trajectory.tokens, np.int32)
        draw = (seed * 100_003 + ordinal) % 2**31
        return SampleRequest(prompt, MAX_TURN_TOKENS, samples, draw, temperature, stop=STOPS[room.protocol])

    def take(live: list[Trajectory], results: list[SampleResult]) -> None:
        sequences = [sequence for result in results for sequence in result.sequences]
        for trajectory, sequence in zip(live, sequences, strict=True):
            trajectory.append(sequence.tokens, sequence.logprobs)
            room.answer(trajectory, sequence.text)

    take(everything, sampler.sample([request(group[0], count) for group in groups]))
    while live := [t for t in everything if t.reward is None]:
        take(live, sampler.sample([request(t, 1) for t in live]))
    return groups


def rewards(groups: list[list[Trajectory]]) -> np.ndarray:
    """float64 [groups, count]."""
    return np.array([[t.reward for t in group] for group in groups], np.float64)


def evaluate(sampler: SamplerModel, room: Room, questions: list[Question], samples: int) -> dict[str, float]:
    """Exact match, format rate and exact match among the well-formed."""
    groups = rollout(sampler, room, questions, samples, 10**6, 1.0)
    scores = rewards(groups)
    hops = np.array([len(q.chain) for q in questions])
    exact, formed = scores == 1, scores >= 0
    result = {
        "em": exact.mean(),
        "format": formed.mean(),
        "em_of_well_formed": exact.sum() / max(1, formed.sum()),
        "greedy_em": (rewards(rollout(sampler, room, questions, 1, 0, 0.0)) == 1).mean(),
        "turns": np.mean([t.turns for group in groups for t in group]),
    }
    result |= {f"em_{n}hop": exact[hops == n].mean() for n in sorted(set(hops.tolist()))}
    return {name: round(float(value), 3) for name, value in result.items()}


def to_example(trajectory: Trajectory, advantage: float) -> Example:
    """Shift a trajectory into inputs and targets; advantages on sampled tokens only."""
    tokens = np.array(trajectory.tokens, np.int32)
    advantages = np.where(trajectory.sampled[1:], advantage, 0).astype(np.float32)
    logprobs = np.array(trajectory.logprobs[1:], np.float32)
    return Example(tokens[:-1], tokens[1:], None, logprobs, advantages)


def train(
    base: BaseModel, room: Room, args: argparse.Namespace, seed: int
) -> tuple[TrainableModel, list[float]]:
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
        scores = rewards(groups)
        curve.append(round(float(scores.mean()), 3))
        advantages = np.where(np.ptp(scores, axis=1) == 0, 0.0, (scores.T - scores.mean(axis=1))).T
        examples = [
            to_example(t, a)
            for group, row in zip(groups, advantages, strict=True)
            for t, a in zip(group, row, strict=True)
            if a != 0
        ]
        if examples:
            model.forward_backward(examples, Loss(args.loss, {}), Totals(scores.size, 0, 0))
            model.optim_step(AdamParams(learning_rate=args.lr))
    return model, curve


def report(sampler: SamplerModel, args: argparse.Namespace) -> dict[str, float]:
    """Evaluate on the held-out questions, also with a search that finds nothing."""
    splits = split_questions(args.world)
    questions = [q for hops in (1, 2) for q in splits[args.split, hops]]
    rooms = [Room(args.base, args.world, args.prompt, blind=blind) for blind in (False, True)]
    result = evaluate(sampler, rooms[0], questions, args.samples)
    blind = evaluate(sampler, rooms[1], questions, args.samples)
    return result | {"em_without_search": blind["em"], "format_without_search": blind["format"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=BASE_FOLDER)
    parser.add_argument("--prompt", default="demo", choices=tuple(PROMPTS))
    parser.add_argument("--world", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--loss", default="importance_sampling")
    parser.add_argument("--split", default="test", choices=("test", "dev"))
    parser.add_argument("--samples", type=int, default=4)
    args = parser.parse_args()
    base = BaseModel.load(args.base)
    before = report(SamplerModel.from_base(base), args)
    print(json.dumps({"base": before, "fingerprint": base.fingerprint[:12]}), flush=True)
    room = Room(args.base, args.world, args.prompt)
    for seed in args.seeds:
        start = time.perf_counter()
        model, curve = train(base, room, args, seed)
        seconds = round(time.perf_counter() - start, 1)
        after = report(SamplerModel(base, model.merged()), args)
        row = {"seed": seed, "after": after, "seconds": seconds, "lr": args.lr, "rewards": curve[::4]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
