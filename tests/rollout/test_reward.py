"""Scoring: reported answers, every level of every scorer, and scorers of the user's own."""

import math
import sys
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import RewardSettings
from core.errors import CodeNotAllowed, ConfigError, RewardError
from core.events import Outcome, Rewarded
from core.tree import Trajectory
from rollout.normalise import RULES, exact_match, f1, get_rule
from rollout.protocols import get_protocol
from rollout.reward import BUILDERS, get_scorer, levels
from rollout.scoring import reward_events
from rollout.tools import SEARCH_SPEC
from tests.rollout.played import OUTCOMES, Step, play
from tests.rollout.reported import ROOT, Reported, case, cases

SETTINGS = RewardSettings()
THOUGHT = "<think>I need to look.</think>\n"


def judged(
    text: str, references: list[str], protocol: str = "qwen3_5", before: tuple[Step, ...] = ()
) -> Trajectory:
    """Return a trajectory that ended with `text`, judged by the protocol's own parser."""
    parsed = get_protocol(protocol).parse(text, (SEARCH_SPEC,))
    outcome = OUTCOMES.get(parsed.kind, Outcome.TURN_LIMIT)
    last = Step(text)
    return play(
        (*before, last), references=references, outcome=outcome, answer=parsed.answer, protocol=protocol
    )


def value(scorer: str, trajectory: Trajectory, settings: RewardSettings = SETTINGS) -> float:
    """Return what a scorer gives."""
    return get_scorer(scorer, settings).score(trajectory).value


COLUMNS = {
    "em_squad_ascii": ("em", "squad_ascii"),
    "em_unicode_punct": ("em", "unicode_p"),
    "f1_squad_ascii": ("f1", "squad_ascii"),
    "f1_unicode_punct": ("f1", "unicode_p"),
    "f1_hotpot_ascii": ("f1", "hotpot_ascii"),
    "f1_character": ("f1", "characters"),
    "right_em": ("em", "careful"),
    "right_f1": ("f1", "careful"),
}

PREDICTIONS = ("01", "03", "05", "06", "08", "10", "11", "13", "15")


@pytest.mark.parametrize("reported", cases("b-answer", *PREDICTIONS))
def test_reported_predictions(reported: Reported) -> None:
    """Every written-down rule gives the value that it gives, and the careful rule gives the right one."""
    prediction, references = reported["input"]["prediction"], reported["input"]["references"]
    for column, wanted in {**reported["expected"], **reported.get("extra_expected", {})}.items():
        measure, rule = COLUMNS[column]
        if measure == "em":
            assert exact_match(prediction, references, get_rule(rule)) == bool(wanted), column
        else:
            exact = Fraction(wanted["fraction"]) if isinstance(wanted, dict) else Fraction(wanted)
            assert f1(prediction, references, get_rule(rule)) == pytest.approx(float(exact), abs=1e-15), (
                column
            )


@pytest.mark.parametrize("reported", cases("b-answer", "16", "18", "20", "21", "23"))
@pytest.mark.parametrize("protocol", ["qwen3_5", "hermes"])
def test_reported_answer_lines(reported: Reported, protocol: str) -> None:
    """Extraction, format, exact match and reward of every reported final text."""
    given_, expected = reported["input"], reported["expected"]
    trajectory = judged(given_["text"], given_["references"], protocol)
    score = get_scorer("em_format", SETTINGS).score(trajectory)
    assert trajectory.ended.answer == expected["extracted"]
    assert score.components["format"] == expected["valid_format"]
    assert score.components["exact_match"] == expected["em"]
    assert score.value == expected["reward_reference_scale"]


def test_an_example_in_the_prompt_is_no_answer() -> None:
    """Only what was sampled is scored."""
    reported = case("b-answer", "25-prompt-example-counted-as-answer")
    text = reported["input"]["text"]
    assert get_protocol("search_r1").parse(text, (SEARCH_SPEC,)).answer == reported["input"]["references"][0]
    sampled = text[reported["prompt_chars"] :]
    trajectory = judged(sampled, reported["input"]["references"], "search_r1")
    assert trajectory.ended.answer is reported["expected"]["extracted"] is None
    for scorer in ("em", "em_format", "search_r1_format", "f1_format"):
        assert value(scorer, trajectory) <= reported["expected"]["em"]


