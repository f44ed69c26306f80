"""The tool protocols: reported outputs, the rules behind them, and what holds for any text."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from rollout.protocols import PROTOCOLS, get_protocol
from rollout.protocols.base import part_reasoning
from rollout.tools import CALCULATOR_SPEC, SEARCH_SPEC
from rollout.toolspec import ToolSpec, check_arguments
from tests.rollout.reported import Reported, cases

FORMATS = {"qwen_xml": "qwen3_5", "hermes": "hermes", "search_r1_tags": "search_r1"}
TOOLS = (SEARCH_SPEC, CALCULATOR_SPEC)
WEATHER = ToolSpec(
    "weather",
    "Tell the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1},
            "hourly": {"type": "boolean"},
            "fields": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    },
)


def xml(query: str, name: str = "search", parameter: str = "query") -> str:
    """Return a call as Qwen3.5 writes it."""
    return f"<tool_call>\n<function={name}>\n<parameter={parameter}>\n{query}\n</parameter>\n</function>\n</tool_call>"


def hermes(name: str, **arguments: object) -> str:
    """Return a call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


KINDS = {"tool_call": "call", "answer": "answer", "invalid": "invalid", "truncated": "truncated"}


@pytest.mark.parametrize("reported", cases("a-toolcall"))
def test_reported_turns(reported: Reported) -> None:
    """Every reported output has the verdict, the calls and the texts that are right for it."""
    given_, expected = reported["input"], reported["expected"]
    opened = given_.get("prompt_suffix", "").endswith("<think>\n")
    text = given_["text"]
    parsed = get_protocol(FORMATS[given_["format"]]).parse(
        text, (SEARCH_SPEC,), stop_reason=given_["finish_reason"], opened=opened
    )
    assert parsed.kind == KINDS[expected["outcome"]]
    assert [{"name": c.name, "arguments": c.arguments} for c in parsed.calls] == expected["calls"]
    assert (parsed.call is not None) == (parsed.kind == "call")
    if "content_before" in expected:
        assert parsed.content == expected["content_before"]
    if "reasoning" in expected:
        assert parsed.reasoning == expected["reasoning"]
    if "final_answer" in expected:
        assert parsed.answer == expected["final_answer"]
    if "kept_text" in expected:
        assert text[: parsed.kept] == expected["kept_text"]
    if parsed.kind in ("invalid", "truncated"):
        assert parsed.problem


def test_a_call_before_the_thinking_ends_is_refused_when_the_prompt_opened_it() -> None:
    """With thinking on, a turn that never closes its block is all thinking."""
    parsed = get_protocol("qwen3_5").parse(xml("who"), TOOLS, opened=True)
    assert (parsed.kind, parsed.problem) == ("invalid", "the thinking block was never closed")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Answer: Rome\n" + xml("who"), "a tool call and an answer in one turn"),
        (xml("who") + "\nAnswer: Rome", "text after the call"),
        (xml("who") + xml("what"), "more than one call in a turn (2)"),
        (xml("  "), "argument 'query' of tool 'search' is blank"),
        (xml("x", name="browse"), "no tool named 'browse' is declared"),
        (xml("x", parameter="q"), "tool 'search' has no argument 'q'"),
        ("Answer: Rome </tool_call>", "call markup without a call block"),
        ("Rome", "neither a call nor an answer"),
        ("", "neither a call nor an answer"),
        ("Answer:   \n", "neither a call nor an answer"),
        ("Answer: a\nAnswer: b\nAnswer: c", "3 answer lines, expected exactly one"),
        ("<tool_call>", "malformed call: no <function=NAME> after <tool_call>"),
        (
            "<tool_call><function=search>x",
            "malformed call: expected <parameter=NAME> or </function></tool_call>",
        ),
        (
            xml("a").replace("</function>", "<parameter=query>b</parameter></function>"),
            "malformed call: parameter 'query' stands twice",
        ),
        ("</function> " + xml("a"), "stray call markup before the call"),
    ],
)
def test_why_a_turn_is_invalid(text: str, problem: str) -> None:
    """An invalid turn says what is wrong with it."""
    parsed = get_protocol("qwen3_5").parse(text, TOOLS)
    assert (parsed.kind, parsed.problem) == ("invalid", problem)


