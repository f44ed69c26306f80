"""Causes that no single altered record explains: rounding, other code, plans of other releases."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from core.datum import DatumArrays, datum_digest
from core.events import PlannedGroup, StepPlanned
from learner.batch import recipe_from_plan, step_digest
from learner.difference import Difference
from learner.evidence import collect
from learner.rebuild import Rebuilt, committed_event, rebuild
from learner.replay import Auditor, judge
from store.log import Log, open_log


@pytest.fixture
def log(recorded: dict[str, Path]) -> Iterator[Log]:
    """Give the recorded run of chains, read-only."""
    with open_log(recorded["chains"], readonly=True) as opened:
        yield opened


def found(log: Log, planned: StepPlanned, **auditor: object) -> tuple[Difference, ...]:
    """Return the differences of a plan that does not match."""
    report = judge(Auditor(log, {}, **auditor), planned, committed_event(log, planned.step))  # type: ignore[arg-type]
    assert not report.match
    return report.differences


def made_otherwise(log: Log, change: Callable[[DatumArrays], DatumArrays]) -> StepPlanned:
    """Return the plan of step 1 as other code would have made it, evidence and digests included."""
    planned = log.plan(1)
    rebuilt: Rebuilt = rebuild(log, planned)
    datums = [change(datum) for datum in rebuilt.batch.datums]
    digests = tuple(datum_digest(datum) for datum in datums)
    keys = [str(key) for key in rebuilt.batch.keys]
    return msgspec.structs.replace(
        planned,
        datum_digests=digests,
        batch_digest=step_digest(rebuilt.batch, digests, recipe_from_plan(planned)),
        evidence=collect(keys, datums, rebuilt.batch.table.rewards),
    )


def test_advantages_that_differ_in_their_last_bits_are_called_rounding(log: Log) -> None:
    """With the value that was planned, proved."""
    planned = made_otherwise(
        log, lambda datum: datum._replace(advantages=np.nextafter(datum.advantages, np.float32(0)))
    )
    first = found(log, planned)[0]
    assert first.field == "advantages of all its trained tokens"
    assert first.cause.startswith("float rounding")
    assert first.proven


def test_other_code_is_named_with_the_fingerprints_that_changed(log: Log) -> None:
    """All records are the pinned ones, and twice the advantage is no rounding."""
    planned = made_otherwise(log, lambda datum: datum._replace(advantages=datum.advantages * np.float32(2)))
    planned = msgspec.structs.replace(planned, fingerprints={"core": "old"})
    report = judge(Auditor(log, {"core": "new"}), planned, None)
    assert (
        "the plan or the code was altered (changed since: core was old, is new)"
        in report.differences[0].cause
    )
    assert float(report.differences[0].recorded) == pytest.approx(2 * float(report.differences[0].derived))


def test_a_shift_of_all_logprobs_names_the_field(log: Log) -> None:
    """Many values at once have no single offset; the field and the datum are still right."""
    planned = made_otherwise(log, lambda datum: datum._replace(logprobs=np.roll(datum.logprobs, 1)))
    first = found(log, planned)[0]
    assert (first.field, first.offset) == ("logprobs", None)
    assert first.place.startswith("datum 0 = ")


def test_a_plan_without_evidence_still_names_the_datum(log: Log) -> None:
    """As another release may have written it."""
    planned = msgspec.structs.replace(
        made_otherwise(log, lambda datum: datum._replace(targets=datum.inputs)), evidence=None
    )
    first = found(log, planned)[0]
    assert first.place.startswith("datum 0 = ")
    assert first.field == "datum"


def with_group(planned: StepPlanned, **fields: object) -> StepPlanned:
    """Return a plan whose first group is pinned otherwise."""
    first = msgspec.structs.replace(planned.groups[0], **fields)
    return msgspec.structs.replace(planned, groups=(first, *planned.groups[1:]))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"digest": "00" * 32}, "digest"),
        ({"digest": "00" * 32, "marks": b""}, "digest"),
        ({"digest": "00" * 32, "marks": b"1234"}, "number of records"),
    ],
)
def test_a_group_that_is_pinned_otherwise_is_named(log: Log, fields: dict[str, object], field: str) -> None:
    """Whether its records or the plan were altered."""
    planned = log.plan(1)
    first = found(log, with_group(planned, **fields))[0]
    assert first.place == f"group {planned.groups[0].uid}"
    assert first.field == field
    assert isinstance(planned.groups[0], PlannedGroup)


def test_text_around_a_token_is_spelled_by_the_tokenizer_where_there_is_one(log: Log) -> None:
    """And the token itself stands beside its number."""

    def spell(tokens: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    def change(datum: DatumArrays) -> DatumArrays:
        inputs, targets = datum.inputs.copy(), datum.targets.copy()
        inputs[12], targets[11] = 7, 7
        return datum._replace(inputs=inputs, targets=targets)

    first = found(log, made_otherwise(log, change), decode=spell)[0]
    assert first.recorded == "7 '<7>'"
    assert first.offset == 12
    assert f"<{first.derived.split()[0]}>" in first.around
    assert first.proven


def test_a_difference_reads_as_one_line(log: Log) -> None:
    """Place, field, offset, values, surroundings, cause and proof."""
    whole = Difference(
        place="datum 3",
        field="logprobs",
        offset=9,
        recorded="-1.0",
        derived="-2.0",
        around="so",
        cause="x.",
        proven=True,
    )
    assert (
        str(whole) == "datum 3: logprobs at token 9: recorded -1.0, re-derived -2.0, around 'so'. x. (proven)"
    )
    assert str(Difference(place="batch", field="members", cause="y")) == "batch: members. y"
