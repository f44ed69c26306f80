"""Evaluations: what they record, that they go on where they stood, and what their summary says."""

import fcntl
from pathlib import Path

import anyio
import msgspec
import pytest

from core.errors import ConfigError, DataError, EngineError, ServiceBusy, WeightsGone
from core.events import Evaluated
from core.tree import fold_group
from rollout.data import Example
from rollout.evalrecords import set_digest
from rollout.evaluate import EvalOptions, Exam, Weights, evaluate
from rollout.normalise import get_rule
from rollout.progress import silence
from rollout.run import Environment
from rollout.summary import QuestionRecord, question_record, summarise
from tests.building import Script
from tests.fakes import Asked, ScriptedSampler, ScriptedSearch, answer, call, make_config, make_environment
from tests.rollout.logs import open_run

EXAMPLES = [
    Example("a", "Who was Ada?", ("Ada",), "nq"),
    Example("b", "Who was Bob?", ("Bob",), "nq"),
    Example("c", "Who was Cid?", ("Cid",), "hotpotqa"),
    Example("d", "Who was Dot?", ("Dot",), "hotpotqa"),
]


def clever(prompt: str, seed: int, index: int) -> str:
    """Answer Ada at once, search for Bob first, say the wrong thing of Cid, and nothing usable of Dot."""
    if "Ada" in prompt:
        return answer("Ada")
    if "All about" in prompt:
        return answer("Bob")
    if "Bob" in prompt:
        return call("Bob")
    return answer("Ada") if "Cid" in prompt else "I do not know"


def examine(
    records: Path,
    sampler: ScriptedSampler,
    search: ScriptedSearch | None = None,
    examples: list[Example] = EXAMPLES,
    **options: object,
) -> Evaluated:
    """Evaluate with scripted surroundings."""
    environment: Environment = make_environment(sampler, search or ScriptedSearch())
    exam = Exam(make_config(), environment, Weights("w3", 3), EvalOptions(**options))  # type: ignore[arg-type]
    return anyio.run(evaluate, exam, examples, records, silence())


def lines(records: Path) -> list[QuestionRecord]:
    """Return the questions in a records file."""
    return [msgspec.json.decode(line, type=QuestionRecord) for line in records.read_bytes().splitlines()[1:]]


def test_summary_by_hand(tmp_path: Path) -> None:
    """nq: 2 of 2 right; hotpotqa: 0 of 2; one of four is badly formed; one of four searched."""
    event = examine(tmp_path / "r.jsonl", ScriptedSampler(clever), name="dev")
    assert (event.name, event.weights_uri, event.policy_version) == ("dev", "w3", 3)
    assert [result.example_id for result in event.results] == ["a", "b", "c", "d"]
    assert [result.exact_match for result in event.results] == [1.0, 1.0, 0.0, 0.0]
    assert [result.answer for result in event.results] == ["Ada", "Bob", "Ada", None]
    summary = event.summary
    assert (summary["em/nq"], summary["em/hotpotqa"], summary["em/macro"]) == (1.0, 0.0, 0.5)
    assert (summary["exact_match"], summary["format"]) == (0.5, 0.75)
    assert summary["exact_match_of_well_formed"] == pytest.approx(2 / 3)
    assert (summary["rollout/search_calls"], summary["rollout/turns"]) == (0.25, 1.25)
    assert summary["rollout/no_search_rate"] == 0.75
    assert summary["f1"] == 0.5
    assert summary["reward"] == pytest.approx((1 + 1 + 0 - 0.1) / 4)
    assert (summary["search/calls"], summary["search/success_rate"], summary["search/error_rate"]) == (
        1,
        1,
        0,
    )


def test_macro_weighs_sources_not_questions(tmp_path: Path) -> None:
    """Three questions of one source and one of another: each source counts half."""
    examples = [*EXAMPLES[:3], Example("e", "Who was Ada again?", ("Ada",), "nq")]
    summary = examine(tmp_path / "r.jsonl", ScriptedSampler(clever), examples=examples).summary
    assert summary["em/macro"] == 0.5
    assert summary["exact_match"] == 0.75


def test_every_question_has_a_record(tmp_path: Path) -> None:
    """The file holds each trajectory's end; its first line says what was evaluated."""
    records = tmp_path / "deep" / "r.jsonl"
    examine(records, ScriptedSampler(clever))
    found = {record.result.example_id: record for record in lines(records)}
    assert set(found) == {"a", "b", "c", "d"}
    assert found["b"].trajectories[0].outcome == "answered"
    assert found["b"].trajectories[0].text == answer("Bob")
    assert found["d"].trajectories[0].outcome == "bad_format"
    assert found["b"].search.statuses == {"success": 1}


