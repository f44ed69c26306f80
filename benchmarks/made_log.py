"""Owns a log of realistic groups for the benchmarks: HotpotQA questions, real passages, a real tokenizer.

Trajectories are scripted (think, search, read three passages, search again, answer) with varied wording; the
text is tokenised as a chat model's would be. What varies between trajectories of one question is the wording
and which passages come back, as in real rollouts.
"""

import json
import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from core.arrays import pack_logprobs, pack_tokens
from core.events import (
    Answered,
    ChosenLeaf,
    GroupAsked,
    GroupEvent,
    Observed,
    Outcome,
    Plan,
    Rewarded,
    SamplingParams,
    ToolCalled,
    TurnSampled,
)
from core.ids import make_uid

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
DATA = SHARED / "data" / "hotpotqa-100"
SYSTEM = (
    "Answer the given question. You must reason before you act. Call the search tool with one query when you "
    "lack knowledge; you may search as often as you want. When you know, end with one line 'Answer: ...'."
)
THOUGHTS = (
    "I need to find out {}, so I will start by searching for it directly.",
    "The question asks about {}. Let me look this up before answering.",
    "First, let me search for information on {}; then I can compare what I find.",
    "To answer I have to know more about {}. A search should give the relevant passage.",
    "It is not obvious from memory; the key entity seems to be {}. Searching now.",
)
READINGS = (
    "The passages mention {}, which looks relevant, but I should verify one more detail.",
    "From the results, {} appears to be what the question refers to. Let me confirm it.",
    "Passage 2 talks about {}; the others are less useful. I will refine the query.",
)


CALL = "<tool_call>\n<function=search>\n<parameter=query>\n{}\n</parameter>\n</function>\n</tool_call>"
FRAME = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


class Encoder(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]:
        """Return token ids."""
        ...


class Material:
    """Questions, passages and a tokenizer."""

    def __init__(
        self, encode: Encoder, seed: int, questions: Sequence[dict[str, Any]], passages: Sequence[str]
    ) -> None:
        self.encode = encode
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.questions = questions
        self.passages = passages

    def asked(self, ticket: int) -> GroupAsked:
        """Return the group record of a ticket."""
        question = self.questions[ticket % len(self.questions)]
        prompt = (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question['question']}<|im_end|>\n"
        )
        return GroupAsked(
            uid=make_uid(ticket, 0),
            ticket=ticket,
            attempt=0,
            example_id=question["id"],
            question=question["question"],
            references=tuple(question["answers"]),
            data_source="hotpotqa",
            prompt=pack_tokens(self.encode.encode(prompt + "<|im_start|>assistant\n")),
            plan=Plan(mode="chain", group_size=8),
            policy_version=0,
            weights_uri="pytrio://run/weights/0",
            params=SamplingParams(),
            protocol="qwen3_5",
            at=1.7e9,
        )

    def sampled(self, turn: int, text: str, seed: int) -> TurnSampled:
        """Return a turn with logprobs as peaked as a trained policy's."""
        tokens = list(self.encode.encode(text))
        logprobs = -np.abs(self.numbers.standard_normal(len(tokens)) ** 3 * 0.4).astype(np.float32)
        return TurnSampled(
            node=f"0.0.{turn}",
            parent=f"0.0.{turn - 1}" if turn else None,
            turn=turn,
            tokens=pack_tokens(tokens),
            sampled_logprobs=pack_logprobs(logprobs),
            text=text,
            stop_reason="stop",
            seed=seed,
            sample_index=seed % 8,
            policy_version=0,
        )

    def chain(self, ticket: int, member: int, nearby: Sequence[str]) -> Iterator[GroupEvent]:
        """Yield the records of one trajectory: two searches and an answer."""
        question = self.questions[ticket % len(self.questions)]
        words = question["question"].split()
        for turn in range(2):
            topic = " ".join(words[self.random.randrange(3) :][: self.random.randrange(3, 9)])
            thought = self.random.choice(THOUGHTS if turn == 0 else READINGS).format(topic)
            query = f"{topic} {self.random.choice(words)}"
            yield self.sampled(turn, f"{thought}\n\n{CALL.format(query)}<|im_end|>", ticket * 64 + member)
            yield ToolCalled(
                node=f"0.0.{turn}", call_id=f"c{turn}", tool="search", arguments={"query": query}
            )
            found = self.random.sample(list(nearby), 3)
            content = "\n".join(f"[{rank}] {passage}" for rank, passage in enumerate(found, 1))
            yield Observed(
                node=f"0.0.{turn}",
                content=content,
                tokens=pack_tokens(self.encode.encode(FRAME.format(content))),
                status="success",
                latency=self.random.random(),
                backend="local",
                call_id=f"c{turn}",
                document_ids=("1", "2", "3"),
            )
        answer = self.random.choice([question["answers"][0], words[-1]])
        text = f"{self.random.choice(READINGS).format(answer)}\n\nAnswer: {answer}"
        yield self.sampled(2, text + "<|im_end|>", ticket * 64 + member)
        yield Answered(leaf="0.0.2", outcome=Outcome.ANSWERED, answer=answer, text=text)
        yield Rewarded(
            node="0.0.2",
            value=float(answer == question["answers"][0]),
            scorer="em_format",
            scorer_version="1",
            source_digest="0" * 64,
            components={"format": 1.0, "exact_match": float(answer == question["answers"][0])},
        )

    def group(self, ticket: int, members: int = 8) -> list[tuple[int, list[GroupEvent]]]:
        """Return a whole group: (tree, records), the group's own stream first."""
        at = self.random.randrange(len(self.passages) - 10)
        nearby = self.passages[at : at + 10]
        streams: list[tuple[int, list[GroupEvent]]] = [(0, [self.asked(ticket)])]
        streams += [(tree, list(self.chain(ticket, tree, nearby))) for tree in range(1, members + 1)]
        return streams


def chosen(members: int = 8) -> tuple[ChosenLeaf, ...]:
    """Return every leaf of a group made by `Material.group`."""
    return tuple(ChosenLeaf(tree=tree, leaf="0.0.2") for tree in range(1, members + 1))


class Words:
    """A stand-in for a tokenizer: one id per word, many ids per long word; needs no files."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def encode(self, text: str) -> list[int]:
        """Return ids below 2^18, about four characters each, the same for the same text."""
        return [zlib.crc32(text[at : at + 4].encode()) % 248_000 for at in range(0, len(text), 4)]


PASSAGES = tuple(
    f'"Person {number}"\nPerson {number} was born in Town {number % 13}, where the river {number % 7} flows, '
    f"and wrote the book {number * 7 % 31} about the war of {1700 + number}." * 3
    for number in range(40)
)
QUESTIONS = tuple(
    {
        "id": f"q{number}",
        "question": f"Where was the author of the book {number} born?",
        "answers": [f"Town {number}"],
    }
    for number in range(20)
)


def made_group(encode: Encoder, ticket: int, members: int = 8) -> list[tuple[int, list[GroupEvent]]]:
    """Return a whole group of made-up text: (tree, records), the group's own stream first."""
    return Material(encode, ticket, QUESTIONS, PASSAGES).group(ticket, members)


def hotpot(encode: Encoder, seed: int = 0) -> Material:
    """Return real questions and passages; raises FileNotFoundError where the shared data is absent."""
    with (DATA / "questions.jsonl").open(encoding="utf-8") as file:
        questions = [json.loads(line) for line in file]
    with (DATA / "corpus.jsonl").open(encoding="utf-8") as file:
        passages = [json.loads(line)["contents"] for line in file]
    return Material(encode, seed, questions, passages)
