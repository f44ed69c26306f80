"""The stored form of every event: bytes written once must be read for ever."""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given

from core.arrays import pack_logprobs, pack_tokens
from core.events import (
    VOID_OUTCOMES,
    AdamParams,
    Answered,
    CheckpointSaved,
    ChosenLeaf,
    Evaluated,
    GoalSet,
    GroupAborted,
    GroupAdopted,
    GroupAsked,
    GroupClosed,
    GroupDropped,
    GroupEvent,
    GroupOpened,
    JournalEvent,
    NodesChosen,
    Observed,
    Outcome,
    Plan,
    PlanEvidence,
    PlannedGroup,
    PolicyPublished,
    QuestionResult,
    Recovered,
    ReferenceScored,
    Rewarded,
    RunOpened,
    SamplingParams,
    StepCommitted,
    StepPlanned,
    ToolCalled,
    TurnSampled,
)
from tests.strategies import GROUP_EVENT_TYPES, JOURNAL_EVENT_TYPES, group_events, journal_events

GROUP_DECODER = msgspec.msgpack.Decoder(GroupEvent)
JOURNAL_DECODER = msgspec.msgpack.Decoder(JournalEvent)

BYTES: dict[str, str] = json.loads(Path(__file__).with_name("event_bytes.json").read_text())
"""Stored bytes (hex) by name, as schema version 1 wrote them."""

GROUP_EXAMPLES = {
    "group": GroupAsked(
        uid="000123.0",
        ticket=123,
        attempt=0,
        example_id="hotpot-5",
        question="Wer war es? 谁",
        references=("Ada", "Ada Lovelace"),
        data_source="hotpotqa",
        prompt=pack_tokens([1, 2, 248044]),
        plan=Plan(mode="tree", m=2, n=2, l=1, k=3, tau=0.5),
        policy_version=4,
        weights_uri="pytrio://w/4",
        params=SamplingParams(top_p=0.9, max_search_calls=3),
        protocol="qwen3_5",
        at=1.5,
    ),
    "sample": TurnSampled(
        node="1.0.2",
        parent="0.0.1",
        turn=2,
        tokens=pack_tokens([7, 8]),
        sampled_logprobs=pack_logprobs([-0.5, -1.25]),
        text="so",
        stop_reason="stop",
        seed=2**31 - 1,
        sample_index=1,
        policy_version=4,
        request=1,
        seconds=0.25,
    ),
    "sample-first": TurnSampled(
        node="0.0.0",
        parent=None,
        turn=0,
        tokens=b"",
        sampled_logprobs=b"",
        text="",
        stop_reason="length",
        seed=0,
        sample_index=0,
        policy_version=0,
    ),
    "tool_call": ToolCalled(
        node="0.0.0",
        call_id="c1",
        tool="search",
        arguments={"query": "ada", "top_k": 3, "exact": True, "boost": 0.5, "lang": None},
    ),
    "observation": Observed(
        node="0.0.0",
        content="[1] Ada",
        tokens=pack_tokens([9]),
        prompt_reset=pack_tokens([1, 9]),
        ok=False,
        error="late",
        status="timeout",
        latency=2.5,
        backend="local",
        cached=True,
        truncated=True,
        call_id="c1",
        document_ids=("d1",),
    ),
    "answer": Answered(leaf="0.0.1", outcome=Outcome.TOOL_LIMIT, answer=None, text="x", detail="5th call"),
    "reward": Rewarded(
        node="0.0.1",
        value=-0.1,
        scorer="em_format",
        scorer_version="1",
        source_digest="ab",
        components={"format": 0.0},
        scope="node",
    ),
    "expand": NodesChosen(
        round=1,
        nodes=("0.0.0", None),
        policy="uncertainty",
        candidates=(None, "0.0.0"),
        scores=(-0.25, -0.5),
    ),
    "reference_logprobs": ReferenceScored(node="0.0.0", logprobs=pack_logprobs([-0.75]), base_model="b"),
}