def test_greedy_and_sampled(tmp_path: Path) -> None:
    """Temperature and number of samples reach the sampler; several samples are averaged."""
    sampler = ScriptedSampler(lambda prompt, seed, index: answer("Ada" if index % 2 else "Bob"))
    event = examine(tmp_path / "r.jsonl", sampler, samples=4, temperature=1.0, top_p=0.9, limit=1)
    assert [(asked.temperature, asked.top_p, asked.top_k) for asked in sampler.requests] == [(1.0, 0.9, -1)]
    greedy = ScriptedSampler(clever)
    examine(tmp_path / "greedy.jsonl", greedy)
    assert {(asked.weights_uri, asked.temperature, asked.top_p) for asked in greedy.requests} == {
        ("w3", 0.0, 1.0)
    }
    assert [asked.num_samples for asked in sampler.requests] == [4]
    assert (event.results[0].samples, event.results[0].exact_match) == (4, 0.5)
    assert event.settings["temperature"] == 1.0
    assert event.settings["questions"] == 1


def test_interrupted_evaluation_goes_on(tmp_path: Path) -> None:
    """What has a record is not asked again, and the result is that of an undisturbed evaluation."""
    records = tmp_path / "r.jsonl"

    def dies(asked: Asked) -> EngineError | None:
        return WeightsGone("gone") if len(first.requests) == 3 else None

    first = ScriptedSampler(clever, faults=dies)
    with pytest.raises(WeightsGone):
        examine(records, first, batch_size=1)
    before = [record.result.example_id for record in lines(records)]
    assert before
    assert len(before) < 4
    with records.open("ab") as file:
        file.write(b'{"torn')
    second = ScriptedSampler(clever)
    event = examine(records, second, batch_size=1)
    assert len({asked.prompt[:90] for asked in second.requests}) <= 4 - len(before) + 1
    whole = examine(tmp_path / "whole.jsonl", ScriptedSampler(clever))
    assert (event.results, event.set_digest) == (whole.results, whole.set_digest)
    done = ScriptedSampler(clever)
    assert examine(records, done, batch_size=1).results == whole.results
    assert not done.requests


def test_void_questions_are_asked_again(tmp_path: Path) -> None:
    """A fault counts as void, not as wrong, and the next run asks the question anew."""
    records = tmp_path / "r.jsonl"
    broken = ScriptedSearch(fails=lambda query: True)
    event = examine(records, ScriptedSampler(clever), broken)
    assert (event.results[1].samples, event.results[1].void) == (0, 1)
    assert event.summary["em/nq"] == 1.0
    assert (event.summary["questions_void"], event.summary["rollout/void_rate"]) == (1, 0.25)
    assert event.summary["search/timeout"] == 1
    again = ScriptedSampler(clever)
    event = examine(records, again)
    assert (event.results[1].exact_match, event.summary["questions_void"]) == (1.0, 0)
    assert len(again.requests) == 2


def test_busy_engine_is_void_too(tmp_path: Path) -> None:
    """A request that fails after its retries voids its trajectories."""
    sampler = ScriptedSampler(clever, faults=lambda asked: ServiceBusy("no capacity"))
    event = examine(tmp_path / "r.jsonl", sampler, samples=2, limit=2)
    assert [(result.samples, result.void) for result in event.results] == [(0, 2), (0, 2)]
    assert event.summary["exact_match"] == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 2}, "samples is 1"),
        ({"temperature": 0.5}, "temperature is 0.0"),
        ({"limit": 2}, "questions"),
    ],
)
def test_file_of_another_evaluation_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    """Records of other settings are never mixed; the message shows both values."""
    records = tmp_path / "r.jsonl"
    examine(records, ScriptedSampler(clever))
    before = records.read_bytes()
    with pytest.raises(ConfigError, match="another evaluation") as caught:
        examine(records, ScriptedSampler(clever), **change)
    assert words in str(caught.value) or "set_digest" in str(caught.value)
    assert records.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello\nworld\n", b"hello", b'{"name":"x"}\n{"half'])
