"""Owns the row form of trajectories: what tables and other programs read, and the way back to events.

One row is one ended trajectory: its tokens end to end, the logprobs and the mask beside them, and where its
turns and segments stand. The way back gives groups whose datums are the same arrays; what a row does not say
(tool calls, latencies, expansions) is not made up.
"""

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from core.arrays import pack_logprobs, pack_tokens, view_logprobs
from core.errors import DataError
from core.events import (
    SCHEMA_VERSION,
    Answered,
    ChosenLeaf,
    GroupAsked,
    GroupEvent,
    NodesChosen,
    Observed,
    Outcome,
    Plan,
    ReferenceScored,
    Rewarded,
    SamplingParams,
    TurnSampled,
)
from core.ids import parse_node, parse_uid
from core.nodes import Node
from core.segments import Segment, segments
from core.tree import Group, Trajectory, trajectories
from store import codec
from store.exchange import Arrival, Passport
from store.records import RawRecord

IMPORTED = "imported"
"""Status of an observation, and policy of an expansion, of which a row keeps the outcome alone."""


class TurnRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled turn: tokens start to stop − 1 of the row."""

    node: str
    parent: str | None
    start: int
    stop: int
    text: str
    stop_reason: str
    seed: int
    sample_index: int
    request: int
    observation: str | None = None
    """What the environment said next; None when nothing was sampled after it."""
    reference: list[float] | None = None
    """The base model's logprobs, where they were taken."""
    reference_model: str = ""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A leaf's reward, and who gave it."""

    value: float
    scorer: str
    scorer_version: str
    source_digest: str
    components: dict[str, float]


class TrajectoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """One ended trajectory. Lists of one number per token have equal lengths."""

    uid: str
    tree: int
    leaf: str
    member: bool
    """Whether it counts in its group (chosen, not void)."""
    example_id: str
    data_source: str
    question: str
    references: list[str]
    policy_version: int
    weights_uri: str
    opened_at_step: int
    dropped: str
    """Why the group was dropped, "" when it was not."""
    plan: Plan
    params: SamplingParams
    protocol: str
    source: str
    outcome: Outcome
    answer: str | None
    text: str
    reward: float | None
    score: Score | None
    tokens: list[int]
    logprobs: list[float]
    """At sampling time; 0 where the mask is 0. Exact float32 values."""
    mask: list[int]
    """1 where the policy sampled the token."""
    segment_starts: list[int]
    """Where each segment starts; more than one only where a template rewrites history."""
    turns: list[TurnRow]


def to_rows(group: Group, passport: Passport) -> Iterator[TrajectoryRow]:
    """Yield the rows of a group's ended trajectories, in (tree, node) order."""
    members = {(leaf.tree, leaf.leaf) for leaf in passport.chosen}
    for trajectory in trajectories(group):
        yield _to_row(trajectory, passport, member=(trajectory.tree, trajectory.leaf) in members)


def _to_row(trajectory: Trajectory, passport: Passport, *, member: bool) -> TrajectoryRow:
    asked, ended, parts = trajectory.group.asked, trajectory.ended, segments(trajectory)
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)])[:-1].tolist()
    scored = trajectory.path[-1].reward
    return TrajectoryRow(
        uid=passport.uid,
        tree=trajectory.tree,
        leaf=trajectory.leaf,
        member=member,
        example_id=asked.example_id,
        data_source=asked.data_source,
        question=asked.question,
        references=list(asked.references),
        policy_version=passport.policy_version,
        weights_uri=passport.weights_uri,
        opened_at_step=passport.opened_at_step,
        dropped=passport.dropped,
        plan=asked.plan,
        params=asked.params,
        protocol=asked.protocol,
        source=asked.source,
        outcome=ended.outcome,
        answer=ended.answer,
        text=ended.text,
        reward=trajectory.reward,
        score=None if scored is None else _score(scored),
        tokens=np.concatenate([part.tokens for part in parts]).tolist(),
        logprobs=np.concatenate([part.logprobs for part in parts]).tolist(),
        mask=np.concatenate([part.sampled for part in parts]).astype(int).tolist(),
        segment_starts=starts,
        turns=list(_turn_rows(trajectory.path, parts, starts)),
    )


def _score(scored: Rewarded) -> Score:
    return Score(
        value=scored.value,
        scorer=scored.scorer,
        scorer_version=scored.scorer_version,
        source_digest=scored.source_digest,
        components=dict(scored.components),
    )


def _turn_rows(path: Sequence[Node], parts: Sequence[Segment], starts: Sequence[int]) -> Iterator[TurnRow]:
    for part, offset in zip(parts, starts, strict=True):
        for turn in part.turns:
            node = path[turn.step]
            last = turn.step == len(path) - 1
            yield TurnRow(
                node=node.node,
                parent=node.parent,
                start=offset + turn.start,
                stop=offset + turn.stop,
                text=node.sample.text,
                stop_reason=node.sample.stop_reason,
                seed=node.sample.seed,
                sample_index=node.sample.sample_index,
                request=node.sample.request,
                observation=node.observation.content if node.observation and not last else None,
                reference=view_logprobs(node.reference.logprobs).tolist() if node.reference else None,
                reference_model=node.reference.base_model if node.reference else "",
            )


