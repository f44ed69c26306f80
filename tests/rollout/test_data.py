"""Question files: reported rows, faults named by their line, and what `prepare` writes."""

import json
import math
import random
import tracemalloc
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from core.errors import ConfigError, DataError
from rollout.data import Example, load_examples
from rollout.prepare import BENCHMARKS, DEV_PER_SOURCE, MIXES, prepare
from rollout.rows import Dropped, content_id, read_row
from rollout.tables import read_rows
from tests.rollout.reported import Reported, cases, hotpot


def quiet(notice: str) -> None:
    """Say nothing."""


def revived(value: Any) -> Any:
    """Return a reported value with its stand-ins replaced by what they stand for."""
    if isinstance(value, dict):
        if "__ndarray__" in value:
            return np.array(value["__ndarray__"], dtype=value["dtype"])
        return {key: revived(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revived(item) for item in value]
    return math.nan if value == "nan_float" else value


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(question: str, source: str = "nq", **other: object) -> dict[str, object]:
    """Return a row as the published sets have them."""
    return {"id": "train_0", "question": question, "golden_answers": ["x"], "data_source": source, **other}


def read(path: Path) -> list[Example]:
    """Return the examples of a prepared file."""
    return load_examples(path)


@pytest.mark.parametrize("reported", cases("f-rows", "01", "03", "05", "06", "08", "10", "11"))
def test_reported_rows(reported: Reported) -> None:
    """Every reported row becomes the record that is right for it, or is dropped for the right reason."""
    expected = reported["expected"]
    result = read_row(revived(reported["input"]["row"]), "file")
    if not expected["keep"]:
        assert result == Dropped(expected["reason"])
        return
    assert isinstance(result, Example)
    if "record" in expected:
        record = msgspec.to_builtins(result)
        assert {**record, "answers": list(record["answers"])} == expected["record"]
    if expected.get("answers_equal_after_nfc"):
        assert len({unicodedata.normalize("NFC", answer) for answer in result.answers}) == 1
    again = msgspec.json.decode(msgspec.json.encode(result), type=Example)
    assert again == result


@pytest.mark.parametrize("reported", cases("f-rows", "13"))
def test_missing_ids_come_from_the_content(reported: Reported, tmp_path: Path) -> None:
    """Rows without an id get one that is theirs, wherever they stand in the file."""
    rows, expected = reported["input"]["rows"], reported["expected"]
    outcomes = []
    for order in (rows, rows[::-1]):
        source = write_jsonl(tmp_path / "rows.jsonl", order)
        prepare(tmp_path / "out", [source], [], mix="all", seed=0, notify=quiet)
        outcomes.append({example.question: example.id for example in read(tmp_path / "out" / "train.jsonl")})
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == expected["kept"]
    assert len(set(outcomes[0].values())) == expected["distinct_keys"]


@pytest.mark.parametrize(
    "rows",
    [
        {"question": "q?", "answer": "a", "source": "s"},
        {"query": "q?", "answers": ("a",), "dataset": "s"},
        {"problem": " q? ", "target": np.array(["a", None], dtype=object), "data_source": "s"},
        {"question": "q?", "answer": {"value": "a", "aliases": ["a"]}, "data_source": "s"},
        {"question": "q?", "answers": {"text": ["a"], "answer_start": [3]}, "data_source": "s"},
        {"question": "q?", "golden_answers": None, "reward_model": {"ground_truth": "a"}, "data_source": "s"},
        {"question": "q?", "reward_model": {"ground_truth": {"target": "a"}}, "data_source": "s"},
    ],
)
def test_other_shapes(rows: dict[str, object]) -> None:
    """The other usual names and nestings mean the same."""
    assert read_row(rows, "file") == Example("", "q?", ("a",), "s")


@pytest.mark.parametrize("value", [None, 3, "text", [1], b"x"])
def test_what_is_no_row(value: object) -> None:
    """A row that is not an object is dropped with that reason."""
    assert read_row(value, "file") == Dropped("not an object")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(question=JUNK, answers=JUNK, other=JUNK)
def test_no_row_raises(question: object, answers: object, other: object) -> None:
    """Whatever stands in a row, it becomes an example with usable answers, or is dropped."""
    result = read_row(
        {"question": question, "golden_answers": answers, "reward_model": other, "id": other}, "f"
    )
    if isinstance(result, Example):
        assert result.question.strip()
        assert result.answers
        assert all(answer.strip() for answer in result.answers)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "line 3"),
        (b'{"id": "b", "question": "q"}', "line 3: Object missing required field `answers`"),
        (b'{"id": "b", "question": 3, "answers": ["x"]}', "line 3: Expected `str`"),
        (b'{"id": "b", "question": "q", "answers": "x"}', "line 3: Expected `array`"),
        (b'{"id": "b", "question": " ", "answers": ["x"]}', "line 3: the question is blank"),
        (b'{"id": "b", "question": "q", "answers": [" "]}', "line 3: no answer"),
        (b'{"id": "", "question": "q", "answers": ["x"]}', "line 3: the id is empty"),
        (b'{"id": "a", "question": "q", "answers": ["x"]}', "line 3: id 'a' stands on line 1 already"),
        (b'{"id": "b", "question": "\xff", "answers": ["x"]}', "line 3"),
        (b'{"id": "b", "question": "\\ud800", "answers": ["x"]}', "line 3"),
    ],
)
def test_faults_name_their_line(tmp_path: Path, line: bytes, problem: str) -> None:
    """A questions file that cannot be used says which line is wrong and what was expected."""
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b'{"id": "a", "question": "q", "answers": ["x"]}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=problem):
        load_examples(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    """No file, a folder, and a file without questions are clear errors."""
    for path, problem in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(DataError, match=problem):
            load_examples(path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no questions in it"):
        load_examples(tmp_path / "empty.jsonl")


def test_questions_are_read_in_order(tmp_path: Path) -> None:
    """A byte order mark, blank lines, CRLF and further fields do not matter."""
    path = tmp_path / "questions.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"id": "a", "question": "q", "answers": ["x", "y"], "level": "hard"}\r\n\r\n'
        b'{"id": "b", "question": "r", "answers": ["z"], "data_source": "nq"}'
    )
    assert load_examples(path) == [Example("a", "q", ("x", "y")), Example("b", "r", ("z",), "nq")]
    assert len(load_examples(hotpot() / "questions.jsonl")) == 100


def test_ids_are_unique_over_all_sources(tmp_path: Path) -> None:
    """An id that two sources use is led by the source; one that a source uses twice comes from the content."""
    rows = [
        row("a?", "nq"),
        row("b?", "hotpotqa"),
        row("c?", "hotpotqa", id="train_1"),
        row("d?", "nq", id="own"),
        row("e?", "nq", id="own"),
        row("f?", "nq", id=7),
    ]
    files = [write_jsonl(tmp_path / "a.jsonl", rows[:3]), write_jsonl(tmp_path / "b.jsonl", rows[3:])]
    prepared = prepare(tmp_path / "out", files, [], mix="all", seed=0, notify=quiet)
    ids = {example.question: example.id for example in read(tmp_path / "out" / "train.jsonl")}
    assert ids["a?"] == "nq_train_0"
    assert ids["b?"] == "hotpotqa_train_0"
    assert (ids["c?"], ids["f?"]) == ("train_1", "7")
    assert ids["d?"] == content_id(Example("own", "d?", ("x",), "nq"))
    assert len(set(ids.values())) == 6
    assert prepared.renamed == 4


def test_what_is_dropped_is_counted_and_listed(tmp_path: Path) -> None:
    """Every row is written, outside the mix, or listed with file, row and reason."""
    path = tmp_path / "rows.jsonl"
    rows = [row("a?"), row(" "), row("b?", golden_answers=[]), row("a?"), row("c?", "other"), row("t?")]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + "{not json\n[1]\n")
    test = write_jsonl(tmp_path / "test.jsonl", [row("t?", id="test_0")])
    prepared = prepare(tmp_path / "out", [path], [test], mix="search-r1", seed=0, notify=quiet)
    assert prepared.counts == {"train": {"nq": 1}, "dev": {"nq": 1}, "test": {"nq": 1}}
    assert prepared.not_in_mix == {"other": 1}
    assert prepared.dropped == {
        "no question": 1,
        "no answer": 1,
        "duplicate question": 1,
        "also in the test set": 1,
        "not JSON": 1,
        "not an object": 1,
    }
    listed = [json.loads(line) for line in (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["reason"]) for entry in listed] == [
        (2, "no question"),
        (3, "no answer"),
        (4, "duplicate question"),
        (6, "also in the test set"),
        (7, "not JSON"),
        (8, "not an object"),
    ]
    assert {entry["file"] for entry in listed} == {str(path)}
    assert json.loads((tmp_path / "out" / "prepare.json").read_text())["counts"] == prepared.counts


