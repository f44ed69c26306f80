"""Owns the look at one trajectory in a terminal: every token with its logprob, mask and advantage.

Sampled tokens stand in three aligned rows (token, logprob, advantage), wrapped; given tokens (prompt and
observations) stand as text behind a bar, visibly outside the loss.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from core.batch import StepBatch
from core.datum import DatumArrays
from core.errors import ReplayError
from core.segments import Segment, segments
from core.tree import Trajectory, trajectory
from learner.batch import fold_bundle
from learner.rebuild import CodeLoader, no_code, rebuild
from learner.visible import visible
from store.log import Log

Spell = Callable[[Sequence[int]], list[str]]
"""One text per token id."""
GAP = "  "


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
    """`UID/tT/LEAF`, taken apart."""

    uid: str
    tree: int
    leaf: str


def parse_name(text: str) -> Name:
    """Return the parts of `000003.0/t2/0.0.1` (or `000003.0/2/0.0.1`); raises ReplayError."""
    parts = text.split("/")
    if len(parts) != 3 or not parts[1].removeprefix("t").isdecimal():
        raise ReplayError(f"not a trajectory: {text!r}, expected UID/TREE/LEAF such as 000003.0/t2/0.0.1")
    return Name(parts[0], int(parts[1].removeprefix("t")), parts[2])


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


def view_lines(view: TrajectoryView, width: int = 100) -> list[str]:
    """Return the view for a terminal of `width` columns."""
    trained = "not trained yet" if view.step is None else f"trained in step {view.step}"
    reward = "not scored" if view.reward is None else f"reward {view.reward:+.4f}"
    lines = [
        f"{view.uid}/t{view.tree}/{view.leaf}: {view.outcome}, {reward}, {trained}",
        f"question: {visible(view.question)}",
        f"expected: {visible(' | '.join(view.references))}; answer: {visible(view.answer or '–')}",
    ]
    for number, segment in enumerate(view.segments):
        sent = "" if segment.datum or view.step is None else " (all its advantages are 0: not sent)"
        lines.append(f"segment {number}{sent}")
        for sampled, run in _runs(segment.tokens):
            lines += _sampled_lines(run, width) if sampled else _given_lines(run, width)
    return lines


def _runs(tokens: Sequence[TokenView]) -> Iterator[tuple[bool, list[TokenView]]]:
    run: list[TokenView] = []
    for token in tokens:
        if run and token.sampled != run[-1].sampled:
            yield run[-1].sampled, run
            run = []
        run.append(token)
    if run:
        yield run[-1].sampled, run


def _given_lines(run: Sequence[TokenView], width: int) -> list[str]:
    text = visible("".join(token.text for token in run))
    room = width - 4
    return [
        f"  │ {line[start : start + room]}"
        for line in text.split("\n")
        for start in range(0, max(len(line), 1), room)
    ]


def _sampled_lines(run: Sequence[TokenView], width: int) -> list[str]:
    """Return three rows per line of tokens: what was sampled, its logprob, its advantage."""
    lines: list[str] = []
    rows: list[list[str]] = [[], [], []]
    used = 0
    for token in run:
        cells = [
            visible(token.text).replace("\n", "⏎"),
            f"{token.logprob:.2f}",
            f"{token.advantage:+.3g}" if token.advantage else "·",
        ]
        size = max(map(len, cells)) + len(GAP)
        if used and used + size > width - 4:
            lines += _joined(rows)
            rows, used = [[], [], []], 0
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell.ljust(size))
        used += size
    return lines + _joined(rows)


def _joined(rows: Sequence[Sequence[str]]) -> list[str]:
    names = ("  ▶ ", "    ", "    ")
    return [(name + "".join(row)).rstrip() for name, row in zip(names, rows, strict=True)]