JOURNAL_EXAMPLES = {
    "run": RunOpened(
        schema=1,
        config={"run": {"seed": 3}},
        config_digest="cd",
        fingerprints={"numpy": "2.4.6"},
        base_model="embedded",
        seed=3,
        run_id="r",
        weights_uri="u",
        at=2.0,
    ),
    "run_goal": GoalSet(max_steps=10, at=2.0),
    "group_opened": GroupOpened(
        uid="000123.0",
        ticket=123,
        attempt=0,
        owner=2,
        worker="w1",
        policy_version=4,
        weights_uri="u",
        committed_steps=3,
        at=2.0,
    ),
    "group_adopted": GroupAdopted(uid="000123.0", owner=3, worker="w2", at=2.0),
    "group_closed": GroupClosed(
        uid="000123.0",
        chosen=(ChosenLeaf(tree=1, leaf="0.0.1"),),
        records=9,
        digest="dd",
        tokens_sampled=77,
        search_calls=2,
        at=2.0,
    ),
    "group_aborted": GroupAborted(
        uid="000123.0",
        reason="weights_expired",
        final=True,
        records=4,
        tokens_sampled=5,
        search_calls=1,
        at=2.0,
    ),
    "group_dropped": GroupDropped(uid="000123.0", reason="run_ended", at=2.0),
    "step_planned": StepPlanned(
        step=3,
        groups=(PlannedGroup(uid="000123.0", digest="dd", marks=b"\x01\x02\x03\x04"),),
        estimator="tree",
        estimator_params={"singleton": "zero", "group_by": "uid"},
        shaping="tree_diff",
        shaping_params={"margin": 0.1},
        prefix_weight="once_sum",
        kl_beta=0.001,
        loss="ppo",
        loss_config={"clip": 0.2},
        adam=AdamParams(learning_rate=1e-4, grad_clip_norm=1.0),
        members=6,
        micro_batches=((0, 2), (1,)),
        datum_digests=("aa", "bb", "cc"),
        batch_digest="ee",
        policy_version=4,
        fingerprints={"core": "1"},
        packing={"max_datums": 32},
        reduction="sum",
        evidence=PlanEvidence(
            keys=("000123.0/t1/0.0.1#0",),
            tokens=b"\x01" * 16,
            logprobs=b"\x02" * 16,
            advantages=b"\x03" * 16,
            rewards=b"\x04" * 16,
        ),
        at=2.0,
    ),
    "step_committed": StepCommitted(
        step=3,
        skipped=False,
        policy_version=5,
        trainer_metrics={"loss": 0.5},
        rollout_metrics={"reward": 0.25},
        seconds={"train": 1.0},
        engine_digest="ff",
        tokens_trained=99,
        at=2.0,
    ),
    "policy_published": PolicyPublished(policy_version=5, weights_uri="u5", step=4, at=2.0),
    "checkpoint": CheckpointSaved(step=4, state_uri="s", weights_uri="u", training_run="t", at=2.0),
    "recovered": Recovered(
        restored_uri="s",
        restored_step=2,
        resent_steps=(2, 3),
        training_run="t2",
        tokens_trained=12,
        at=2.0,
    ),
    "eval": Evaluated(
        weights_uri="u",
        policy_version=5,
        set_digest="99",
        settings={"samples": 4, "temperature": 1.0, "split": "dev", "greedy": False},
        results=(
            QuestionResult(
                example_id="q",
                data_source="world",
                samples=4,
                exact_match=0.75,
                format=1.0,
                f1=0.5,
                search_calls=1.5,
                turns=2.5,
                void=1,
                answer="Ada",
            ),
        ),
        summary={"exact_match": 0.75},
        name="before",
        at=2.0,
    ),
}


@pytest.mark.parametrize("name", GROUP_EXAMPLES)
def test_stored_group_bytes_are_read(name: str) -> None:
    """Bytes that schema version 1 stored decode to the event they were written from."""
    assert GROUP_DECODER.decode(bytes.fromhex(BYTES[name])) == GROUP_EXAMPLES[name]


@pytest.mark.parametrize("name", JOURNAL_EXAMPLES)
def test_stored_journal_bytes_are_read(name: str) -> None:
    """Bytes that schema version 1 stored decode to the event they were written from."""
    assert JOURNAL_DECODER.decode(bytes.fromhex(BYTES[name])) == JOURNAL_EXAMPLES[name]


@pytest.mark.parametrize("name", [*GROUP_EXAMPLES, *JOURNAL_EXAMPLES])
def test_the_same_map_is_still_written(name: str) -> None:
    """An event without newer fields is written as schema version 1 wrote it: defaults take no space.

    The maps are compared, not the bytes: msgspec writes a wider map header once a type has 16 fields.
    """
    event = GROUP_EXAMPLES.get(name) or JOURNAL_EXAMPLES[name]
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    assert written == msgspec.msgpack.decode(bytes.fromhex(BYTES[name]))


def test_every_event_has_stored_bytes_and_a_strategy() -> None:
    """No event type is left out of the fixtures or of the strategies."""
    examples = {type(event) for event in (*GROUP_EXAMPLES.values(), *JOURNAL_EXAMPLES.values())}
    assert examples == {*get_args(GroupEvent), *get_args(JournalEvent)}
    assert set(GROUP_EVENT_TYPES) == set(get_args(GroupEvent))
    assert set(JOURNAL_EVENT_TYPES) == set(get_args(JournalEvent))
    assert BYTES.keys() == {*GROUP_EXAMPLES, *JOURNAL_EXAMPLES}


def test_a_field_from_the_future_is_skipped() -> None:
    """A newer writer's extra field does not stop an older reader."""
    stored = msgspec.msgpack.encode({"type": "run_goal", "max_steps": 3, "colour": "red"})
    assert JOURNAL_DECODER.decode(stored) == GoalSet(max_steps=3)


def test_void_outcomes_are_not_the_policys() -> None:
    """Exactly three outcomes are void."""
    assert {"void_tool", "void_engine", "cancelled"} == VOID_OUTCOMES


@given(group_events())
def test_group_events_round_trip(event: GroupEvent) -> None:
    """decode(encode(e)) == e for every group event."""
    assert GROUP_DECODER.decode(msgspec.msgpack.encode(event)) == event


@given(journal_events())
def test_journal_events_round_trip(event: JournalEvent) -> None:
    """decode(encode(e)) == e for every journal event."""
    assert JOURNAL_DECODER.decode(msgspec.msgpack.encode(event)) == event