def test_the_dev_set_is_drawn_by_seed_and_content(tmp_path: Path) -> None:
    """Ten questions of each benchmark, the same from a shuffled file, others with another seed."""
    rows = [row(f"{source} {n}?", source, id=f"test_{n}") for source in BENCHMARKS for n in range(40)]
    train = write_jsonl(tmp_path / "train.jsonl", [row("a?")])
    drawn = []
    for seed, order in ((0, rows), (0, random.Random(1).sample(rows, len(rows))), (1, rows)):
        test = write_jsonl(tmp_path / "test.jsonl", order)
        prepared = prepare(tmp_path / "out", [train], [test], mix="search-r1", seed=seed, notify=quiet)
        assert prepared.counts["dev"] == dict.fromkeys(sorted(BENCHMARKS), DEV_PER_SOURCE)
        assert prepared.counts["test"] == dict.fromkeys(sorted(BENCHMARKS), 40)
        drawn.append({example.id for example in read(tmp_path / "out" / "dev.jsonl")})
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 70
    whole = {example.id for example in read(tmp_path / "out" / "test.jsonl")}
    assert drawn[0] < whole | drawn[1]


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_mixes_choose_their_sources(tmp_path: Path, mix: str) -> None:
    """Every recipe trains and evaluates on its own sources; limits draw a part of one."""
    sources = sorted({*BENCHMARKS, "asearcher", "webdancer", "simpleqa", "gaia", "webwalkerqa", "browsecomp"})
    amount = {"asearcher": 2100, "webdancer": 250}
    rows = [row(f"{s} {n}?", s, id=f"{s}{n}") for s in sources for n in range(amount.get(s, 3))]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    test = write_jsonl(tmp_path / "test.jsonl", [{**r, "question": f"t {r['question']}"} for r in rows])
    prepared = prepare(tmp_path / "out", [train], [test], mix=mix, seed=0, notify=quiet)
    chosen = MIXES[mix]
    assert sorted(prepared.counts["train"]) == sorted(chosen.train or sources)
    assert sorted(prepared.counts["test"]) == sorted(chosen.evaluation or sources)
    if mix == "web-agent":
        assert prepared.counts["train"] == {"asearcher": 2000, "webdancer": 200}