def to_arrival(rows: Sequence[TrajectoryRow]) -> Arrival:
    """Return the group that `rows`, all of one uid, tell of; raises DataError when they contradict it."""
    first = rows[0]
    records = [RawRecord(0, 0, SCHEMA_VERSION, codec.encode(_asked(first)))]
    for tree, theirs in itertools.groupby(rows, key=lambda row: row.tree):
        for position, event in enumerate(_stream(list(theirs), first)):
            records.append(RawRecord(tree, position, SCHEMA_VERSION, codec.encode(event)))
    passport = Passport(
        uid=first.uid,
        policy_version=first.policy_version,
        weights_uri=first.weights_uri,
        opened_at_step=first.opened_at_step,
        chosen=tuple(ChosenLeaf(tree=row.tree, leaf=row.leaf) for row in rows if row.member),
        dropped=first.dropped,
    )
    return Arrival(passport=passport, records=tuple(records))


def _stream(rows: Sequence[TrajectoryRow], first: TrajectoryRow) -> Iterator[GroupEvent]:
    """Yield the events of one tree, round by round, each round after what it was expanded from."""
    rounds: dict[int, dict[str, GroupEvent]] = {}
    starts: dict[int, dict[int, str | None]] = {}
    for row in rows:
        _check(row, first)
        for node, name, event in _events(row):
            place = parse_node(node)
            rounds.setdefault(place.round, {}).setdefault(f"{node} {name}", event)
            if isinstance(event, TurnSampled):
                starts.setdefault(place.round, {}).setdefault(place.expansion, event.parent)
    for number in sorted(rounds):
        if number:
            theirs = starts[number]
            nodes = tuple(theirs.get(expansion) for expansion in range(max(theirs) + 1))
            yield NodesChosen(round=number, nodes=nodes, policy=IMPORTED)
        yield from rounds[number].values()


def _asked(row: TrajectoryRow) -> GroupAsked:
    ticket, attempt = parse_uid(row.uid)
    return GroupAsked(
        uid=row.uid,
        ticket=ticket,
        attempt=attempt,
        example_id=row.example_id,
        question=row.question,
        references=tuple(row.references),
        data_source=row.data_source,
        prompt=pack_tokens(row.tokens[: row.turns[0].start]),
        plan=row.plan,
        policy_version=row.policy_version,
        weights_uri=row.weights_uri,
        params=row.params,
        protocol=row.protocol,
        source=row.source,
    )


def _check(row: TrajectoryRow, first: TrajectoryRow) -> None:
    sizes = {len(row.tokens), len(row.logprobs), len(row.mask)}
    if len(sizes) != 1 or not row.turns or not row.segment_starts:
        raise DataError(
            f"trajectory {row.uid}/t{row.tree}/{row.leaf}: {len(row.tokens)} tokens, {len(row.logprobs)} "
            f"logprobs, {len(row.mask)} mask values, {len(row.turns)} turns, expected equal and some"
        )
    if row.turns[-1].stop != len(row.tokens) or row.turns[-1].node != row.leaf:
        raise DataError(f"trajectory {row.uid}/t{row.tree}/{row.leaf}: its last turn is not its end")
    if row.tokens[: row.turns[0].start] != first.tokens[: first.turns[0].start]:
        raise DataError(f"trajectory {row.uid}/t{row.tree}/{row.leaf}: another prompt than its group's")


def _events(row: TrajectoryRow) -> Iterator[tuple[str, str, GroupEvent]]:
    """Yield the events of one path with their nodes, and names that equal ones of other paths share."""
    before = None
    for turn in row.turns:
        if before is not None:
            yield before.node, "observation", _observed(row, before, turn.start)
        yield turn.node, "sample", _sampled(row, turn)
        if turn.reference is not None:
            logprobs = pack_logprobs(turn.reference)
            scored = ReferenceScored(node=turn.node, logprobs=logprobs, base_model=turn.reference_model)
            yield turn.node, "reference", scored
        before = turn
    ended = Answered(leaf=row.leaf, outcome=row.outcome, answer=row.answer, text=row.text)
    yield row.leaf, "answer", ended
    if row.score is not None:
        yield row.leaf, "reward", Rewarded(node=row.leaf, **msgspec.structs.asdict(row.score))


def _sampled(row: TrajectoryRow, turn: TurnRow) -> TurnSampled:
    return TurnSampled(
        node=turn.node,
        parent=turn.parent,
        turn=row.turns.index(turn),
        tokens=pack_tokens(row.tokens[turn.start : turn.stop]),
        sampled_logprobs=pack_logprobs(row.logprobs[turn.start : turn.stop]),
        text=turn.text,
        stop_reason=turn.stop_reason,
        seed=turn.seed,
        sample_index=turn.sample_index,
        policy_version=row.policy_version,
        request=turn.request,
    )


def _observed(row: TrajectoryRow, turn: TurnRow, stop: int) -> Observed:
    """Return what stood between a turn and the one that starts at `stop`."""
    fresh = [start for start in row.segment_starts if turn.stop <= start <= stop and start > 0]
    return Observed(
        node=turn.node,
        content=turn.observation or "",
        tokens=b"" if fresh else pack_tokens(row.tokens[turn.stop : stop]),
        prompt_reset=pack_tokens(row.tokens[fresh[0] : stop]) if fresh else None,
        status=IMPORTED,
    )
