"""The page's file: what is in it, that it says what the log says, and that it stays whole and bounded."""

import base64
import json
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays import view_logprobs, view_tokens
from core.errors import ConfigError, ReplayError
from core.events import Evaluated, Plan, QuestionResult
from learner.page.model import Limits
from learner.page.packing import Vocabulary, pack_integers
from learner.page.render import SCRIPTS, PageSummary, escape_json, render_page, write_page
from learner.page.run import spread
from learner.page.steps import FORMULAS, StepSource
from learner.pieces import Pieces
from learner.replay import Auditor, replay_step
from learner.visible import HIDDEN_RANGES
from store.log import open_log
from tests.learner.told import (
    TREES,
    Teller,
    Texts,
    question_of,
    tokenizer,
    told_group,
    told_run,
    told_step,
    told_steps,
)


class Blocks(HTMLParser):
    """Reads the data blocks of a page as a browser finds them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._name: str | None = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember which data block begins."""
        values = dict(attrs)
        self._name = values.get("id") if values.get("type") == "application/json" else None

    def handle_data(self, data: str) -> None:
        """Keep a data block's text."""
        if self._name is not None:
            self.found[self._name] = data

    def handle_endtag(self, tag: str) -> None:
        """Forget the block that ends."""
        self._name = None

    def json(self, name: str) -> Any:
        """Return one block, decoded."""
        return json.loads(self.found[name])


def write(out: Path, steps: Sequence[StepSource], limits: Limits | None = None) -> PageSummary:
    """Write the page of made-up steps."""
    return render_page(told_run(steps), steps, len(steps), Pieces(tokenizer()), out, limits or Limits())


def unpack(text: str) -> list[int]:
    """Return the integers of a packed text, by the definition of LEB128."""
    values, value, shift = [], 0, 0
    for byte in base64.b64decode(text):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value, shift = 0, 0
    return values


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_packed_integers_are_read_back(values: list[int]) -> None:
    """LEB128 holds every token id."""
    assert unpack(pack_integers(np.array(values, dtype=np.int64))) == values


@given(st.lists(st.integers(0, 1284), min_size=1, max_size=50))
def test_a_vocabulary_numbers_tokens_by_first_use(ids: list[int]) -> None:
    """Page numbers lead back to the ids, and the first token seen is number 0."""
    vocabulary = Vocabulary(Pieces(tokenizer()))
    numbers = unpack(vocabulary.pack(np.array(ids, dtype=np.int32)))
    block = vocabulary.block()
    assert [block.ids[number] for number in numbers] == ids
    assert numbers[0] == 0
    assert len(block.texts) == len(set(ids))


def test_every_token_and_logprob_of_the_groups_is_on_the_page(tmp_path: Path) -> None:
    """Prompt, turns and observations are those of the events, and logprobs to the bit."""
    steps = [told_step(0, [told_group(3, TREES)], estimator="tree")]
    write(tmp_path / "page.html", steps)
    blocks = Blocks(tmp_path / "page.html")
    ids = blocks.json("vocabulary")["ids"]
    group = steps[0].taken[0].group
    block = blocks.json(f"group-0-{group.uid}")
    assert [ids[n] for n in unpack(block["prompt"])] == view_tokens(group.asked.prompt).tolist()
    for tree in block["trees"]:
        nodes = group.trees[tree["index"]].nodes
        assert {one["node"] for one in tree["nodes"]} == set(nodes)
        for one in tree["nodes"]:
            node = nodes[one["node"]]
            parent = one.get("parent", -1)
            assert (tree["nodes"][parent]["node"] if parent >= 0 else None) == node.parent
            assert [ids[n] for n in unpack(one["tokens"])] == view_tokens(node.sample.tokens).tolist()
            logprobs = np.frombuffer(base64.b64decode(one["logprobs"]), "<f4")
            assert logprobs.tobytes() == view_logprobs(node.sample.sampled_logprobs).tobytes()
            if node.observation is not None:
                seen = [ids[n] for n in unpack(one["observation"]["tokens"])]
                assert seen == view_tokens(node.observation.tokens).tolist()