def test_tags_in_retrieved_text_are_no_answer() -> None:
    """An answer tag inside a result pays nothing, however right it is."""
    reported = case("b-answer", "26-answer-tag-inside-retrieved-text")
    call, rest = reported["input"]["text"].split("\n\n<information>")
    content, final = rest.split("</information>\n\n")
    assert "<answer>Canberra</answer>" in content
    trajectory = judged(final, reported["input"]["references"], "search_r1", (Step(call, observed=content),))
    assert trajectory.ended.answer is reported["expected"]["extracted"] is None
    score = get_scorer("search_r1_format", SETTINGS).score(trajectory)
    assert (score.value, score.components["format"], score.components["exact_match"]) == (0.0, 0.0, 0.0)
    assert score.components["retrieved"] == 1.0


@pytest.mark.parametrize(
    ("outcome", "answer", "expected"),
    [
        (Outcome.ANSWERED, "rome.", 1.0),
        (Outcome.ANSWERED, "Paris", 0.0),
        (Outcome.BAD_FORMAT, None, -0.1),
        (Outcome.TOOL_LIMIT, None, -0.1),
        (Outcome.TURN_LIMIT, None, -0.1),
        (Outcome.TRUNCATED, None, -0.1),
        (Outcome.TOKEN_LIMIT, None, -0.1),
    ],
)
def test_em_format_has_three_levels(outcome: Outcome, answer: str | None, expected: float) -> None:
    """Right, well formed but wrong, and everything that the policy did not bring to an answer."""
    assert value("em_format", play([Step("t")], outcome=outcome, answer=answer)) == expected


@pytest.mark.parametrize(
    ("match", "valid", "answered", "retrieved", "expected"),
    [
        (1.0, True, True, False, 1.0),
        (1.0, True, True, True, 1.0),
        (1.0, False, True, False, 0.8),
        (0.0, True, True, False, 0.2),
        (0.0, True, True, True, 0.3),
        (0.0, False, True, True, 0.1),
        (0.0, True, False, False, 0.2),
        (0.0, True, False, True, 0.3),
        (0.0, False, False, True, 0.0),
        (0.5, True, True, False, 0.6),
        (0.5, False, True, False, 0.45),
    ],
)
def test_every_level_of_the_format_reward(
    match: float, valid: bool, answered: bool, retrieved: bool, expected: float
) -> None:
    """Match x structure, with a bonus for evidence that was found; an F1 lies on the line between."""
    settings = RewardSettings(retrieval_score=0.1)
    got = levels(match, valid=valid, answered=answered, retrieved=retrieved, settings=settings)
    assert got == pytest.approx(expected)


SEARCHED = Step(f"{THOUGHT}<search> capital of Italy </search>", observed="Doc: Rome is a city.")
CORRECTED = Step("Hm.", observed="My previous action is invalid.", called=False)


@pytest.mark.parametrize(
    ("before", "text", "expected"),
    [
        ((SEARCHED,), f"{THOUGHT}<answer> Rome </answer>", 1.0),
        ((SEARCHED,), "<answer> Rome </answer>", 0.8),
        ((SEARCHED,), f"{THOUGHT}<answer> Oslo </answer>", 0.25),
        ((), f"{THOUGHT}<answer> Oslo </answer>", 0.2),
        ((CORRECTED, SEARCHED), f"{THOUGHT}<answer> Rome </answer>", 0.8),
        ((SEARCHED._replace(text="<search> x </search>"),), f"{THOUGHT}<answer> Rome </answer>", 0.8),
        ((SEARCHED,), f"Well. {THOUGHT}<answer> Rome </answer>", 0.8),
        ((SEARCHED,), "<think>a<think>b</think><answer> Oslo </answer>", 0.1),
        ((SEARCHED,), THOUGHT, 0.0),
    ],
)
def test_search_r1_format_reads_the_whole_trajectory(
    before: tuple[Step, ...], text: str, expected: float
) -> None:
    """Every turn must be a thought and one action; a correction on the way costs the structure."""
    settings = RewardSettings(retrieval_score=0.05)
    trajectory = judged(text, ["Rome"], "search_r1", before)
    assert value("search_r1_format", trajectory, settings) == pytest.approx(expected)


def test_f1_format_grades_between_the_levels() -> None:
    """Half an answer is worth half the way from the structure's level to 1."""
    trajectory = judged(f"{THOUGHT}<answer> Rome Italy Europe </answer>", ["Rome"], "search_r1")
    assert value("f1", trajectory) == 0.5
    assert value("f1_format", trajectory) == pytest.approx(0.6)
    assert value("search_r1_format", trajectory) == 0.2


def test_structure_of_native_calls() -> None:
    """Where calls are native, the structure is kept if every turn before the answer was a call that ran."""
    call = Step("call", observed="Rome is a city.")
    assert value("search_r1_format", judged("Answer: Rome", ["Rome"], before=(call,))) == 1.0
    assert value("search_r1_format", judged("Answer: Oslo", ["Rome"], before=(call,))) == 0.2


