"""Owns the answer to "where does a step differ from its plan": order, record, value, or the plan itself."""

from collections.abc import Iterator

from core.digests import payload_digest
from core.events import PlanEvidence, StepPlanned
from core.ids import parse_uid
from learner import evidence, values
from learner.difference import Difference, Scene
from learner.pinned import altered_records, is_pinned
from learner.rebuild import derive


def diagnose(scene: Scene) -> list[Difference]:
    """Return every difference, the likeliest cause first; empty exactly when the step is what was planned."""
    if is_as_planned(scene):
        return []
    found = list(_order(scene))
    if any(difference.proven for difference in found):
        return found
    found += _records(scene)
    found += values.rewards(scene)
    found += values.datums(scene)
    found += _plan(scene)
    found = found or list(_evidence(scene))
    unexplained = Difference(place=f"step {scene.planned.step}", field="digest", cause="no place was found")
    return found or [unexplained]


def is_as_planned(scene: Scene) -> bool:
    """Decide, by comparison alone; where and why is found out only when this says no."""
    planned, rebuilt = scene.planned, scene.rebuilt
    uids = [group.uid for group in planned.groups]
    return (
        uids == sorted(uids, key=parse_uid)
        and all(
            is_pinned(pinned, taken.digest, taken.marks)
            for pinned, taken in zip(planned.groups, rebuilt.taken, strict=True)
        )
        and planned.members == len(rebuilt.batch.members)
        and planned.policy_version == scene.policy_version
        and planned.micro_batches == rebuilt.batch.micro_batches
        and planned.datum_digests == rebuilt.digests
        and planned.batch_digest == rebuilt.batch_digest
        and not list(_commit(scene))
        and not list(_evidence(scene))
    )


def _order(scene: Scene) -> Iterator[Difference]:
    uids = [group.uid for group in scene.planned.groups]
    ordered = sorted(uids, key=parse_uid)
    if uids == ordered:
        return
    taken = sorted(scene.rebuilt.taken, key=lambda one: parse_uid(one.group.uid))
    again = derive(taken, scene.rebuilt.recipe)
    yield Difference(
        place=f"step_planned of step {scene.planned.step}",
        field="order of uids",
        recorded=" ".join(uids),
        derived=" ".join(ordered),
        cause="a step trains its groups in ticket order: the order in the plan was altered",
        proven=again.batch_digest == scene.planned.batch_digest,
    )


def _records(scene: Scene) -> Iterator[Difference]:
    for group, taken in zip(scene.planned.groups, scene.rebuilt.taken, strict=True):
        if not is_pinned(group, taken.digest, taken.marks):
            yield from altered_records(group, scene.fetch(group.uid), scene.decode)


def _plan(scene: Scene) -> Iterator[Difference]:
    """Yield what contradicts inside the plan itself, or between the plan and its commit."""
    planned, rebuilt = scene.planned, scene.rebuilt
    place = f"step_planned of step {planned.step}"
    if planned.members != len(rebuilt.batch.members):
        members = len(rebuilt.batch.members)
        yield Difference(
            place=place,
            field="members",
            recorded=str(planned.members),
            derived=str(members),
            cause="N is not the number of chosen leaves",
        )
    if planned.policy_version != scene.policy_version:
        yield Difference(
            place=place,
            field="policy_version",
            recorded=str(planned.policy_version),
            derived=str(scene.policy_version),
            cause="it is not the newest version that was published before the plan",
        )
    if planned.micro_batches != rebuilt.batch.micro_batches:
        yield Difference(
            place=place,
            field="micro_batches",
            recorded=str(planned.micro_batches),
            derived=str(rebuilt.batch.micro_batches),
            cause="the datums are packed otherwise, and so scaled otherwise",
        )
    elif planned.datum_digests == rebuilt.digests and planned.batch_digest != rebuilt.batch_digest:
        yield Difference(
            place=place,
            field="loss, loss_config, adam or batch_digest",
            recorded=planned.batch_digest,
            derived=rebuilt.batch_digest,
            cause="all datums are those of the plan: its loss, optimizer settings or digest was altered",
        )
    elif planned.datum_digests != rebuilt.digests and planned.batch_digest == rebuilt.batch_digest:
        yield Difference(
            place=place, field="datum_digests", cause="the batch digest fits: the list of digests was altered"
        )
    yield from _commit(scene)


def _commit(scene: Scene) -> Iterator[Difference]:
    planned, committed = scene.planned, scene.committed
    if committed is None:
        return
    place = f"step_committed of step {planned.step}"
    sent = _payloads(planned)
    if committed.engine_digest and committed.engine_digest != sent:
        yield Difference(
            place=place,
            field="engine_digest",
            recorded=committed.engine_digest,
            derived=sent,
            cause="the engine received other payloads than planned, or the commit was altered",
        )
    if committed.skipped is bool(planned.datum_digests):
        yield Difference(
            place=place,
            field="skipped",
            recorded=str(committed.skipped),
            derived=str(not planned.datum_digests),
            cause="a step is skipped exactly when it has no datums",
        )


def _payloads(planned: StepPlanned) -> str:
    """Return the digest of the payloads that a plan speaks of, in words where it contradicts itself."""
    try:
        return payload_digest(
            [[planned.datum_digests[index] for index in micro] for micro in planned.micro_batches]
        )
    except (IndexError, ValueError) as exc:
        return f"none, its micro-batches and datum digests do not fit: {exc}"


def _evidence(scene: Scene) -> Iterator[Difference]:
    """Yield a difference when only the evidence was altered, which nothing is computed from."""
    recorded = scene.planned.evidence
    batch = scene.rebuilt.batch
    derived = evidence.collect([str(key) for key in batch.keys], batch.datums, batch.table.rewards)
    if recorded is None or recorded == derived:
        return
    fields = [
        name for name in PlanEvidence.__struct_fields__ if getattr(recorded, name) != getattr(derived, name)
    ]
    yield Difference(
        place=f"step_planned of step {scene.planned.step}",
        field=f"evidence.{fields[0]}",
        cause="every datum is the planned one: the evidence in the plan was altered",
    )