def test_advantages_are_the_re_derived_ones(tmp_path: Path) -> None:
    """Leaf, path and node advantages are those of build_step; nodes show the mean of their members."""
    steps = [told_step(0, [told_group(3, TREES), told_group(4, TREES)], estimator="tree")]
    rebuilt = steps[0].rebuilt
    assert rebuilt is not None
    write(tmp_path / "page.html", steps)
    blocks = Blocks(tmp_path / "page.html")
    cards = {card["uid"]: card for card in blocks.json("index")["groups"]}
    for position, member in enumerate(rebuilt.batch.members):
        block = blocks.json(f"group-0-{member.group.uid}")
        leaf = next(
            one for one in cards[member.group.uid]["leaves"] if one[2] == f"{member.tree}/{member.leaf}"
        )
        assert leaf[6] == rebuilt.batch.advantages.leaf[position]
        found = next(one for one in block["members"] if one["leaf"] == leaf[:2])
        assert found["advantages"] == rebuilt.batch.advantages.path(position).tolist()
        for datum in found["datums"]:
            key = rebuilt.batch.keys[datum["datum"]] if "datum" in datum else None
            assert key is not None
            assert (key.uid, key.tree, key.leaf) == (member.group.uid, member.tree, member.leaf)
            value = rebuilt.batch.datums[datum["datum"]].advantages
            assert np.float32(leaf[6] * datum["scale"]) in value
    root = next(
        one for one in blocks.json("group-0-000003.0")["trees"][0]["nodes"] if one.get("members", 0) > 1
    )
    shared = [
        float(rebuilt.batch.advantages.leaf[position])
        for position, member in enumerate(rebuilt.batch.members)
        if (member.group.uid, member.tree) == ("000003.0", 1)
        and root["node"] in {node.node for node in member.path}
    ]
    assert root["members"] == len(shared)
    assert root["advantage"] == pytest.approx(sum(shared) / len(shared))


@pytest.mark.parametrize("prefix_weight", ["each", "once_sum", "once"])
def test_a_shared_turn_is_trained_where_the_prefix_weight_says(tmp_path: Path, prefix_weight: str) -> None:
    """With `once…` exactly one member trains a shared turn, and its credit differs from the advantage."""
    steps = [told_step(0, [told_group(3, TREES)], estimator="tree", prefix_weight=prefix_weight)]
    write(tmp_path / "page.html", steps)
    members = Blocks(tmp_path / "page.html").json("group-0-000003.0")["members"]
    others = sum(not trained for member in members for trained in member.get("trained") or [])
    assert (others == 0) == (prefix_weight == "each")


def test_a_kl_term_brings_the_base_models_logprobs(tmp_path: Path) -> None:
    """With β above 0 every token of the page can be recomputed: reference, weight and β are there."""
    teller = Teller(1, question_of(1), Plan(mode="chain", group_size=2))
    for tree in (1, 2):
        teller.sample(tree, "0.0.0", None, "Answer: Orla<|im_end|>", reference=True)
        teller.finish(tree, "0.0.0", float(tree - 1))
    steps = [told_step(0, [teller.taken()], kl_beta=0.1)]
    write(tmp_path / "page.html", steps)
    block = Blocks(tmp_path / "page.html").json("group-0-000001.0")
    assert block["kl_beta"] == 0.1
    assert block["members"][0]["kl_weights"] == [1.0]
    node = block["trees"][0]["nodes"][0]
    logprobs, reference = (
        np.frombuffer(base64.b64decode(node[name]), "<f4") for name in ("logprobs", "reference")
    )
    [advantage] = block["members"][0]["advantages"]
    scale = block["members"][0]["datums"][0]["scale"]
    tokens = (advantage - 0.1 * (logprobs.astype(float) - reference)) * scale
    assert steps[0].rebuilt is not None
    sent = steps[0].rebuilt.batch.datums[0].advantages
    assert np.allclose(sent[-len(tokens) :], tokens.astype(np.float32), atol=1e-7)


def test_the_last_the_first_and_the_middle_come_first() -> None:
    """Whatever the limit, what is kept is spread over the run; every step comes once."""
    assert list(spread(range(9)))[:5] == [8, 0, 4, 2, 6]
    for length in range(40):
        assert sorted(spread(range(length))) == list(range(length))