@pytest.mark.parametrize("name", ["qwen3_5", "hermes"])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Answer: Rome", "Rome"),
        ("I looked it up.\n  Answer:  Rome, Italy \r\n", "Rome, Italy"),
        ("<think>Answer: Paris</think>Answer: Rome<|im_end|>\n", "Rome"),
        ("Answer:\nAnswer: Rome", "Rome"),
        ("Answer: Rome<|im_end|><|endoftext|>", "Rome"),
    ],
)
def test_answer_lines(name: str, text: str, answer: str) -> None:
    """One non-empty line outside the thinking is the answer, whatever stands around it."""
    parsed = get_protocol(name).parse(text, TOOLS)
    assert (parsed.kind, parsed.answer) == ("answer", answer)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Answer: Ro", "truncated"),
        ("Answer: Rome\nBecause of", "answer"),
        (xml("who"), "truncated"),
        ("<think>Let me", "truncated"),
    ],
)
def test_a_turn_that_hit_its_limit(text: str, kind: str) -> None:
    """Cut off, a turn is no call, and an answer only if its line was finished."""
    assert get_protocol("qwen3_5").parse(text, TOOLS, stop_reason="length").kind == kind


def test_any_tool_with_a_schema_can_be_called() -> None:
    """XML values take their declared types; both protocols give the same call."""
    tools = (*TOOLS, WEATHER)
    text = (
        "<tool_call><function=weather><parameter=city>Oslo</parameter><parameter=days>3</parameter>"
        '<parameter=hourly>true</parameter><parameter=fields>["rain", "wind"]</parameter></function></tool_call>'
    )
    parsed = get_protocol("qwen3_5").parse(text, tools)
    assert parsed.call is not None
    assert parsed.call.arguments == {"city": "Oslo", "days": 3, "hourly": True, "fields": '["rain","wind"]'}
    written = hermes("weather", city="Oslo", days=3, hourly=True, fields=["rain", "wind"])
    assert get_protocol("hermes").parse(written, tools).call == parsed.call
    assert get_protocol("qwen3_5").parse(text.replace(">3<", ">0<"), tools).kind == "invalid"
    assert get_protocol("qwen3_5").parse(text.replace(">3<", ">soon<"), tools).kind == "invalid"
    calculated = get_protocol("search_r1").parse("<calculator> 2 + 2 </calculator>", tools)
    assert calculated.call is not None
    assert calculated.call.arguments == {"expression": "2 + 2"}


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "search", "arguments": {"query": NaN}}',
        '{"name": "search", "arguments": {"query": "a", "query": "b"}}',
        '{"name": "search", "arguments": {"query": "\\ud800"}}',
        '{"name": "search"}',
        '{"name": "browse", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "search", "arguments": "[1]"}',
        '{"name": "search", "arguments": {"query": ' + "9" * 5000 + "}}",
        '{"name": "weather", "arguments": {"city": "x", "days": 99999999999999999999999}}',
        '{"name": "weather", "arguments": {"city": "x", "fields": ' + "[" * 5000 + "]" * 5000 + "}}",
        "[]",
        "",
    ],
)
def test_json_that_is_no_call(body: str) -> None:
    """Strictly read JSON that cannot be logged or checked is malformed, and nothing is raised."""
    parsed = get_protocol("hermes").parse(f"<tool_call>\n{body}\n</tool_call>", (*TOOLS, WEATHER))
    assert (parsed.kind, parsed.calls) == ("invalid", ())


def test_search_r1_corrects_and_the_others_end() -> None:
    """Only the tags answer an invalid turn, with a text that names both actions."""
    protocol = get_protocol("search_r1")
    parsed = protocol.parse("<search> </search>", TOOLS)
    assert (parsed.kind, protocol.corrects_invalid) == ("invalid", True)
    assert "<search>" in protocol.correction(parsed.problem)
    assert "<answer>" in protocol.correction(parsed.problem)
    assert not get_protocol("hermes").corrects_invalid
    assert protocol.stop(TOOLS) == ("</search>", "</calculator>", "</answer>")


def test_an_empty_answer_tag_is_no_answer() -> None:
    """Tags around nothing are invalid."""
    assert get_protocol("search_r1").parse("<answer> \n</answer>", TOOLS).kind == "invalid"


