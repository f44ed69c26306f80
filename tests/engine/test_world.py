"""The generated world: its facts, questions, splits and files."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.embedded.scripts import Index, ScriptRates, ScriptWriter, render_results
from engine.embedded.texts import TextWriter
from engine.embedded.tokenizer import ENGLISH
from engine.embedded.world import (
    ENTITIES,
    HELD_OUT,
    RELATIONS,
    Question,
    World,
    all_questions,
    split_questions,
    write_world,
)


def read(path: Path) -> list[dict[str, object]]:
    """Rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_questions_name_the_last_hop_first() -> None:
    """The text of a chain reads from the answer back to the start, with Who for people."""
    by_name = {relation.name: relation for relation in RELATIONS}
    question = Question("Zorvia", (by_name["capital"], by_name["mayor"]))
    assert question.text == "Who is the mayor of the capital of Zorvia?"
    assert Question("Orla", (by_name["pet"],)).text == "What is the pet of Orla?"


def test_answers_follow_the_facts() -> None:
    """Every answer can be found by looking up one passage per hop."""
    world = World(3)
    facts = {}
    for passage in world.passages():
        left, value = passage.removesuffix(".").split(" is ")
        facts[left.removeprefix("The ")] = value
    for hops in (1, 2, 3):
        for question in all_questions(hops)[::97]:
            entity = question.start
            for relation in question.chain:
                entity = facts[f"{relation.name} of {entity}"]
            assert world.answer(question) == entity


def test_values_are_of_the_right_kind() -> None:
    """A relation leads from its domain to its codomain, for every entity."""
    kinds = {relation.name: relation.codomain for relation in RELATIONS}
    values = World(1).values
    assert len(values) == sum(len(ENTITIES[relation.domain]) for relation in RELATIONS)
    for (name, _), value in values.items():
        assert value in ENTITIES[kinds[name]]


def test_splits_share_no_question() -> None:
    """Test and dev hold 64 questions of each number of hops; no question is in two splits."""
    splits = split_questions(0)
    for hops in (1, 2, 3):
        texts = [[q.text for q in splits[name, hops]] for name in ("test", "dev", "train")]
        assert [len(part) for part in texts[:2]] == [HELD_OUT, HELD_OUT]
        assert len(texts[2]) > HELD_OUT
        assert len({text for part in texts for text in part}) == sum(map(len, texts))


def test_files_have_the_form_of_real_data(tmp_path: Path) -> None:
    """Corpus rows are id and contents, question rows id, question, answers and data_source."""
    files = write_world(tmp_path / "new" / "world", seed=0)
    corpus = read(files.corpus)
    assert [set(row) for row in corpus] == [{"id", "contents"}] * 300
    assert set(files.questions) == {f"{s}{h}" for s in ("train", "dev", "test") for h in ("", "_3hop")}
    sources = []
    for name, path in files.questions.items():
        rows = read(path)
        assert path.name == f"{name}.jsonl"
        assert len({row["id"] for row in rows}) == len(rows)
        for row in rows:
            assert set(row) == {"id", "question", "answers", "data_source"}
            assert isinstance(row["answers"], list)
        sources.append({row["data_source"] for row in rows})
    assert {"world_1hop", "world_2hop"} in sources
    assert {"world_3hop"} in sources


def test_a_seed_is_a_world(tmp_path: Path) -> None:
    """The same seed writes the same bytes, another one other facts."""
    names = ("corpus.jsonl", "train.jsonl", "test.jsonl")
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_world(tmp_path / folder, seed)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()


def test_search_finds_the_fact_first() -> None:
    """A query with relation and entity has its fact on top; an unknown word finds no special passage."""
    world = World(0)
    index, rng = Index(world), np.random.default_rng(0)
    value = world.values["mayor", "Melk"]
    found = index.search("mayor of Melk", rng)
    assert found[0] == f"The mayor of Melk is {value}."
    assert all("Melk" in text or "mayor" in text for text in found)
    assert render_results(found[:2]) == f"[1] {found[0]}\n[2] {found[1]}"
    assert render_results([]) == "No results found."


def test_scripts_without_errors_answer_right() -> None:
    """With all error rates at 0, one search per hop leads to the true answer."""
    world = World(5)
    perfect = ScriptRates(*(0.0 for _ in ScriptRates._fields))
    writer, rng = ScriptWriter(world, perfect), np.random.default_rng(1)
    for hops in (1, 2, 3):
        for question in all_questions(hops)[::211]:
            script = writer.write(rng, question)
            assert script.question == question.text
            assert len(script.turns) == hops + 1
            (statement,) = script.turns[-1].final
            assert statement.text == world.answer(question)
            assert statement.marked


@pytest.mark.parametrize(("rate", "least"), [("early_stop", 0.9), ("misread", 0.5), ("bad_format", 0.9)])
def test_every_error_rate_matters(rate: str, least: float) -> None:
    """With one rate at 1, scripts show that error."""
    world, rng = World(5), np.random.default_rng(2)
    rates = ScriptRates(*(0.0 for _ in ScriptRates._fields))._replace(**{rate: 1.0})
    writer = ScriptWriter(world, rates)
    questions = all_questions(2)[::23]
    wrong = 0
    for question in questions:
        final = writer.write(rng, question).turns[-1].final
        right = len(final) == 1 and final[0].marked and final[0].text == world.answer(question)
        wrong += not right
    assert wrong / len(questions) >= least


def test_text_scripts_answer_with_what_follows_the_quoted_words() -> None:
    """The query quotes the question, and one result holds the quoted words and then the answer."""
    perfect = ScriptRates(*(0.0 for _ in ScriptRates._fields))
    writer, rng = TextWriter(ENGLISH, perfect), np.random.default_rng(0)
    for _ in range(50):
        question, (search, last), _ = writer.write(rng)
        assert search.query is not None
        assert search.observation is not None
        assert search.query in question
        (statement,) = last.final
        assert f"{search.query} {statement.text} " in search.observation
        assert search.observation.count("\n[") == 2
