"""An altered record with right checksums is a MISMATCH that names the place; a damaged one is named too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.arrays import pack_logprobs, pack_tokens, view_logprobs, view_tokens
from core.errors import CodeNotAllowed
from core.events import (
    AdamParams,
    Answered,
    GroupAsked,
    GroupEvent,
    Observed,
    Rewarded,
    StepPlanned,
    TurnSampled,
)
from learner.fingerprints import code_fingerprints
from learner.rebuild import committed_event
from learner.replay import Auditor, StepReport, judge, replay_step
from store.log import open_log
from tests.learner.tampering import flip_bit, rewrite_group, rewrite_journal
from tests.strategies import _FIELDS

Copy = Callable[[str], Path]
PLAN_FIELDS = _FIELDS[StepPlanned]


def audit(run_dir: Path, step: int = 1) -> StepReport:
    """Return the report on one step of a run."""
    with open_log(run_dir, readonly=True) as log:
        return replay_step(Auditor(log, code_fingerprints()), step)


def trained(run_dir: Path, step: int = 1) -> StepReport:
    """Return a report that still matches, to pick a group and a leaf from."""
    report = audit(run_dir, step)
    assert report.match, report.differences
    return report


def change(kind: type, tree: int, **fields: Any) -> Callable[[int, GroupEvent], GroupEvent]:
    """Return a change of the first event of one kind in one tree; callables get the old value."""
    done: list[bool] = []

    def apply(at: int, event: GroupEvent) -> GroupEvent:
        if done or at != tree or not isinstance(event, kind):
            return event
        done.append(True)
        new = {
            name: value(getattr(event, name)) if callable(value) else value for name, value in fields.items()
        }
        return msgspec.structs.replace(event, **new)

    return apply


def place_of(report: StepReport) -> str:
    """Return all differences as text."""
    assert not report.match
    return "\n".join(str(difference) for difference in report.differences)


def with_token(raw: bytes, at: int, value: int) -> bytes:
    """Return token bytes with one id replaced."""
    tokens = view_tokens(raw).copy()
    tokens[at] = value
    return pack_tokens(tokens)


def with_logprob(raw: bytes, at: int, value: float) -> bytes:
    """Return logprob bytes with one value replaced."""
    values = view_logprobs(raw).copy()
    values[at] = value
    return pack_logprobs(values)


@pytest.mark.parametrize("shape", ["chains", "trees"])
def test_one_altered_logprob_is_named_to_the_token_with_its_old_value(copy_of: Copy, shape: str) -> None:
    """Record, datum, token offset, the value that was trained on, and a proof by digest."""
    run = copy_of(shape)
    group = trained(run).groups[0]
    rewrite_group(
        run, group.uid, change(TurnSampled, 2, sampled_logprobs=lambda raw: with_logprob(raw, 3, -0.5))
    )
    report = audit(run)
    [record, value] = [d for d in report.differences if "follows" not in d.cause]
    assert record.place == f"group {group.uid} tree 2 record 0 (sample 0.0.0)"
    assert value.field == "logprobs"
    assert value.offset == 12 + 3
    assert float(value.derived) == -0.5
    assert float(value.recorded) != -0.5
    assert value.proven
    assert f"{group.uid}/t2/" in value.place


@pytest.mark.parametrize(("kind", "field", "offset"), [(TurnSampled, "tokens", 12), (Observed, "tokens", 17)])
def test_one_altered_token_is_named_with_the_token_it_was(
    copy_of: Copy, kind: type, field: str, offset: int
) -> None:
    """Sampled and observed tokens alike; the offset counts from the trajectory's first token."""
    run = copy_of("chains")
    group = trained(run).groups[0]
    rewrite_group(run, group.uid, change(kind, 1, **{field: lambda raw: with_token(raw, 2, 777)}))
    [value] = [d for d in audit(run).differences if d.field == "tokens"]
    assert value.offset == offset + 2
    assert value.derived == "777"
    assert value.proven


def test_an_altered_prompt_token_is_found_in_the_first_datum_of_its_group(copy_of: Copy) -> None:
    """The prompt stands once, in the group's own record, and in every datum of the group."""
    run = copy_of("chains")
    group = trained(run).groups[1]
    rewrite_group(run, group.uid, change(GroupAsked, 0, prompt=lambda raw: with_token(raw, 0, 5)))
    text = place_of(audit(run))
    assert f"group {group.uid} tree 0 record 0 (group {group.uid})" in text
    assert "tokens at token 0" in text
    assert "2 more datums differ" in text


