"""Owns one trajectory token by token: what was sampled, with which logprob, and what it was trained with."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from core.batch import StepBatch
from core.datum import DatumArrays
from core.segments import Segment, segments
from core.tree import Trajectory, trajectory
from learner.batch import fold_bundle
from learner.rebuild import CodeLoader, no_code, rebuild
from store.log import Log

Spell = Callable[[Sequence[int]], list[str]]
"""One text per token id."""


class TokenView(msgspec.Struct, frozen=True, array_like=True):
    """One token of a trajectory."""

    token: int
    text: str
    sampled: bool
    logprob: float | None
    """At sampling time; None where the policy was given the token."""
    advantage: float
    """As sent to the trainer, scaled by its micro-batch; 0 where not trained."""


class SegmentView(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a trajectory."""

    tokens: tuple[TokenView, ...]
    datum: bool
    """Whether a step sent it; False also before the group is trained."""


class TrajectoryView(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory, token by token."""

    uid: str
    tree: int
    leaf: str
    question: str
    references: tuple[str, ...]
    outcome: str
    answer: str | None
    reward: float | None
    components: dict[str, float]
    step: int | None
    segments: tuple[SegmentView, ...]


class Name(NamedTuple):
    """Which trajectory."""

    uid: str
    tree: int
    leaf: str


def view_trajectory(log: Log, name: Name, spell: Spell, load: CodeLoader = no_code) -> TrajectoryView:
    """Return one trajectory; its advantages are those of the step that trained it.

    Raises StoreError (no such group), FoldError (no such leaf) or CodeNotAllowed.
    """
    row = log.group(name.uid)
    found = trajectory(fold_bundle(log.groups.fetch(name.uid)), name.tree, name.leaf)
    batch = None if row.step is None else rebuild(log, log.plan(row.step), load).batch
    scored = found.path[-1].reward
    return TrajectoryView(
        uid=name.uid,
        tree=name.tree,
        leaf=name.leaf,
        question=found.group.asked.question,
        references=found.group.asked.references,
        outcome=found.outcome.value,
        answer=found.ended.answer,
        reward=found.reward,
        components=scored.components if scored is not None else {},
        step=row.step,
        segments=tuple(_segments(found, batch, spell)),
    )


def _segments(found: Trajectory, batch: StepBatch | None, spell: Spell) -> Iterator[SegmentView]:
    sent: dict[int, DatumArrays] = {}
    if batch is not None:
        for key, datum in zip(batch.keys, batch.datums, strict=True):
            if (key.uid, key.tree, key.leaf) == (found.group.uid, found.tree, found.leaf):
                sent[key.segment] = datum
    for index, segment in enumerate(segments(found)):
        advantages = [0.0] * len(segment.tokens)
        if index in sent:
            advantages[1:] = sent[index].advantages.tolist()
        yield SegmentView(tokens=tuple(_tokens(segment, advantages, spell)), datum=index in sent)


def _tokens(segment: Segment, advantages: Sequence[float], spell: Spell) -> Iterator[TokenView]:
    ids = segment.tokens.tolist()
    sampled, logprobs = segment.sampled.tolist(), segment.logprobs.tolist()
    for position, text in enumerate(spell(ids)):
        yield TokenView(
            ids[position],
            text,
            sampled[position],
            logprobs[position] if sampled[position] else None,
            advantages[position],
        )