def test_the_normaliser_can_be_chosen_and_is_part_of_the_version() -> None:
    """name@normaliser compares by another rule, under another version."""
    trajectory = judged("Answer: $3,000", ["3000"])
    assert value("em", trajectory) == 1.0
    assert value("em@unicode_p", trajectory) == 0.0
    assert value("em_format", trajectory) == 0.0
    assert value("em_format@squad_ascii", trajectory) == 1.0
    versions = {get_scorer(f"em@{rule}", SETTINGS).version for rule in RULES}
    assert len(versions) == len(RULES)


def test_a_scorer_says_what_it_is() -> None:
    """Id, version and source digest; other levels are another version of the same scorer."""
    scorer = get_scorer("search_r1_format", SETTINGS)
    assert (scorer.id, scorer.version) == ("search_r1_format", "1 squad_ascii 0.2/0.1/0.0")
    assert len(scorer.source_digest) == 64
    other = get_scorer("search_r1_format", RewardSettings(final_format_score=0.3))
    assert other.version != scorer.version
    assert get_scorer("em_format", SETTINGS).version == "1 unicode_p"
    for wrong in ("exact", "em@nfkc"):
        with pytest.raises(ConfigError, match="expected one of"):
            get_scorer(wrong, SETTINGS)


WriteModule = Callable[[str, str], str]

MODULE = """
import numpy as np

from rollout.reward import NodeScore, Score

def fixed(trajectory):
    return {value}

def dense(trajectory):
    return Score(0.5, {{"n": 1.0}}, tuple(NodeScore(turn.node, 0.25) for turn in trajectory.path))

def bad_node(trajectory):
    return Score(0.5, nodes=(NodeScore("0.0.0", float("inf")),))

def typed(trajectory):
    parts = {{"hit": True, "n": np.int64(3), 4: np.float32(0.5)}}
    return Score({value}, parts, [NodeScore("0.0.0", {value}, parts)])

def twice(trajectory):
    return Score(0.5, nodes=(NodeScore("0.0.0", 1.0), NodeScore("0.0.0", 1.0)))

constant = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """Write a module of scorers into the current directory."""

    def write(name: str, result: str) -> str:
        (tmp_path / f"{name}.py").write_text(MODULE.format(value=result))
        monkeypatch.chdir(tmp_path)
        return name

    path = list(sys.path)
    yield write
    sys.path[:] = path


def test_own_code_runs_only_if_allowed(module: WriteModule) -> None:
    """A scorer of one's own is imported only when it is allowed by its very name."""
    name = module("scorers_allowed", "0.25")
    spec = f"{name}:fixed"
    with pytest.raises(CodeNotAllowed, match=f"--allow-code {spec}"):
        get_scorer(spec, SETTINGS)
    with pytest.raises(CodeNotAllowed):
        get_scorer(spec, SETTINGS, [f"{name}:dense"])
    assert name not in sys.modules
    scorer = get_scorer(spec, SETTINGS, [spec])
    assert scorer.score(play([Step("t")], answer="Rome")).value == 0.25
    assert (scorer.id, len(scorer.source_digest)) == (spec, 64)


def test_turns_can_be_scored(module: WriteModule) -> None:
    """A Score may carry a value for every turn."""
    spec = f"{module('scorers_dense', '0')}:dense"
    score = get_scorer(spec, SETTINGS, [spec]).score(play([SEARCHED, Step("t")], answer="Rome"))
    assert [(node.node, node.value) for node in score.nodes] == [("0.0.0", 0.25), ("0.0.1", 0.25)]


@pytest.mark.parametrize("result", ["float('nan')", "float('inf')", "'high'", "None", "1 / 0"])
def test_what_is_no_number_is_refused(module: WriteModule, result: str) -> None:
    """A scorer that raises, or returns something else than a finite number, stops with its name."""
    spec = f"{module(f'scorers_{abs(hash(result))}', result)}:fixed"
    with pytest.raises(RewardError, match="fixed"):
        get_scorer(spec, SETTINGS, [spec]).score(play([Step("t")], answer="Rome"))