def test_whole_steps_are_kept_while_they_fit(tmp_path: Path) -> None:
    """A step that does not fit whole is left out, and the page says how many are there."""
    steps = told_steps(4, 2)
    summary = write(tmp_path / "page.html", steps, Limits(trajectories=35))
    assert (summary.steps, summary.groups, summary.trajectories) == (2, 4, 32)
    index = Blocks(tmp_path / "page.html").json("index")
    assert index["run"]["cut"] == summary.cut != ""
    assert [step.get("shown", False) for step in index["steps"]] == [True, True, False, False]
    assert all(isinstance(step["reward"], float) for step in index["steps"])


def test_a_first_step_that_is_too_large_is_cut_leaf_by_leaf(tmp_path: Path) -> None:
    """At least something is shown: whole groups, then the first leaves of one, with their ancestors."""
    steps = [
        told_step(0, [told_group(1, TREES), told_group(2, TREES), told_group(3, TREES)], estimator="tree")
    ]
    summary = write(tmp_path / "page.html", steps, Limits(trajectories=18))
    assert summary.trajectories == 18
    assert "1 groups of a step are left out" in summary.cut
    blocks = Blocks(tmp_path / "page.html")
    cards = blocks.json("index")["groups"]
    assert [card.get("hidden_leaves", 0) for card in cards] == [0, 12]
    trees = blocks.json("group-0-000002.0")["trees"]
    assert sum("outcome" in node for tree in trees for node in tree["nodes"]) == 3


def test_long_texts_and_turns_are_cut_and_counted(tmp_path: Path) -> None:
    """One text or turn cannot make the file large; what is missing is said where it is missing."""
    texts = question_of(1)._replace(answer="word " * 200, question="why " * 400)
    steps = [told_step(0, [told_group(1, texts=texts)])]
    write(tmp_path / "page.html", steps, Limits(text=100, turn_tokens=50))
    blocks = Blocks(tmp_path / "page.html")
    card = blocks.json("index")["groups"][0]
    assert card["question"].endswith("more characters in the log]")
    block = blocks.json(f"group-0-{card['uid']}")
    assert len(unpack(block["prompt"])) == 50
    assert block["prompt_cut"] == block["prompt_count"] - 50 > 0
    long = [node for tree in block["trees"] for node in tree["nodes"] if node.get("tokens_cut")]
    assert long
    for node in long:
        assert len(unpack(node["tokens"])) == 50
        assert len(base64.b64decode(node["logprobs"])) == 200
        assert node["count"] == node["tokens_cut"] + 50


def test_the_file_stops_growing_at_its_size(tmp_path: Path) -> None:
    """The limit on bytes holds whatever the trajectories are like."""
    small = write(tmp_path / "small.html", told_steps(6, 3), Limits(size=40_000))
    whole = write(tmp_path / "whole.html", told_steps(6, 3))
    assert small.trajectories < whole.trajectories
    assert small.cut


@given(st.text())
def test_json_cannot_end_its_block(text: str) -> None:
    """No `<`, `>`, `&` or line separator is left, and the value is the same."""
    escaped = escape_json(json.dumps(text, ensure_ascii=False).encode())
    assert not any(letter in escaped.decode() for letter in "<>&\u2028\u2029")
    assert json.loads(escaped) == text


def test_hostile_data_adds_no_markup(tmp_path: Path) -> None:
    """The page has the same elements whatever the events say."""

    def tags(text: str) -> list[str]:
        texts = Texts(question=text, references=(text,), source=text, query=text, content=text, answer=text)
        out = tmp_path / "page.html"
        write(out, [told_step(0, [told_group(1, texts=texts)])])
        return re.findall(rb"<[!/]?[a-z][^>]*>", out.read_bytes())  # type: ignore[return-value]

    assert tags("</script><script>alert(1)</script><!--") == tags("plain")


def test_a_failure_leaves_the_old_page(tmp_path: Path) -> None:
    """A page that cannot be finished replaces nothing and leaves no rest."""
    out = tmp_path / "page.html"
    out.write_text("old")

    def broken() -> Any:
        yield told_step(0, [told_group(1)])
        raise ReplayError("no")

    with pytest.raises(ReplayError):
        render_page(told_run([]), broken(), 2, Pieces(tokenizer()), out, Limits())
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_a_place_that_cannot_be_written_is_the_users_to_change(tmp_path: Path) -> None:
    """The message names the file and what to do."""
    with pytest.raises(ConfigError, match="folder that exists"):
        write(tmp_path / "nowhere" / "page.html", [told_step(0, [told_group(1)])])


