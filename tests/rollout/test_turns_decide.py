"""What a trajectory does next: every outcome, in the order in which they apply."""

from collections.abc import Sequence

import msgspec
import pytest

from core.events import GroupEvent, Outcome, Plan, ToolCalled
from core.tree import Group
from rollout.turns import Continue, Correct, End, Rules, RunTool, Score, max_tokens, next_action
from tests.fakes import ScriptedSampler, ScriptedSearch, answer, call, make_environment
from tests.rollout.support import CHAIN, asked, called, ended, folded, observed, sampled, step

QWEN = make_environment(ScriptedSampler(), ScriptedSearch()).chat
TAGS = make_environment(ScriptedSampler(), ScriptedSearch(), protocol="search_r1").chat
RULES = Rules(QWEN.parse, QWEN.protocol.corrects_invalid)
CORRECTING = Rules(TAGS.parse, TAGS.protocol.corrects_invalid)
SEARCHING = "<think>hm</think><search>it</search>"
BOTH = f"{answer('x')}\n{call('it')}"


def after(
    events: Sequence[GroupEvent], tip: str, rules: Rules = RULES, plan: Plan = CHAIN, **params: object
) -> object:
    """Return the next action of a chain with these events."""
    group = folded(asked(plan, **params), [events])
    return next_action(rules, group, 1, tip)


def turn(text: str, **params: object) -> object:
    """Return what follows a first turn of this text."""
    return after([sampled("0.0.0", None, text)], "0.0.0", **params)


def test_answer_ends_the_trajectory() -> None:
    """The extracted answer is recorded with the end."""
    assert turn(answer("Ada Lovelace")) == End(Outcome.ANSWERED, "Ada Lovelace")


def test_call_is_recorded_then_run() -> None:
    """The call's event follows from the turn; once recorded, it is only run."""
    event = ToolCalled(node="0.0.0", call_id="t1/0.0.0", tool="search", arguments={"query": "it"})
    assert turn(call("it")) == RunTool(event, recorded=False)
    assert after([sampled("0.0.0", None, call("it")), event], "0.0.0") == RunTool(event, recorded=True)


def test_observation_is_followed_by_the_next_turn() -> None:
    """A tip with an observation and room goes on."""
    assert after(step("0.0.0", None), "0.0.0") == Continue()


@pytest.mark.parametrize(
    "text", ["I do not know", "", BOTH, f"{call('a')}{call('b')}", "<tool_call>\n</tool_call>"]
)
def test_neither_call_nor_answer_or_both_is_bad_format(text: str) -> None:
    """An invalid turn ends a trajectory of a protocol that does not correct."""
    action = turn(text)
    assert isinstance(action, End)
    assert (action.outcome, action.answer) == (Outcome.BAD_FORMAT, None)
    assert action.detail


def test_call_beyond_the_search_budget_is_tool_limit() -> None:
    """The third search where two are allowed; an invalid action uses a turn but no search call."""
    two = [*step("0.0.0", None), *step("0.0.1", "0.0.0"), sampled("0.0.2", "0.0.1", call("it"))]
    assert after(two, "0.0.2", max_search_calls=2) == End(Outcome.TOOL_LIMIT)
    assert isinstance(after(two, "0.0.2", max_search_calls=3), RunTool)
    corrected = [sampled("0.0.0", None, "hm"), observed("0.0.0"), sampled("0.0.1", "0.0.0", SEARCHING)]
    assert isinstance(after(corrected, "0.0.1", CORRECTING, max_search_calls=1), RunTool)


def test_other_tools_do_not_use_up_searches() -> None:
    """max_search_calls counts searches alone."""
    events = [sampled("0.0.0", None), called("0.0.0", "calculator"), observed("0.0.0")]
    events = [*events, sampled("0.0.1", "0.0.0", call("it"))]
    assert isinstance(after(events, "0.0.1", max_search_calls=1), RunTool)


@pytest.mark.parametrize("final_turn", ["last", "forced"])
def test_call_in_the_last_turn_is_turn_limit(final_turn: str) -> None:
    """The last generation runs no tool, in the words of either recipe."""
    events = [*step("0.0.0", None), sampled("0.0.1", "0.0.0", call("it"))]
    assert after(events, "0.0.1", max_turns=2, final_turn=final_turn) == End(Outcome.TURN_LIMIT)
    assert isinstance(after(events, "0.0.1", max_turns=3, final_turn=final_turn), RunTool)


def test_tool_limit_goes_before_turn_limit() -> None:
    """Of two limits the first in the list is recorded."""
    events = [*step("0.0.0", None), sampled("0.0.1", "0.0.0", call("it"))]
    assert after(events, "0.0.1", max_turns=2, max_search_calls=1) == End(Outcome.TOOL_LIMIT)