@pytest.mark.parametrize("shape", ["chains", "trees"])
@pytest.mark.parametrize("value", [0.25, -3.0, 2.0])
def test_an_altered_reward_is_named_with_what_it_was(copy_of: Copy, shape: str, value: float) -> None:
    """Advantages of the whole group change; the leaf whose reward was altered is proved."""
    run = copy_of(shape)
    group = trained(run).groups[0]
    rewrite_group(run, group.uid, change(Rewarded, 2, value=value))
    [found] = [d for d in audit(run).differences if d.field == "reward"]
    assert found.place.startswith(f"{group.uid}/t2/")
    assert found.derived == repr(value)
    assert float(found.recorded) in {0.0, 1.0}
    assert found.proven


def test_a_reward_that_takes_the_signal_away_is_named(copy_of: Copy) -> None:
    """The group's datums disappear from the batch, and still the cause is proved."""
    run = copy_of("chains")
    report = trained(run)
    group = next(group for group in report.groups if sum(member.reward for member in group.members) == 1)
    tree = next(member.tree for member in group.members if member.reward == 1)
    rewrite_group(run, group.uid, change(Rewarded, tree, value=0.0))
    differences = audit(run).differences
    assert any(d.field == "reward" and d.recorded == "1.0" and d.proven for d in differences)
    assert any(d.field == "datums" for d in differences)


@pytest.mark.parametrize(("kind", "name"), [(TurnSampled, "sample"), (Answered, "answer")])
def test_an_altered_text_is_a_mismatch_though_no_datum_changes(copy_of: Copy, kind: type, name: str) -> None:
    """The plan pins every record, not only the numbers that reach the trainer."""
    run = copy_of("chains")
    group = trained(run).groups[0]
    rewrite_group(run, group.uid, change(kind, 3, text="forged"))
    [found] = audit(run).differences
    assert found.place.startswith(f"group {group.uid} tree 3 record")
    assert f"({name} " in found.place


def test_an_altered_text_is_shown_against_what_its_tokens_spell(copy_of: Copy) -> None:
    """With a tokenizer at hand the field itself is named."""
    run = copy_of("chains")
    group = trained(run).groups[0]
    rewrite_group(run, group.uid, change(TurnSampled, 3, text="forged"))
    with open_log(run, readonly=True) as log:
        spell = lambda tokens: " ".join(map(str, tokens))  # noqa: E731
        [found] = replay_step(Auditor(log, {}, decode=spell), 1).differences
    assert "text 'forged' is not what its tokens spell" in found.field


def forge_plan(run: Path, **fields: Any) -> StepReport:
    """Return the report on step 1 after its plan was altered; callables get the plan."""
    with open_log(run, readonly=True) as log:
        index = log.step(1).planned_index

    def apply(event: Any) -> Any:
        assert isinstance(event, StepPlanned)
        new = {name: value(event) if callable(value) else value for name, value in fields.items()}
        return msgspec.structs.replace(event, **new)

    rewrite_journal(run, index, apply)
    return audit(run)


def test_an_altered_order_of_uids_is_proved(copy_of: Copy) -> None:
    """Ticket order gives the recorded batch, the altered order does not."""
    run = copy_of("chains")
    found, chain = forge_plan(run, groups=lambda plan: plan.groups[::-1]).differences
    assert "(the plan)" in chain.field
    assert found.field == "order of uids"
    assert found.proven


def test_an_altered_estimator_in_the_plan_is_named_with_the_one_that_was_used(copy_of: Copy) -> None:
    """All records are the pinned ones, and another estimator gives the recorded digests."""
    text = place_of(forge_plan(copy_of("trees"), estimator="grpo"))
    assert "its batch was made by 'tree'" in text


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"adam": AdamParams(learning_rate=1.0)}, "loss, loss_config, adam or batch_digest"),
        ({"loss": "ppo"}, "loss, loss_config, adam or batch_digest"),
        ({"loss_config": {"clip": 0.1}}, "loss, loss_config, adam or batch_digest"),
        ({"batch_digest": "00" * 32}, "loss, loss_config, adam or batch_digest"),
        ({"members": 99}, "members"),
        ({"policy_version": 7}, "policy_version"),
        ({"micro_batches": lambda plan: (plan.micro_batches[0][::-1],)}, "micro_batches"),
        ({"datum_digests": lambda plan: ("00" * 32, *plan.datum_digests[1:])}, "datum_digests"),
        (
            {"evidence": lambda plan: msgspec.structs.replace(plan.evidence, rewards=b"x" * 16)},
            "evidence.rewards",
        ),
        (
            {
                "groups": lambda plan: (
                    msgspec.structs.replace(plan.groups[0], marks=b"x" * 4),
                    *plan.groups[1:],
                )
            },
            "marks",
        ),
    ],
)
def test_every_altered_part_of_a_plan_is_a_mismatch_that_names_it(
    copy_of: Copy, fields: dict[str, Any], named: str
) -> None:
    """Nothing that the plan says can be changed unseen."""
    assert named in place_of(forge_plan(copy_of("chains"), **fields))