def test_parquet_and_jsonl_give_the_same(tmp_path: Path) -> None:
    """The real rows in Parquet and the same rows as JSON lines become the same file."""
    folder = hotpot()
    rows = parquet.read_table(folder / "train.parquet").to_pylist()
    lines = write_jsonl(tmp_path / "train.jsonl", rows)
    written = []
    for source in (folder / "train.parquet", lines):
        prepared = prepare(tmp_path / "out", [source], [], mix="search-r1", seed=0, notify=quiet)
        written.append((tmp_path / "out" / "train.jsonl").read_bytes())
    assert written[0] == written[1]
    assert prepared.counts == {"train": {"hotpotqa": 100}}
    # The published script ends every question with a question mark.
    questions = {example.question.strip(" ?") for example in load_examples(folder / "questions.jsonl")}
    found = {example.question.strip(" ?") for example in read(tmp_path / "out" / "train.jsonl")}
    assert found == questions


def test_nested_parquet_columns(tmp_path: Path) -> None:
    """Lists of lists and missing columns are read as they are."""
    table = pa.table({"question": ["q?", "r?"], "golden_answers": [[["a", "b"], ["c"]], []]})
    parquet.write_table(table, tmp_path / "popqa.parquet")
    prepared = prepare(tmp_path / "out", [tmp_path / "popqa.parquet"], [], mix="all", seed=0, notify=quiet)
    (example,) = read(tmp_path / "out" / "train.jsonl")
    assert (example.answers, example.data_source) == (("a", "b", "c"), "popqa")
    assert prepared.dropped == {"no answer": 1}


def test_inputs_that_cannot_be_used(tmp_path: Path) -> None:
    """An unknown mix, kind of file or broken file, and a mix without questions, are clear errors."""
    good = write_jsonl(tmp_path / "good.jsonl", [row("a?", "other")])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "rows.csv").write_text("question,answer\n")
    for files, mix, error, problem in (
        ([good], "everything", ConfigError, "no mix 'everything', expected one of"),
        ([tmp_path / "rows.csv"], "all", ConfigError, "expected a file called"),
        ([tmp_path / "broken.parquet"], "all", DataError, "cannot read"),
        ([tmp_path / "absent.jsonl"], "all", DataError, "cannot read"),
        ([good], "search-r1", DataError, "expected some of nq, hotpotqa"),
    ):
        with pytest.raises(error, match=problem):
            prepare(tmp_path / "out", files, [], mix=mix, seed=0, notify=quiet)