def test_turn_that_hits_its_limit_is_truncated() -> None:
    """Cut at max_assistant_tokens, with a call or without one; a whole answer still counts."""
    cut = [sampled("0.0.0", None, call("it")[:-5], tokens=9, stop="length")]
    assert after(cut, "0.0.0", max_assistant_tokens=9) == End(Outcome.TRUNCATED)
    whole = [sampled("0.0.0", None, f"{answer('x')}\nand", tokens=9, stop="length")]
    assert after(whole, "0.0.0", max_assistant_tokens=9) == End(Outcome.ANSWERED, "x")
    tags = [sampled("0.0.0", None, SEARCHING, tokens=9, stop="length")]
    assert after(tags, "0.0.0", CORRECTING, max_assistant_tokens=9) == End(Outcome.TRUNCATED)
    babble = [sampled("0.0.0", None, "hm", tokens=9, stop="length")]
    assert after(babble, "0.0.0", CORRECTING, max_assistant_tokens=9) == End(Outcome.TRUNCATED)


def test_limits_go_before_truncated() -> None:
    """A forbidden call that was also cut is tool_limit or turn_limit."""
    tags = [sampled("0.0.0", None, SEARCHING, tokens=9, stop="length")]
    assert after(tags, "0.0.0", CORRECTING, max_assistant_tokens=9, max_turns=1) == End(Outcome.TURN_LIMIT)


def test_turn_cut_by_the_trajectory_is_token_limit() -> None:
    """A turn that ended for want of room in the trajectory is not its own fault."""
    cut = [sampled("0.0.0", None, "hm", tokens=4, stop="length")]
    assert after(cut, "0.0.0", max_trajectory_tokens=9) == End(Outcome.TOKEN_LIMIT)


def test_turn_cut_by_the_service_is_truncated() -> None:
    """A sampler with a limit of its own cuts a turn like the turn's limit does."""
    cut = [sampled("0.0.0", None, "hm", tokens=4, stop="length")]
    assert after(cut, "0.0.0") == End(Outcome.TRUNCATED)


def test_next_prompt_counts_for_the_token_limit() -> None:
    """Prompt 5 + turn 2 + observation 3 = 10 tokens: with a budget of 10 no token is left to sample."""
    assert after(step("0.0.0", None), "0.0.0", max_trajectory_tokens=11) == Continue()
    assert after(step("0.0.0", None), "0.0.0", max_trajectory_tokens=10) == End(Outcome.TOKEN_LIMIT)


def test_no_tool_is_run_when_its_answer_cannot_fit() -> None:
    """Prompt and turn fill the budget already: the search is not paid for."""
    assert turn(call("it"), max_trajectory_tokens=7) == End(Outcome.TOKEN_LIMIT)
    assert isinstance(turn(call("it"), max_trajectory_tokens=8), RunTool)


def test_correcting_protocol_corrects_while_turns_are_left() -> None:
    """An invalid action is answered, except in the last turn, where it is bad_format."""
    events = [sampled("0.0.0", None, "hm")]
    assert after(events, "0.0.0", CORRECTING) == Correct("neither a call nor an answer")
    last = after(events, "0.0.0", CORRECTING, max_turns=1)
    assert last == End(Outcome.BAD_FORMAT, detail="neither a call nor an answer")


def test_failed_tool_voids_the_trajectory() -> None:
    """An observation without tokens is the void one of a failed tool."""
    events = [sampled("0.0.0", None), called("0.0.0"), observed("0.0.0", tokens=0, ok=False)]
    assert after(events, "0.0.0") == End(Outcome.VOID_TOOL, detail="error")


def test_nothing_follows_an_end_but_its_score() -> None:
    """Scored or void: done. Ended without a reward: to be scored."""
    assert after([sampled("0.0.0", None), *ended("0.0.0")], "0.0.0") is None
    assert after([sampled("0.0.0", None), *ended("0.0.0", None)], "0.0.0") == Score()
    assert after([sampled("0.0.0", None), *ended("0.0.0", None, Outcome.VOID_ENGINE)], "0.0.0") is None


def test_a_turn_gets_what_the_trajectory_has_left() -> None:
    """max_tokens is the smaller of both limits."""
    params = asked(max_trajectory_tokens=100, max_assistant_tokens=30).params
    assert [max_tokens(params, used) for used in (5, 70, 99)] == [30, 30, 1]


def test_decisions_depend_on_nothing_else() -> None:
    """Seeds, times and latencies in the records change no decision."""
    events = step("0.0.0", None)
    other = [
        msgspec.structs.replace(events[0], seed=9, seconds=3.0),
        events[1],
        msgspec.structs.replace(events[2], latency=2.0),
    ]
    assert after(other, "0.0.0") == after(events, "0.0.0")
    groups: list[Group] = [folded(asked(), [one]) for one in (events, other)]
    assert next_action(RULES, groups[0], 1, "0.0.0") == next_action(RULES, groups[1], 1, "0.0.0")