def test_a_damaged_record_is_a_mismatch_that_names_its_key(copy_of: Copy) -> None:
    """Without its checksum recomputed, the store refuses the record and replay says which one."""
    run = copy_of("chains")
    group = trained(run).groups[0]
    flip_bit(run, group.uid)
    text = place_of(audit(run))
    assert "damaged" in text
    assert group.uid.split(".")[0].lstrip("0") in text


def test_records_that_contradict_each_other_are_a_mismatch(copy_of: Copy) -> None:
    """A forged event that the fold refuses is reported with the rule that it breaks."""
    run = copy_of("chains")
    group = trained(run).groups[0]
    rewrite_group(run, group.uid, change(TurnSampled, 1, turn=4))
    assert "contradict each other" in place_of(audit(run))


def test_other_steps_still_match(copy_of: Copy) -> None:
    """An alteration is blamed on the step that it belongs to and on no other."""
    run = copy_of("chains")
    group = trained(run).groups[0]
    rewrite_group(run, group.uid, change(Rewarded, 1, value=0.5))
    assert [audit(run, step).match for step in range(3)] == [True, False, True]


def test_two_altered_logprobs_are_still_a_mismatch_that_names_the_records(copy_of: Copy) -> None:
    """The sums find one altered value; for more, the marks name the records and the datum is named."""
    run = copy_of("chains")
    group = trained(run).groups[0]
    rewrite_group(
        run,
        group.uid,
        change(
            TurnSampled, 1, sampled_logprobs=lambda raw: pack_logprobs(view_logprobs(raw) * np.float32(2))
        ),
    )
    text = place_of(audit(run))
    assert f"group {group.uid} tree 1 record 0 (sample 0.0.0)" in text
    assert f"{group.uid}/t1/" in text
    assert "logprobs" in text


ALTERABLE = sorted(set(StepPlanned.__struct_fields__) - {"step", "fingerprints", "at"})


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_plan_says_the_judgement_is_a_report(
    recorded: dict[str, Path], data: st.DataObject
) -> None:
    """Random values in random fields: never an error of another kind, and a match only of equal digests."""
    with open_log(recorded["trees"], readonly=True) as log:
        planned = log.plan(1)
        committed = committed_event(log, 1)
        names = data.draw(st.sets(st.sampled_from(ALTERABLE), min_size=1, max_size=4))
        fields = {name: data.draw(PLAN_FIELDS[name], label=name) for name in sorted(names)}
        forged = msgspec.structs.replace(planned, **fields)
        try:
            report = judge(Auditor(log, {}), forged, committed)
        except CodeNotAllowed:
            assert ":" in forged.estimator
            return
        if report.match:
            assert forged.datum_digests == planned.datum_digests
            assert forged.batch_digest == planned.batch_digest
            assert forged.groups == planned.groups


@pytest.mark.parametrize(("kind", "name"), [("planned_index", "plan"), ("committed_index", "commit")])
def test_an_altered_record_that_changes_no_datum_is_a_mismatch(copy_of: Copy, kind: str, name: str) -> None:
    """The next record's hash of it gives it away; the steps around it still match."""
    run = copy_of("chains")
    trained(run)
    with open_log(run, readonly=True) as log:
        index = getattr(log.step(1), kind)
        assert log.journal.is_linked(index) is True
        assert log.journal.is_linked(log.journal.length() - 1) is None
    rewrite_journal(run, index, lambda event: msgspec.structs.replace(event, at=event.at + 1))
    [found] = audit(run).differences
    assert found.place == "step 1"
    assert found.field == f"journal record {index} (the {name})"
    assert "altered after it was written" in found.cause
    assert audit(run, 0).match
    assert audit(run, 2).match
