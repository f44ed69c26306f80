"""Owns the audit of a step: re-derive it from rollout events alone, and say MATCH or where it differs.

Reads only. No clock, key, network or trainer is involved; user code runs only when the user allowed it.
"""

import contextlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from core.errors import CodeNotAllowed, FoldError, LogDamaged, ReplayError, RolltapeError, StoreError
from core.events import StepCommitted, StepPlanned
from core.nodes import NUMBER_BYTES
from learner.batch import group_facts
from learner.diagnose import diagnose
from learner.difference import Decode, Difference, Scene
from learner.fingerprints import changed
from learner.metrics import step_metrics
from learner.pinned import altered_records
from learner.rebuild import CodeLoader, Rebuilt, committed_event, no_code, planned_event, rebuild
from learner.verdict import broken_links, misplaced, version_before
from store.log import Log


class MemberLine(msgspec.Struct, frozen=True, kw_only=True):
    """One member of a replayed step."""

    tree: int
    leaf: str
    outcome: str
    answer: str | None
    reward: float
    components: dict[str, float]
    scorer: str
    shaped: float
    advantage: float
    """Per leaf, before KL term, prefix weight and scaling."""
    turns: int
    sampled_tokens: int


class GroupLine(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a replayed step."""

    uid: str
    example_id: str
    question: str
    data_source: str
    policy_version: int
    staleness: int
    temperature: float
    mean: float
    """Of the members' rewards."""
    std: float
    """With n − 1."""
    members: tuple[MemberLine, ...]


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What replay found out about one step."""

    step: int
    match: bool
    committed: bool
    skipped: bool = False
    estimator: str = ""
    """As recorded, like all up to `batch_digest`; empty where the plan cannot be read."""
    loss: str = ""
    learning_rate: float = 0.0
    policy_version: int = 0
    """Of the weights that the update starts from."""
    batch_digest: str = ""
    groups: tuple[GroupLine, ...] = ()
    members: int = 0
    micro_batches: tuple[int, ...] = ()
    """Datums per micro-batch."""
    tokens: dict[str, int] = {}
    """By kind."""
    metrics: dict[str, float] = {}
    differences: tuple[Difference, ...] = ()
    needs: str = ""
    """Which user code the step cannot be re-derived without: it is neither a match nor a mismatch."""
    notes: tuple[str, ...] = ()


class Auditor(NamedTuple):
    """How steps are replayed."""

    log: Log
    current: dict[str, str]
    """Today's fingerprints."""
    load: CodeLoader = no_code
    decode: Decode | None = None
    """Spells token ids, where a tokenizer is at hand."""


def replay_step(auditor: Auditor, step: int) -> StepReport:
    """Return the report on one step.

    Raises StoreError when it was never planned, CodeNotAllowed when its estimator is code that the user has
    not allowed. A damaged, missing or contradictory record is a MISMATCH that names it.
    """
    log = auditor.log
    row = log.step(step)
    try:
        planned, committed = planned_event(log, step), committed_event(log, step)
    except (StoreError, ReplayError) as exc:
        return StepReport(
            step=step,
            match=False,
            committed=row.committed_index is not None,
            differences=(_unreadable(step, exc),),
        )
    report = judge(auditor, msgspec.structs.replace(planned, step=step), committed)
    wrong = (*misplaced(step, planned, committed), *broken_links(log, step))
    if not wrong:
        return report
    return msgspec.structs.replace(report, match=False, differences=report.differences + wrong)


def judge(auditor: Auditor, planned: StepPlanned, committed: StepCommitted | None) -> StepReport:
    """Return the report on a plan, whatever it says, as `replay_step` does for the recorded one."""
    changes = changed(planned.fingerprints, auditor.current)
    try:
        rebuilt = rebuild(auditor.log, planned, auditor.load)
    except CodeNotAllowed:
        raise
    except RolltapeError as exc:
        return _unfolded(auditor, planned, committed, exc, changes)
    version = version_before(auditor.log, planned.step)
    fetch = auditor.log.groups.fetch
    scene = Scene(planned, committed, rebuilt, fetch, auditor.decode, version, changes)
    return _report(scene, diagnose(scene))


def replay_steps(auditor: Auditor, steps: Iterable[int]) -> Iterator[StepReport]:
    """Yield the reports of several steps, one at a time, so that memory stays flat."""
    for step in steps:
        yield audit_step(auditor, step)


def audit_step(auditor: Auditor, step: int) -> StepReport:
    """Return the report on one step, also on one that needs code which is not allowed; raises StoreError."""
    try:
        return replay_step(auditor, step)
    except CodeNotAllowed as exc:
        committed = auditor.log.step(step).committed_index is not None
        return StepReport(step=step, match=False, committed=committed, needs=str(exc))


def committed_steps(log: Log, first: int | None, last: int | None) -> range:
    """Return the steps first..last, inclusive (None: all committed); raises ReplayError for others."""
    count = log.state().committed_steps
    start, stop = first or 0, count if last is None else last + 1
    if not 0 <= start < stop <= count:
        raise ReplayError(
            f"steps {first!r}:{last!r} are not all committed: this run has steps 0 to {count - 1}"
        )
    return range(start, stop)


def _unfolded(
    auditor: Auditor,
    planned: StepPlanned,
    committed: StepCommitted | None,
    exc: RolltapeError,
    changes: Sequence[str],
) -> StepReport:
    return StepReport(
        step=planned.step,
        match=False,
        committed=committed is not None,
        skipped=not planned.datum_digests,
        estimator=planned.estimator,
        loss=planned.loss,
        learning_rate=planned.adam.learning_rate,
        policy_version=planned.policy_version,
        batch_digest=planned.batch_digest,
        differences=(_unreadable(planned.step, exc), *_unpinned(auditor, planned)),
        notes=tuple(f"changed since: {change}" for change in changes),
    )


def _unreadable(step: int, exc: RolltapeError) -> Difference:
    what = {
        LogDamaged: "a stored record is damaged",
        FoldError: "its records contradict each other",
        StoreError: "a stored record is missing",
    }.get(type(exc), "it cannot be made as its plan says")
    return Difference(place=f"step {step}", field="record", cause=f"{what}: {exc}")


def _unpinned(auditor: Auditor, planned: StepPlanned) -> Iterator[Difference]:
    """Yield the records that are not the pinned ones, of every group that can be read."""
    for group in planned.groups:
        with contextlib.suppress(RolltapeError):
            yield from altered_records(group, auditor.log.groups.fetch(group.uid), auditor.decode)


def _report(scene: Scene, differences: Sequence[Difference]) -> StepReport:
    planned, committed, batch = scene.planned, scene.committed, scene.rebuilt.batch
    metrics = step_metrics(group_facts(scene.rebuilt.taken, batch, planned.step), batch)
    notes = [f"changed since: {change}" for change in scene.changes]
    if committed is not None:
        notes += _metric_notes(committed.rollout_metrics, metrics)
    stats = batch.stats
    return StepReport(
        step=planned.step,
        match=not differences,
        committed=committed is not None,
        skipped=not planned.datum_digests,
        estimator=planned.estimator,
        loss=planned.loss,
        learning_rate=planned.adam.learning_rate,
        policy_version=planned.policy_version,
        batch_digest=planned.batch_digest,
        groups=tuple(_group_lines(scene.rebuilt, planned.step)),
        members=stats.members,
        micro_batches=tuple(len(micro) for micro in batch.micro_batches),
        tokens={
            "prompt": stats.prompt_tokens,
            "observation": stats.observation_tokens,
            "sampled": stats.sampled_tokens,
            "shared": stats.shared_sampled_tokens,
            "trained": stats.trained_tokens,
            "sent": stats.datum_tokens,
        },
        metrics=metrics,
        differences=tuple(differences),
        notes=tuple(notes),
    )


def _metric_notes(recorded: dict[str, float], derived: dict[str, float]) -> list[str]:
    """Return one line per metric that is not re-derived as it was recorded; other releases may count more."""
    return [
        f"metric {name}: recorded {recorded[name]!r}, re-derived {derived[name]!r}"
        for name in sorted(recorded.keys() & derived.keys())
        if recorded[name] != derived[name]
    ]


def _group_lines(rebuilt: Rebuilt, step: int) -> Iterator[GroupLine]:
    start = 0
    for facts in group_facts(rebuilt.taken, rebuilt.batch, step):
        asked = facts.group.asked
        lines = tuple(_member_lines(rebuilt, start, len(facts.members)))
        start += len(facts.members)
        rewards = [line.reward for line in lines]
        yield GroupLine(
            uid=facts.group.uid,
            example_id=asked.example_id,
            question=asked.question,
            data_source=asked.data_source,
            policy_version=asked.policy_version,
            staleness=facts.staleness,
            temperature=asked.params.temperature,
            mean=statistics.fmean(rewards) if rewards else 0.0,
            std=statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
            members=lines,
        )


def _member_lines(rebuilt: Rebuilt, start: int, count: int) -> Iterator[MemberLine]:
    batch = rebuilt.batch
    for position in range(start, start + count):
        member = batch.members[position]
        scored = member.path[-1].reward
        assert scored is not None
        yield MemberLine(
            tree=member.tree,
            leaf=member.leaf,
            outcome=member.outcome.value,
            answer=member.ended.answer,
            reward=scored.value,
            components=scored.components,
            scorer=f"{scored.scorer} {scored.scorer_version}",
            shaped=float(batch.shaped[position]),
            advantage=float(batch.advantages.leaf[position]),
            turns=len(member.path),
            sampled_tokens=sum(len(node.sample.tokens) for node in member.path) // NUMBER_BYTES,
        )
