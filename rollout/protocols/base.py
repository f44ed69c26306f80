"""Owns what every tool protocol says about a turn: one verdict, used by outcome, reward and metrics alike.

A turn is exactly one valid call, exactly one valid answer, or invalid. Parsers never raise, on any text.
"""

import re
from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from rollout.toolspec import ToolCall, ToolSpec

Kind = Literal["call", "answer", "invalid", "truncated"]
"""truncated: the sampler hit its limit before the turn was whole."""

StopReason = Literal["stop", "length"]

END_MARKS = ("<|im_end|>", "<|endoftext|>")
"""End tokens that a sampler may leave at the end of the decoded text."""

THINK_TAG = re.compile(r"</?think>")


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """What one sampled turn is."""

    kind: Kind
    call: ToolCall | None = None
    """Set if kind is "call"."""
    answer: str | None = None
    """Set if kind is "answer": never blank."""
    calls: tuple[ToolCall, ...] = ()
    """Every well-formed call that was seen, also in an invalid turn."""
    reasoning: str = ""
    """Text inside the thinking block."""
    content: str = ""
    """Text before the call; the whole text outside the thinking block if there is none."""
    kept: int = 0
    """Characters of the text that belong to the turn; the rest was written after its action."""
    problem: str = ""
    """Why the turn is invalid or truncated."""


class ToolProtocol(Protocol):
    """How a policy writes calls and answers, and how the environment answers."""

    name: str
    declares_tools: bool
    """Whether the chat template is handed the tools; otherwise the prompt's text explains them."""
    corrects_invalid: bool
    """Whether an invalid turn is corrected by an observation (True) or ends the trajectory (False)."""

    def stop(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Return strings that end a turn, besides the tokenizer's end token."""
        ...

    def parse(
        self,
        text: str,
        tools: Sequence[ToolSpec],
        *,
        stop_reason: str = "stop",
        opened: bool = False,
    ) -> Parsed:
        """Return the verdict on a sampled turn; `opened`: the prompt ends inside a thinking block."""
        ...

    def correction(self, problem: str) -> str:
        """Return the observation that corrects an invalid turn; "" where there is none."""
        ...


class Thought(msgspec.Struct, frozen=True):
    """A turn's text, parted."""

    reasoning: str
    rest: str
    """What follows the thinking."""
    closed: bool
    """False: thinking began and never ended, so there is no rest."""


def part_reasoning(text: str, *, opened: bool) -> Thought:
    """Part thinking from what follows it.

    With `opened` the text begins inside the block. A closing tag that nothing in the text opened ends
    thinking that the prompt opened, said or not.
    """
    inside, start = opened, 0
    thoughts: list[str] = []
    outside: list[str] = []
    for tag in THINK_TAG.finditer(text):
        opens = tag.group() == "<think>"
        if inside and opens:
            continue
        stretch = text[start : tag.start()]
        if opens:
            outside.append(stretch)
        elif inside:
            thoughts.append(stretch)
        else:
            thoughts = [*thoughts, *outside, stretch]
            outside = []
        inside, start = opens, tag.end()
    (thoughts if inside else outside).append(text[start:])
    reasoning = "\n".join(said for thought in thoughts if (said := thought.strip()))
    return Thought(reasoning, "".join(outside), closed=not inside)


def without_end_marks(text: str) -> str:
    """Return the text without end tokens at its end."""
    while True:
        bare = text.rstrip()
        mark = next((mark for mark in END_MARKS if bare.endswith(mark)), None)
        if mark is None:
            return text
        text = bare.removesuffix(mark)
