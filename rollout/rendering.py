"""Owns what is asked of a chat template: the texts before, between and after the data of a conversation.

The template is rendered with markers in place of the data; what stands around them is the frame. Data
thus never passes through the template, which could read it as structure.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from jinja2 import TemplateError

from core.errors import ConfigError
from rollout.encoding import Message, Tokenizer
from rollout.toolspec import ToolSpec

QUESTION_MARK = "\ue0f0question\ue0f1"
TURN_MARK = "\ue0f0turn\ue0f1"
RESULT_MARK = "\ue0f0result\ue0f1"
"""Private-use characters: no template and no page uses them."""

TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What a template, which is a program, may fail with."""

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, with the next generation prompt if asked."""


class Frames(NamedTuple):
    """The fixed texts of a conversation."""

    prompt_head: str
    """Before the question."""
    prompt_tail: str
    """After it, generation prompt included."""
    closing: str
    """What ends an assistant turn."""
    result_head: str
    """Between the end of a turn and a tool's result."""
    result_tail: str
    """After the result, next generation prompt included."""
    generation: str
    """What opens an assistant turn."""
    opened: bool
    """The generation prompt ends inside a thinking block."""
    rewrites: bool
    """A tool's result changes how the template renders the turn before it."""


def make_render(tokenizer: Tokenizer, tools: Sequence[ToolSpec], *, enable_thinking: bool) -> Render:
    """Return a function that renders messages with these tools; it raises ConfigError if that fails."""
    declared = [spec.declaration() for spec in tools] or None

    def render(messages: Sequence[Message], generate: bool) -> str:
        try:
            return tokenizer.apply_chat_template(
                normalise_messages(messages),
                tools=declared,
                tokenize=False,
                add_generation_prompt=generate,
                enable_thinking=enable_thinking,
            )
        except TEMPLATE_FAULTS as error:
            raise ConfigError(
                f"the tokenizer's chat template cannot render this conversation: {error}"
            ) from error

    return render


def normalise_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose tool calls hold their arguments as mappings, which XML templates need."""
    return [
        {**message, "tool_calls": [_mapped(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _mapped(call: object) -> object:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _mapped(function)}
    arguments = call.get("arguments")
    return {**call, "arguments": msgspec.json.decode(arguments)} if isinstance(arguments, str) else call


def find_frames(render: Render, opening: Sequence[Message], *, tool_role: bool) -> Frames:
    """Return the frames of conversations that begin with `opening` (which holds QUESTION_MARK)."""
    prompt = render(opening, True)
    prompt_head, prompt_tail = _around(prompt, QUESTION_MARK)
    opened = "<think>" in prompt_tail and "</think>" not in prompt_tail.rpartition("<think>")[2]
    turn = f"thought\n</think>\n\n{TURN_MARK}" if opened else TURN_MARK
    answered = [*opening, {"role": "assistant", "content": turn}]
    closing = _around(render(answered, False), TURN_MARK)[1]
    generation = _difference(render(opening, False), prompt)
    head, tail, rewrites = closing, "", False
    if tool_role:
        told = render([*answered, {"role": "tool", "content": RESULT_MARK}], True)
        before, after = _around(told, TURN_MARK)
        head, tail = _around(after, RESULT_MARK)
        rewrites = before != prompt + turn.removesuffix(TURN_MARK)
    return Frames(
        prompt_head, prompt_tail, closing, _difference(closing, head), tail, generation, opened, rewrites
    )


def _around(text: str, mark: str) -> tuple[str, str]:
    head, found, tail = text.partition(mark)
    if not found or mark in tail:
        raise ConfigError("the tokenizer's chat template does not render a message's text exactly once")
    return head, tail


def _difference(shorter: str, longer: str) -> str:
    if not longer.startswith(shorter):
        raise ConfigError(
            "the tokenizer's chat template renders the end of a turn differently once more follows"
        )
    return longer.removeprefix(shorter)
