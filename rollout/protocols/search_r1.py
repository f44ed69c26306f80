"""Owns the tags of Search-R1 and Tree-GRPO: <think>, <search>, <answer>, and <information> for results.

The first complete action of a turn wins, whichever it is, and the turn is cut right after it. A tool is
called by a tag of its own name around its one required string argument. An invalid turn is corrected by
an observation.
"""

import re
from collections.abc import Sequence

from rollout.protocols.base import Parsed, without_end_marks
from rollout.toolspec import ToolCall, ToolSpec, check_arguments, find_spec

ANSWER = "answer"
INFORMATION = re.compile(r"<information>.*?</information>", re.DOTALL)


class SearchR1:
    """Tags for calls and answers."""

    name = "search_r1"
    declares_tools = False
    corrects_invalid = True

    def __repr__(self) -> str:
        return "<protocol search_r1>"

    def stop(self, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
        """Return the closing tags of the actions."""
        return tuple(f"</{name}>" for name in (*(spec.name for spec in tools), ANSWER))

    def parse(
        self, text: str, tools: Sequence[ToolSpec], *, stop_reason: str = "stop", opened: bool = False
    ) -> Parsed:
        """Return the verdict on a turn; tags inside the thinking count, as in Search-R1's own reading."""
        del opened
        text = without_end_marks(text)
        names = "|".join(re.escape(name) for name in (*(spec.name for spec in tools), ANSWER))
        action = re.search(rf"<({names})>(.*?)</\1>", text, re.DOTALL)
        if action is None:
            kept = len(text)
            if stop_reason == "length":
                return Parsed(
                    kind="truncated", content=text, kept=kept, problem="the turn hit its token limit"
                )
            return Parsed(kind="invalid", content=text, kept=kept, problem="neither a call nor an answer")
        return _judge_action(action, text, tools)

    def correction(self, problem: str) -> str:
        """Return what the policy reads after an invalid turn."""
        del problem
        return (
            "\nMy previous action is invalid. To search, I put the query between <search> and </search>. "
            "To give the final answer, I put it between <answer> and </answer>. Let me try again.\n"
        )


def _judge_action(action: re.Match[str], text: str, tools: Sequence[ToolSpec]) -> Parsed:
    name, value = action.group(1), action.group(2).strip()
    content, kept = text[: action.start()].strip(), action.end()
    if name == ANSWER:
        if not value:
            return Parsed(kind="invalid", content=content, kept=kept, problem="the answer is empty")
        return Parsed(kind="answer", answer=value, content=content, kept=kept)
    spec = find_spec(name, tuple(tools))
    assert spec is not None, "only names of declared tools are matched"
    required = spec.schema.get("required")
    argument = str(required[0]) if isinstance(required, list) and required else "query"
    checked = check_arguments(spec, {argument: value})
    if checked.problem:
        return Parsed(kind="invalid", content=content, kept=kept, problem=checked.problem)
    call = ToolCall(name, checked.arguments)
    return Parsed(kind="call", call=call, calls=(call,), content=content, kept=kept)