def test_wrong_names_of_own_code(module: WriteModule) -> None:
    """A module or function that is not there is a configuration error."""
    name = module("scorers_named", "0")
    for spec, problem in (
        ("no_such_module:f", "cannot import"),
        ("math:sqrt", "the source of 'math' cannot be read"),
        (f"{name}:absent", "has no function"),
        (f"{name}:constant", "has no function"),
    ):
        with pytest.raises(ConfigError, match=problem):
            get_scorer(spec, SETTINGS, [spec])
    spec = f"{name}:bad_node"
    with pytest.raises(RewardError, match=r"node 0\.0\.0"):
        get_scorer(spec, SETTINGS, [spec]).score(play([Step("t")], answer="x"))


OVERLAP = "examples.scorers:character_overlap"


def test_the_example_scorer_tells_bad_answers_apart() -> None:
    """Every text gets a grade in 0..1: the closer, the higher, and an answer above the same raw text."""
    scorer = get_scorer(OVERLAP, SETTINGS, [OVERLAP])
    texts = ["Answer: Rome", "Answer: Roma", "Answer: Oslo", "Answer: xyz", "Rome", "blah", ""]
    values = [scorer.score(judged(text, ["Rome"])).value for text in texts]
    assert values[0] == 1.0
    assert sorted(values[:4], reverse=True) == values[:4]
    assert (values[4], values[6]) == (0.5, 0.0)
    assert len(set(values)) >= 5
    assert all(0 <= value <= 1 for value in values)
    spec = "examples.scorers:reference_found"
    dense = get_scorer(spec, SETTINGS, [spec]).score(judged("Answer: Rome", ["Rome"], before=(SEARCHED,)))
    assert (dense.value, [node.value for node in dense.nodes]) == (1.0, [1.0])


def test_the_documented_scorer_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in the documentation runs as written."""
    text = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = "mine:short_and_right"
    score = get_scorer(spec, SETTINGS, [spec]).score(judged("Answer: Rome", ["Rome"]))
    assert (score.value, score.components) == (1.0, {"length": 4})


@pytest.mark.parametrize("name", list(BUILDERS))
@given(answer=st.text(max_size=30), references=st.lists(st.text(max_size=20), max_size=3))
def test_any_answer_has_a_bounded_reward(name: str, answer: str, references: list[str]) -> None:
    """Whatever is answered, against whatever references, the reward is finite and within the levels."""
    trajectory = play([Step(answer)], references=references, answer=answer)
    score = get_scorer(name, SETTINGS).score(trajectory)
    assert math.isfinite(score.value)
    assert -0.1 <= score.value <= 1.0
    assert score.components["exact_match"] <= score.components["f1"] or not references


@pytest.mark.parametrize("rule", sorted(RULES))
@given(a=st.text(max_size=30), b=st.text(max_size=30))
def test_rules_are_symmetric_and_idempotent(rule: str, a: str, b: str) -> None:
    """F1 does not depend on which side is the reference; a normalised answer stays as it is."""
    chosen = get_rule(rule)
    assert f1(a, [b], chosen) == pytest.approx(f1(b, [a], chosen))
    assert f1(a, [a], chosen) == 1.0
    once = chosen.normalise(a)
    if rule != "careful" and unicodedata.normalize("NFC", a).isascii():
        assert chosen.normalise(once) == once


@pytest.mark.parametrize(
    "result", ["True", "np.bool_(True)", "np.float32(1)", "np.float64(1)", "1", "np.array(1.0)"]
)
def test_numbers_of_any_type_can_be_read_back(module: WriteModule, result: str) -> None:
    """A scorer may return a bool or numpy's numbers, anywhere: the log gets plain floats, and gives them back."""
    spec = f"{module(f'scorers_typed_{abs(hash(result))}', result)}:typed"
    ended = play([Step("t")], answer="Rome")
    recorded = reward_events(get_scorer(spec, SETTINGS, [spec]), ended)
    parts = {"hit": 1.0, "n": 3.0, "4": 0.5}
    assert [(event.scope, event.value, event.components) for event in recorded] == [
        ("leaf", 1.0, parts),
        ("node", 1.0, parts),
    ]
    for event in recorded:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Rewarded) == event


def test_scores_that_cannot_be_recorded_are_refused(module: WriteModule) -> None:
    """Text among the numbers, an integer without end, and a turn that is scored twice name the scorer."""
    for result in ("'high'", "10**400", "[1.0]"):
        spec = f"{module(f'scorers_bad_{abs(hash(result))}', result)}:typed"
        with pytest.raises(RewardError, match=r"typed' returned .* expected a number"):
            get_scorer(spec, SETTINGS, [spec]).score(play([Step("t")], answer="x"))
    spec = f"{module('scorers_twice', '0')}:twice"
    with pytest.raises(RewardError, match="scored a turn twice"):
        get_scorer(spec, SETTINGS, [spec]).score(play([Step("t")], answer="x"))