@pytest.mark.parametrize("name", ["chains", "trees"])
def test_a_recorded_run_becomes_a_page(recorded: dict[str, Path], tmp_path: Path, name: str) -> None:
    """A run trained by a real engine: every step matches, and its means are those of the commits."""
    with open_log(recorded[name], readonly=True) as log:
        summary = write_page(log, tokenizer(), tmp_path / "page.html")
        reports = [replay_step(Auditor(log, {}), step) for step in range(3)]
    assert (summary.steps, summary.groups, summary.cut) == (3, 6, "")
    index = Blocks(tmp_path / "page.html").json("index")
    assert [step["verdict"] for step in index["steps"]] == ["match"] * 3
    assert index["run"]["books"] == [["trained", 6]]
    for step, report in zip(index["steps"], reports, strict=True):
        assert step["members"] == report.members
        assert step["reward"] == pytest.approx(report.metrics["reward/mean"])


def test_evaluations_asked_in_another_way_are_another_curve(
    copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """No line joins a greedy score to a sampled one; the first of the ways used most is the main one."""
    with open_log(copy_of("chains"), role="reader") as log:
        for version, greedy, sampled in ((0, 0.5, 0.25), (3, 1.0, 0.75)):
            for temperature, score in ((1.0, sampled), (0.0, greedy)):
                log.journal.append_sync([evaluated(version, temperature, score)])
        write_page(log, tokenizer(), tmp_path / "page.html")
    curves = Blocks(tmp_path / "page.html").json("index")["run"]["evals"]
    assert curves == [
        {"points": [[0, 0.25], [3, 0.75]]},
        {"differs": "temperature 0.0", "points": [[0, 0.5], [3, 1.0]]},
    ]


def evaluated(version: int, temperature: float, score: float) -> Evaluated:
    """Return an evaluation of one question."""
    asked = QuestionResult(example_id="q", data_source="world", samples=1, exact_match=score, format=1.0)
    return Evaluated(
        weights_uri="w",
        policy_version=version,
        set_digest="dev",
        settings={"temperature": temperature},
        results=(asked,),
        summary={"exact_match": score},
    )


def test_single_steps_can_be_asked_for(recorded: dict[str, Path], tmp_path: Path) -> None:
    """The curves stay whole; a step that was never planned is an error."""
    with open_log(recorded["chains"], readonly=True) as log:
        summary = write_page(log, tokenizer(), tmp_path / "page.html", steps=[1])
        with pytest.raises(ReplayError, match="never planned"):
            write_page(log, tokenizer(), tmp_path / "page.html", steps=[7])
    assert (summary.steps, summary.groups, summary.cut) == (1, 2, "")
    index = Blocks(tmp_path / "page.html").json("index")
    assert [step.get("shown", False) for step in index["steps"]] == [False, True, False]
    assert all(step["committed"] for step in index["steps"])


def test_an_empty_log_has_no_page(tmp_path: Path) -> None:
    """Before the run is opened there is nothing to show."""
    with open_log(tmp_path / "run", create=True) as log, pytest.raises(ReplayError, match="no run yet"):
        write_page(log, tokenizer(), tmp_path / "page.html")


def test_both_languages_hide_the_same_characters() -> None:
    """The ranges of page_text.js are those of learner/visible.py."""
    source = (Path(__file__).parents[2] / "learner/page/page_text.js").read_text(encoding="utf-8")
    pattern = re.search(r"const HIDDEN = /\[(.*)\]/gu;", source)
    assert pattern is not None
    point = r"\\u\{?([0-9a-f]{4,5})\}?"
    ranges = [
        (int(first, 16), int(last or first, 16))
        for first, last in re.findall(rf"{point}(?:-{point})?", pattern[1])
    ]
    assert tuple(ranges) == HIDDEN_RANGES


def test_every_estimator_has_its_formula() -> None:
    """The definitions shown are those of the shipped estimators, no more and no fewer."""
    from core.advantage import ESTIMATORS

    assert FORMULAS.keys() == ESTIMATORS.keys()


def test_the_parts_of_the_program_are_all_there() -> None:
    """Every script file of the page is named once, in an order that starts with text and ends with the start."""
    files = {path.name for path in (Path(__file__).parents[2] / "learner/page").glob("*.js")}
    assert set(SCRIPTS) == files
    assert (SCRIPTS[0], SCRIPTS[-1]) == ("page_text.js", "page.js")