def test_unknown_protocol_names_the_known_ones() -> None:
    """A wrong name is a configuration error."""
    with pytest.raises(ConfigError, match="hermes, qwen3_5, search_r1"):
        get_protocol("react")


MARKUP = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=search>",
        "</function>",
        "<parameter=query>",
        "</parameter>",
        "<think>",
        "</think>",
        "<search>",
        "</search>",
        "<answer>",
        "</answer>",
        "<information>",
        '{"name": "search", "arguments": {"query": "x"}}',
        "Answer:",
        "Answer: Rome",
        "<|im_end|>",
        "\n",
        " ",
        '"',
        "{",
        "x",
    ]
)
ANY_TEXT = st.lists(st.one_of(MARKUP, st.text(max_size=8)), max_size=24).map("".join)


@pytest.mark.parametrize("name", sorted(PROTOCOLS))
@given(text=ANY_TEXT, stop_reason=st.sampled_from(["stop", "length"]), opened=st.booleans())
def test_any_text_has_one_verdict(name: str, text: str, stop_reason: str, opened: bool) -> None:
    """No text raises; a call has arguments that fit, an answer is not blank, the rest says why not."""
    parsed = get_protocol(name).parse(text, TOOLS, stop_reason=stop_reason, opened=opened)
    assert 0 <= parsed.kept <= len(text)
    assert (parsed.kind == "call") == (parsed.call is not None)
    assert (parsed.kind == "answer") == bool(parsed.answer and parsed.answer.strip())
    assert (parsed.kind in ("invalid", "truncated")) == bool(parsed.problem)
    if parsed.call is not None:
        assert parsed.calls == (parsed.call,)
        assert parsed.call.arguments["query" if parsed.call.name == "search" else "expression"]


@pytest.mark.parametrize("name", ["qwen3_5", "hermes"])
@given(query=st.text(min_size=1, max_size=60).filter(lambda q: q.strip()), before=st.text(max_size=20))
def test_a_written_call_is_read_back(name: str, query: str, before: str) -> None:
    """Whatever the query says, the call that a template would render is understood as it was meant."""
    if re.search(r"</parameter>\s*(<parameter=[^<>\s]+>|</function>\s*</tool_call>)", query):
        return  # such a value ends where it says so: XML has no escapes here
    if re.search(r"</?think>|<\|", query) or re.search(r"</?think>|Answer:|<", before):
        return
    text = before + (xml(query) if name == "qwen3_5" else hermes("search", query=query))
    parsed = get_protocol(name).parse(text, (SEARCH_SPEC,))
    assert parsed.kind == "call"
    assert parsed.call is not None
    assert parsed.call.arguments == {"query": query}


@given(text=ANY_TEXT, opened=st.booleans())
def test_thinking_is_parted_without_loss(text: str, opened: bool) -> None:
    """Text that is not thinking comes after the last closing tag or outside balanced blocks, in order."""
    thought = part_reasoning(text, opened=opened)
    assert "</think>" not in thought.rest
    assert thought.closed or opened or "<think>" in text
    if "think>" not in text:
        assert (thought.rest, thought.closed) == (("", False) if opened else (text, True))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [None, True, 1.5]}, ""),
        ({"a": [float("inf")]}, "is not a finite number"),
        ({"\ud800": 1}, "holds half a surrogate pair"),
        ([2**64], "is an integer beyond 64 bits"),
        (None, ""),
    ],
)
def test_only_what_the_log_can_hold_is_an_argument(value: object, problem: str) -> None:
    """Values that no log entry can hold are a problem of the call, however deep they stand."""
    spec = ToolSpec("any", "Take anything.", {"type": "object", "properties": {"x": {}}})
    checked = check_arguments(spec, {"x": value})
    assert checked.problem.endswith(problem)
    assert bool(checked.problem) == bool(problem)


def test_arguments_are_checked_once_and_flat() -> None:
    """A list argument is logged as its JSON text; deep nesting is a problem, not a crash."""
    deep: list[object] = []
    for _ in range(3000):
        deep = [deep]
    assert check_arguments(WEATHER, {"city": "x", "fields": ["a"]}).arguments["fields"] == '["a"]'
    assert check_arguments(WEATHER, {"city": "x", "fields": deep}).problem
