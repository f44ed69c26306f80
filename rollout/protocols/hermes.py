"""Owns the JSON calls of Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

The JSON is read strictly: a raw control character in a string, NaN or a key that stands twice make the
call malformed. Arguments that stand as a JSON string are decoded once more.
"""

import json
import re
from collections.abc import Sequence

from rollout.protocols.base import Parsed
from rollout.protocols.lines import Block, judge
from rollout.toolspec import JsonValue, ToolCall, ToolSpec, check_arguments, find_spec

OPEN = re.compile(r"<tool_call>\s*")
CLOSE = re.compile(r"\s*</tool_call>")


class Hermes:
    """JSON calls; answers as an `Answer:` line."""

    name = "hermes"
    declares_tools = True
    corrects_invalid = False

    def __repr__(self) -> str:
        return "<protocol hermes>"

    def stop(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Return nothing: a turn ends with the tokenizer's end token."""
        del tools
        return ()

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, stop_reason: str = "stop", opened: bool = False
    ) -> Parsed:
        """Return the verdict on a turn."""
        return judge(text, tools, _read_block, stop_reason=stop_reason, opened=opened)

    def correction(self, problem: str) -> str:
        """Return nothing: an invalid turn ends the trajectory."""
        del problem
        return ""


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_unique)


def _read_block(text: str, start: int, tools: Sequence[ToolSpec]) -> Block:
    opening = OPEN.match(text, start)
    assert opening is not None, "the caller found the tag"
    try:
        value, end = _DECODER.raw_decode(text, opening.end())
        close = CLOSE.match(text, end)
        if close is None:
            return Block(end, problem="malformed call: no </tool_call> after the JSON")
        call, problem = _build(value, tools)
    except (ValueError, RecursionError) as error:
        return Block(start, problem=f"malformed call: {str(error)[:120]}")
    return Block(close.end(), call, problem)


def _build(value: JsonValue, tools: Sequence[ToolSpec]) -> tuple[ToolCall | None, str]:
    if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
        return None, 'malformed call: expected an object with "name" and "arguments"'
    name, arguments = value["name"], value["arguments"]
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None, "malformed call: the name must be a string and the arguments an object"
    spec = find_spec(name, tuple(tools))
    if spec is None:
        return None, f"no tool named {name!r} is declared"
    checked = check_arguments(spec, arguments)
    if checked.problem:
        return None, checked.problem
    return ToolCall(name, checked.arguments), ""