def test_rows_have_the_numbers_of_their_lines(tmp_path: Path) -> None:
    """Rows keep the numbers of their lines; what cannot be read says why."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "a"}\n\n\xff\n')
    assert [tuple(each) for each in read_rows(path)] == [(1, {"question": "a"}, ""), (3, None, "not JSON")]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_texts(tmp_path: Path, kind: str) -> None:
    """Of 20,000 rows with 2 kB of text each, a few megabytes are ever held: hashes, not rows."""
    path = tmp_path / f"nq.{kind}"
    rows = (
        {"question": f"{n} " + "long " * 400, "answer": "x", "context": "c" * 1000} for n in range(20_000)
    )
    if kind == "jsonl":
        write_jsonl(path, rows)
    else:
        columns = {"question": pa.string(), "answer": pa.string(), "context": pa.string()}
        parquet.write_table(pa.Table.from_pylist(list(rows), pa.schema(columns)), path, row_group_size=2000)
    tracemalloc.start()
    try:
        prepared = prepare(tmp_path / "out", [path], [], mix="all", seed=0, notify=quiet)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert prepared.counts == {"train": {"nq": 20_000}}
    assert peak < 24e6


def test_progress_is_told(tmp_path: Path) -> None:
    """Long files say how far they are."""
    path = write_jsonl(tmp_path / "rows.jsonl", [row(f"q{n}?", id=f"r{n}") for n in range(10_000)])
    notices: list[str] = []
    prepare(tmp_path / "out", [path], [], mix="all", seed=0, notify=notices.append)
    assert notices == ["read 10,000 rows"]


def test_a_name_led_by_its_source_is_not_another_questions_own(tmp_path: Path) -> None:
    """Where `<source>_<id>` is some row's own id already, the id comes from the content."""
    rows = [row("a?", "nq", id="1"), row("b?", "hotpotqa", id="1"), row("c?", "other", id="nq_1")]
    source = write_jsonl(tmp_path / "rows.jsonl", rows)
    prepare(tmp_path / "out", [source], [], mix="all", seed=0, notify=quiet)
    ids = {example.question: example.id for example in read(tmp_path / "out" / "train.jsonl")}
    assert ids["a?"] == content_id(Example("1", "a?", ("x",), "nq"))
    assert (ids["b?"], ids["c?"]) == ("hotpotqa_1", "nq_1")


NAMES = st.sampled_from(["1", "2", "a_1", "a", "b_a_1", ""])


@given(names=st.lists(st.tuples(st.sampled_from(["a", "b", "b_a"]), NAMES), min_size=1, max_size=8))
def test_no_two_questions_ever_share_an_id(
    tmp_path_factory: pytest.TempPathFactory, names: list[Any]
) -> None:
    """Whatever ids and sources rows have, what `prepare` writes can be loaded, with every question in it."""
    folder = tmp_path_factory.mktemp("ids")
    rows = [row(f"q{n}?", source, id=name) for n, (source, name) in enumerate(names)]
    prepare(folder / "out", [write_jsonl(folder / "r.jsonl", rows)], [], mix="all", seed=0, notify=quiet)
    assert len(load_examples(folder / "out" / "train.jsonl")) == len(rows)


def test_a_text_that_is_no_utf8_costs_its_row_only(tmp_path: Path) -> None:
    """Parquet does not check its texts: a broken one is listed, the others are kept."""
    raw = pa.array([b"a?", b"\xff?", b"c?"])
    questions = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    parquet.write_table(pa.table({"question": questions, "answer": ["x", "y", "z"]}), tmp_path / "nq.parquet")
    prepared = prepare(tmp_path / "out", [tmp_path / "nq.parquet"], [], mix="all", seed=0, notify=quiet)
    assert prepared.dropped == {"not UTF-8": 1}
    assert json.loads((tmp_path / "out" / "dropped.jsonl").read_text())["row"] == 2
    assert [example.question for example in read(tmp_path / "out" / "train.jsonl")] == ["a?", "c?"]


@pytest.mark.parametrize("name", ["train.jsonl", "dev.jsonl", "test.jsonl", "dropped.jsonl"])
def test_no_input_is_overwritten(tmp_path: Path, name: str) -> None:
    """A file that is read may not be one that is written: a dev set would shrink itself."""
    out = tmp_path / "out"
    out.mkdir()
    mine = write_jsonl(out / name, [row(f"q{n}?", id=f"r{n}") for n in range(30)])
    (tmp_path / "link").symlink_to(out)
    before = mine.read_bytes()
    for given_as in (mine, tmp_path / "link" / name):
        with pytest.raises(ConfigError, match="would be overwritten"):
            prepare(out, [], [given_as], mix="all", seed=0, notify=quiet)
    assert mine.read_bytes() == before


def test_nesting_has_an_end() -> None:
    """Answers are looked for a few levels deep; a list is no question, id or source."""
    deep: object = "x"
    for level in range(200):
        deep = [deep]
        example = read_row({"question": "q?", "answers": deep}, "file")
        assert isinstance(example, Example) == (level < 4)
    assert read_row({"question": ["q?"], "answers": "x"}, "file") == Dropped("no question")
    listed = {"question": "q?", "answers": "x", "id": ["a"], "_id": "b", "data_source": ["nq"], "source": {}}
    assert read_row(listed, "file") == Example("b", "q?", ("x",), "file")
