"""Owns what a trajectory does next: a pure decision from its recorded turns, the same after any crash.

The order inside a trajectory is sample, tool call, observation, sample; it ends with the first outcome that
applies: answered, bad_format, tool_limit, turn_limit, truncated, token_limit. `final_turn` "last" and
"forced" say the same in the words of two recipes: the last generation never runs a tool.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from core.arrays import view_tokens
from core.events import VOID_OUTCOMES, Outcome, SamplingParams, ToolCalled
from core.ids import NodeId
from core.nodes import Node
from core.segments import next_prompt
from core.tree import Group
from rollout.protocols import Parsed, ToolCall
from rollout.trees import lacks_observation

SEARCH = "search"
"""The tool that max_search_calls counts; others are bounded by the turns alone."""


class Rules(NamedTuple):
    """What a decision depends on besides the recorded turns and the group's own limits."""

    parse: Callable[[str, str], Parsed]
    """(text, stop reason) -> the protocol's verdict on a turn."""
    corrects_invalid: bool
    """Whether an invalid turn is corrected, rather than ending the trajectory."""


class RunTool(NamedTuple):
    """Run the call, once its event is recorded."""

    event: ToolCalled
    recorded: bool


class Correct(NamedTuple):
    """Tell the policy that its action was invalid; it uses a turn but no search call."""

    problem: str


class Continue(NamedTuple):
    """Sample the next turn."""


class End(NamedTuple):
    """The trajectory has ended; it is scored unless the outcome is void."""

    outcome: Outcome
    answer: str | None = None
    detail: str = ""


class Score(NamedTuple):
    """The end is recorded, its reward is not."""


Action = RunTool | Correct | Continue | End | Score


def next_action(rules: Rules, group: Group, tree: int, tip: NodeId) -> Action | None:
    """Return what the branch that has come to `tip` does next; None when nothing is left to do."""
    path = group.trees[tree].path(tip)
    node, params = path[-1], group.asked.params
    if node.answer is not None:
        return None if node.answer.outcome in VOID_OUTCOMES or node.reward is not None else Score()
    if node.observation is not None:
        if lacks_observation(node):
            return End(Outcome.VOID_TOOL, detail=node.observation.error or node.observation.status)
        room = params.max_trajectory_tokens - len(next_prompt(group, tree, tip))
        return Continue() if room > 0 else End(Outcome.TOKEN_LIMIT)
    if node.tool_call is not None:
        return RunTool(node.tool_call, recorded=True)
    return _judge(rules, group, tree, path)


def is_finished(rules: Rules, group: Group, tree: int, tip: NodeId) -> bool:
    """Tell whether nothing is left to do at the tip of a branch."""
    return next_action(rules, group, tree, tip) is None


def max_tokens(params: SamplingParams, prompt_tokens: int) -> int:
    """Return how many tokens a turn may have: the turn's limit, or what the trajectory has left."""
    return min(params.max_assistant_tokens, params.max_trajectory_tokens - prompt_tokens)


def search_calls(path: Sequence[Node]) -> int:
    """Return the searches that a path has called."""
    return sum(1 for node in path if node.tool_call is not None and node.tool_call.tool == SEARCH)


def _judge(rules: Rules, group: Group, tree: int, path: Sequence[Node]) -> Action:
    """Decide on a sampled turn to which nothing has happened yet."""
    node = path[-1]
    parsed = rules.parse(node.sample.text, node.sample.stop_reason)
    if parsed.kind == "answer":
        return End(Outcome.ANSWERED, parsed.answer)
    cut = _cut_short(group, tree, node)
    if parsed.kind == "call" and parsed.call is not None:
        forbidden = _forbidden(group.asked.params, path, parsed.call)
        return forbidden or cut or RunTool(_called(tree, node, parsed.call), recorded=False)
    if parsed.kind == "truncated":
        return cut or End(Outcome.TRUNCATED)
    if rules.corrects_invalid and not _is_last(group.asked.params, node):
        return cut or Correct(parsed.problem)
    return End(Outcome.BAD_FORMAT, detail=parsed.problem)


def _is_last(params: SamplingParams, node: Node) -> bool:
    return node.turn + 1 >= params.max_turns


def _forbidden(params: SamplingParams, path: Sequence[Node], call: ToolCall) -> End | None:
    """Return the end of a trajectory whose valid call its budget forbids."""
    if call.name == SEARCH and search_calls(path) >= params.max_search_calls:
        return End(Outcome.TOOL_LIMIT)
    return End(Outcome.TURN_LIMIT) if _is_last(params, path[-1]) else None


def _cut_short(group: Group, tree: int, node: Node) -> End | None:
    """Return the end of a turn that hit a limit, or that leaves the next prompt no room."""
    params = group.asked.params
    sampled = len(view_tokens(node.sample.tokens))
    if node.sample.stop_reason == "length" and sampled >= params.max_assistant_tokens:
        return End(Outcome.TRUNCATED)
    if len(next_prompt(group, tree, node.parent)) + sampled >= params.max_trajectory_tokens:
        return End(Outcome.TOKEN_LIMIT)
    return None


def _called(tree: int, node: Node, call: ToolCall) -> ToolCalled:
    return ToolCalled(
        node=node.node, call_id=f"t{tree}/{node.node}", tool=call.name, arguments=call.arguments
    )
