"""Owns observations as events: a tool's result, its fault, or the correction of an invalid turn."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from core.arrays import pack_tokens, view_tokens
from core.events import Observed, ToolCalled
from core.nodes import Node
from core.tree import Group
from rollout.chat import Chat, Exchange, Rendered
from rollout.observations import text_of
from rollout.tools import ToolResult

INVALID_ACTION = "invalid_action"
"""Status of an observation that corrects an invalid turn."""

OnFault = Literal["void", "observe"]


def tool_observation(
    chat: Chat, group: Group, path: Sequence[Node], call: ToolCalled, result: ToolResult, on_fault: OnFault
) -> Observed:
    """Return what the environment answered to a call. A fault that voids the trajectory has no tokens."""
    node = path[-1]
    fitted = chat.fit_results(result.blocks, group.asked.params.max_tool_tokens)
    answer = Observed(
        node=node.node,
        content=text_of(fitted.pieces),
        tokens=b"",
        ok=result.ok,
        error=result.error,
        status=result.status,
        latency=result.latency,
        backend=result.backend,
        cached=result.cached,
        truncated=fitted.truncated,
        call_id=call.call_id,
        document_ids=result.document_ids,
    )
    if not result.ok and on_fault == "void":
        return answer
    rendered = chat.after_observation(
        view_tokens(node.sample.tokens),
        fitted.pieces,
        question=group.asked.question,
        past=_past(path),
    )
    return msgspec.structs.replace(
        answer,
        content=rendered.content,
        tokens=pack_tokens(rendered.tokens),
        prompt_reset=_reset(rendered),
    )


def correction(chat: Chat, node: Node, problem: str) -> Observed:
    """Return the observation that tells the policy that its turn was invalid."""
    rendered = chat.after_invalid(view_tokens(node.sample.tokens), problem)
    return Observed(
        node=node.node,
        content=rendered.content,
        tokens=pack_tokens(rendered.tokens),
        prompt_reset=_reset(rendered),
        ok=False,
        error=problem,
        status=INVALID_ACTION,
    )


def _past(path: Sequence[Node]) -> list[Exchange]:
    return [
        Exchange(node.sample.text, "" if node.observation is None else node.observation.content)
        for node in path
    ]


def _reset(rendered: Rendered) -> bytes | None:
    return None if rendered.prompt_reset is None else pack_tokens(rendered.prompt_reset)
