"""Owns the XML calls of Qwen3.5: parameters inside a function inside a tool_call.

A closing tag inside a value counts only where the structure goes on after it, so a query may hold
"</parameter>". One line break after the opening tag and one before the closing tag belong to the form.
"""

import re
from collections.abc import Sequence

import msgspec

from rollout.protocols.base import Parsed
from rollout.protocols.lines import Block, judge
from rollout.toolspec import JsonValue, ToolCall, ToolSpec, check_arguments, find_spec

FUNCTION = re.compile(r"<tool_call>\s*<function=([^<>\s]+)>\s*")
PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)>")
END = re.compile(r"\s*</function>\s*</tool_call>")
GOES_ON = re.compile(r"\s*(?:<parameter=[^<>\s]+>|</function>\s*</tool_call>)")
CLOSE = "</parameter>"


class Qwen35:
    """Calls as Qwen3.5's chat template teaches them; answers as an `Answer:` line."""

    name = "qwen3_5"
    declares_tools = True
    corrects_invalid = False

    def __repr__(self) -> str:
        return "<protocol qwen3_5>"

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


def _read_block(text: str, start: int, tools: Sequence[ToolSpec]) -> Block:
    opening = FUNCTION.match(text, start)
    if opening is None:
        return Block(start, problem="malformed call: no <function=NAME> after <tool_call>")
    values: dict[str, str] = {}
    place = opening.end()
    while (end := END.match(text, place)) is None:
        parameter = PARAMETER.match(text, place)
        if parameter is None:
            return Block(
                place, problem="malformed call: expected <parameter=NAME> or </function></tool_call>"
            )
        close = _closing(text, parameter.end())
        if close < 0:
            return Block(place, problem=f"malformed call: parameter {parameter.group(1)!r} is not closed")
        if parameter.group(1) in values:
            return Block(place, problem=f"malformed call: parameter {parameter.group(1)!r} stands twice")
        values[parameter.group(1)] = _bare(text[parameter.end() : close])
        place = close + len(CLOSE)
    call, problem = _build(opening.group(1), values, tools)
    return Block(end.end(), call, problem)


def _closing(text: str, start: int) -> int:
    """Return where the value that begins at `start` is closed, -1 if nowhere."""
    close = text.find(CLOSE, start)
    while close >= 0 and GOES_ON.match(text, close + len(CLOSE)) is None:
        close = text.find(CLOSE, close + 1)
    return close


def _bare(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _build(name: str, values: dict[str, str], tools: Sequence[ToolSpec]) -> tuple[ToolCall | None, str]:
    spec = find_spec(name, tuple(tools))
    if spec is None:
        return None, f"no tool named {name!r} is declared"
    arguments = {key: _typed(value, spec.argument_type(key)) for key, value in values.items()}
    checked = check_arguments(spec, arguments)
    if checked.problem:
        return None, checked.problem
    return ToolCall(name, checked.arguments), ""


def _typed(value: str, kind: str) -> JsonValue:
    """Return a value by its declared type: XML text is a string unless the schema says otherwise."""
    if kind == "string":
        return value
    try:
        decoded: JsonValue = msgspec.json.decode(value.encode("utf-8", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return value
    return decoded
