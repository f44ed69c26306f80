"""Owns the answer-line rule that qwen3_5 and hermes share, and how their turns are judged.

A turn is an answer if, outside its thinking, it holds exactly one non-empty `Answer:` line and no markup
of a call. The colon is ASCII, the word is as written; a full-width colon is not the asked format.
"""

import re
from collections.abc import Callable, Sequence

from rollout.protocols.base import Parsed, part_reasoning, without_end_marks
from rollout.toolspec import ToolCall, ToolSpec

ANSWER_LINE = re.compile(r"^[ \t]*Answer:[ \t]*(\S.*?)[ \t\r]*$", re.MULTILINE)
CALL_MARKUP = re.compile(r"</?tool_call>|<function=|</function>|<parameter=|</parameter>")


class Block:
    """One call block of a turn: the call, or what is wrong, and where the block ends."""

    __slots__ = ("call", "end", "problem")

    def __init__(self, end: int, call: ToolCall | None = None, problem: str = "") -> None:
        self.end = end
        self.call = call
        self.problem = problem

    def __repr__(self) -> str:
        return f"Block(end={self.end}, call={self.call!r}, problem={self.problem!r})"


ReadBlock = Callable[[str, int, Sequence[ToolSpec]], Block]
"""Reads the block whose opening tag stands at a position of the text."""


def answer_lines(text: str) -> list[re.Match[str]]:
    """Return the non-empty answer lines."""
    return list(ANSWER_LINE.finditer(text))


def judge(
    text: str, tools: Sequence[ToolSpec], read_block: ReadBlock, *, stop_reason: str, opened: bool
) -> Parsed:
    """Return the verdict on a turn whose calls stand in <tool_call> blocks."""
    text = without_end_marks(text)
    thought = part_reasoning(text, opened=opened)
    parsed = _judge_rest(thought.rest, tools, read_block) if thought.closed else None
    if parsed is None:
        parsed = Parsed(kind="invalid", problem="the thinking block was never closed")
    cut = stop_reason == "length"
    whole_line = parsed.kind == "answer" and _line_ended(thought.rest)
    if cut and not whole_line:
        problem = "the turn hit its token limit"
        parsed = Parsed(kind="truncated", calls=parsed.calls, content=parsed.content, problem=problem)
    return Parsed(
        kind=parsed.kind,
        call=parsed.call,
        answer=parsed.answer,
        calls=parsed.calls,
        reasoning=thought.reasoning,
        content=parsed.content,
        kept=len(text),
        problem=parsed.problem,
    )


def _line_ended(rest: str) -> bool:
    return "\n" in rest[answer_lines(rest)[0].end() :]


def _judge_rest(rest: str, tools: Sequence[ToolSpec], read_block: ReadBlock) -> Parsed:
    start = rest.find("<tool_call>")
    content = (rest if start < 0 else rest[:start]).strip()
    if start < 0:
        return _judge_answer(rest, content)
    calls, problem = _read_blocks(rest, start, tools, read_block)
    if len(calls) > 1:
        problem = f"more than one call in a turn ({len(calls)})"
    elif not problem and answer_lines(rest[:start]):
        problem = "a tool call and an answer in one turn"
    elif not problem and CALL_MARKUP.search(content):
        problem = "stray call markup before the call"
    if problem:
        return Parsed(kind="invalid", calls=calls, content=content, problem=problem)
    return Parsed(kind="call", call=calls[0], calls=calls, content=content)


def _judge_answer(rest: str, content: str) -> Parsed:
    lines = answer_lines(rest)
    if CALL_MARKUP.search(rest):
        return Parsed(kind="invalid", content=content, problem="call markup without a call block")
    if len(lines) != 1:
        problem = (
            f"{len(lines)} answer lines, expected exactly one" if lines else "neither a call nor an answer"
        )
        return Parsed(kind="invalid", content=content, problem=problem)
    return Parsed(kind="answer", answer=lines[0].group(1), content=content)


def _read_blocks(
    rest: str, start: int, tools: Sequence[ToolSpec], read_block: ReadBlock
) -> tuple[tuple[ToolCall, ...], str]:
    """Read blocks one after the other; only white space may stand between and after them."""
    calls: list[ToolCall] = []
    while True:
        block = read_block(rest, start, tools)
        if block.call is not None:
            calls.append(block.call)
        if block.problem:
            return tuple(calls), block.problem
        tail = rest[block.end :]
        if not tail.strip():
            return tuple(calls), ""
        if not tail.lstrip().startswith("<tool_call>"):
            return tuple(calls), "text after the call"
        start = rest.index("<tool_call>", block.end)