def test_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that holds something else is left alone."""
    records = tmp_path / "r.jsonl"
    records.write_bytes(content)
    with pytest.raises(ConfigError, match="no evaluation records"):
        examine(records, ScriptedSampler(clever))
    assert records.read_bytes() == content


def test_file_torn_in_its_first_line_is_begun_anew(tmp_path: Path) -> None:
    """A kill before the first line was whole leaves nothing that must be kept."""
    records = tmp_path / "r.jsonl"
    examine(records, ScriptedSampler(clever))
    whole = records.read_bytes()
    records.write_bytes(whole[:30])
    examine(records, ScriptedSampler(clever))
    assert sorted(records.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_two_evaluations_cannot_share_a_file(tmp_path: Path) -> None:
    """The second is told so."""
    records = tmp_path / "r.jsonl"
    examine(records, ScriptedSampler(clever))
    with records.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another evaluation"):
            examine(records, ScriptedSampler(clever))


def test_two_policies_answer_under_the_same_draws(tmp_path: Path) -> None:
    """Seeds depend on the set, not on weights, order of asking or batch size."""
    one, other = ScriptedSampler(clever), ScriptedSampler(clever)
    examine(tmp_path / "a.jsonl", one, temperature=1.0, batch_size=1)
    examine(tmp_path / "b.jsonl", other, temperature=1.0, name="later")
    assert {(asked.prompt, asked.seed) for asked in one.requests} == {
        (asked.prompt, asked.seed) for asked in other.requests
    }


def test_set_digest_covers_questions_answers_and_order() -> None:
    """Any change of the set is another set."""
    changed = [*EXAMPLES[:3], Example("d", "Who was Dot?", ("Dora",), "hotpotqa")]
    digests = {
        set_digest(EXAMPLES),
        set_digest(EXAMPLES[::-1]),
        set_digest(changed),
        set_digest(EXAMPLES[:3]),
    }
    assert len(digests) == 4


def test_batch_size_bounds_the_questions_in_work(tmp_path: Path) -> None:
    """With a batch of two no more than two requests are ever in flight."""
    sampler = ScriptedSampler(clever, latency=lambda said, seed: 0.005)
    examine(tmp_path / "r.jsonl", sampler, batch_size=2)
    assert sampler.most_running == 2


def test_prompt_without_room_is_an_error(tmp_path: Path) -> None:
    """A question that cannot be answered is named."""
    examples = [Example("long", "Why? " * 4000, ("x",), "nq")]
    with pytest.raises(DataError, match="question 'long'"):
        examine(tmp_path / "r.jsonl", ScriptedSampler(clever), examples=examples)


def test_result_is_a_journal_event(tmp_path: Path) -> None:
    """The event goes into the log and comes back equal."""
    event = examine(tmp_path / "r.jsonl", ScriptedSampler(clever))
    with open_run(tmp_path / "run") as log:
        log.journal.append_sync([event])
        assert [record.event for record in log.journal.read(1)] == [event]


def test_summary_of_nothing_divides_by_nothing() -> None:
    """No records: zeros, no error."""
    assert set(summarise([]).values()) == {0.0}


def test_records_of_another_source_of_a_scorer_are_refused(tmp_path: Path) -> None:
    """A user's scorer that was edited is another scorer: its records are not gone on with."""
    environment = make_environment(ScriptedSampler(clever), ScriptedSearch())

    def ask(source_digest: str) -> Evaluated:
        scorer = environment.scorer._replace(id="mine:score", source_digest=source_digest)
        exam = Exam(make_config(), environment._replace(scorer=scorer), Weights("w3", 3), EvalOptions())
        return anyio.run(evaluate, exam, EXAMPLES, tmp_path / "r.jsonl", silence())

    assert ask("a" * 64) == ask("a" * 64)
    with pytest.raises(ConfigError, match=r"its scorer is 'mine:score .* this one's 'mine:score"):
        ask("b" * 64)


def test_search_health_by_hand(tmp_path: Path) -> None:
    """Two searches found something (one in the cache), one nothing, one failed; a calculation is no search."""
    script = Script(1)
    calls = [
        ("success", 2.0, False),
        ("success", 0.5, True),
        ("empty", 4.0, False),
        ("rate_limited", 6.0, False),
    ]
    for tree, (status, latency, cached) in enumerate(calls, start=1):
        script.turn("0.0.0", None, [4], tree=tree).see("0.0.0", [5], tree=tree)
        seen = msgspec.structs.replace(script.records[-1][1], status=status, latency=latency, cached=cached)
        script.records[-1] = (tree, seen)
        script.turn("0.0.1", "0.0.0", [6], tree=tree).see("0.0.1", [7], tree=tree)
        called = msgspec.structs.replace(script.records[-2][1], tool="calculator")
        script.records[-2] = (tree, called)
        script.turn("0.0.2", "0.0.1", [8], tree=tree).end("0.0.2", 1.0, tree=tree)
    summary = summarise([question_record(fold_group(script.records), get_rule("unicode_p"))])
    assert summary["search/calls"] == 4
    assert summary["search/success_rate"] == 0.75
    assert summary["search/error_rate"] == summary["search/empty_rate"] == 0.25
    assert (summary["search/429"], summary["search/timeout"]) == (1, 0)
    assert summary["search/latency"] == 4.0
    assert summary["search/cache_hit"] == 0.25
    assert (summary["rollout/search_calls"], summary["rollout/turns"]) == (1, 3)
