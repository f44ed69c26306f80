"""Owns what an evaluation says: from trajectories to a question's record, from records to the summary.

Pure. Void trajectories count as void and enter no mean; a question all of whose trajectories are void enters
none either. The names are those of the Search-R1 recipe where it has one.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import fsum

import msgspec

from core.arrays import view_tokens
from core.events import Observed, QuestionResult
from core.tree import Group, Trajectory, trajectories
from rollout.normalise import Rule
from rollout.reward import measures
from rollout.turns import SEARCH, search_calls

FOUND = ("success", "empty")
TIMEOUT, RATE_LIMITED = "timeout", "rate_limited"


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of an evaluation."""

    outcome: str
    answer: str | None
    text: str
    """The last turn's."""
    reward: float
    exact_match: float
    format: float
    f1: float
    search_calls: int
    turns: int
    tokens_sampled: int


class SearchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The health of the searches of one question."""

    statuses: dict[str, int]
    cached: int
    seconds: float
    """Sum over those that were not cached."""


class QuestionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One question of an evaluation, as its line in the records file."""

    result: QuestionResult
    question: str
    references: tuple[str, ...]
    trajectories: tuple[TrajectoryRecord, ...]
    """Void ones left out."""
    search: SearchRecord


def question_record(group: Group, rule: Rule) -> QuestionRecord:
    """Return the record of an ended group; `rule` normalises where the scorer records no measures."""
    ended = [member for member in trajectories(group) if not member.is_void]
    voids = sum(member.is_void for member in trajectories(group))
    voids += sum(len(tree.unborn) for tree in group.trees.values())
    records = tuple(_trajectory_record(member, rule) for member in ended)
    asked = group.asked
    return QuestionRecord(
        result=QuestionResult(
            example_id=asked.example_id,
            data_source=asked.data_source,
            samples=len(records),
            exact_match=mean(record.exact_match for record in records),
            format=mean(record.format for record in records),
            f1=mean(record.f1 for record in records),
            search_calls=mean(record.search_calls for record in records),
            turns=mean(record.turns for record in records),
            void=voids,
            answer=records[0].answer if records else None,
        ),
        question=asked.question,
        references=asked.references,
        trajectories=records,
        search=_search_record(group),
    )


def summarise(records: Sequence[QuestionRecord]) -> dict[str, float]:
    """Return the summary of an evaluation by metric name, sorted."""
    answered = [record for record in records if record.result.samples]
    results = [record.result for record in answered]
    single = [trajectory for record in answered for trajectory in record.trajectories]
    voids = sum(record.result.void for record in records)
    by_source: dict[str, list[float]] = {}
    for result in results:
        by_source.setdefault(result.data_source or "unnamed", []).append(result.exact_match)
    by_name = {f"em/{source}": mean(values) for source, values in by_source.items()}
    well_formed = fsum(trajectory.format for trajectory in single)
    summary = {
        **by_name,
        "em/macro": mean(by_name.values()),
        "exact_match": mean(result.exact_match for result in results),
        "exact_match_of_well_formed": (
            fsum(trajectory.exact_match for trajectory in single) / well_formed if well_formed else 0.0
        ),
        "format": mean(result.format for result in results),
        "f1": mean(result.f1 for result in results),
        "reward": mean(trajectory.reward for trajectory in single),
        "rollout/search_calls": mean(result.search_calls for result in results),
        "rollout/turns": mean(result.turns for result in results),
        "rollout/no_search_rate": mean(float(trajectory.search_calls == 0) for trajectory in single),
        "rollout/void_rate": voids / (voids + len(single)) if voids + len(single) else 0.0,
        "questions": float(len(records)),
        "questions_void": float(len(records) - len(answered)),
        "trajectories": float(len(single)),
        "tokens_sampled": float(sum(trajectory.tokens_sampled for trajectory in single)),
    }
    return dict(sorted((summary | _search_summary(records)).items()))


def mean(values: Iterable[float]) -> float:
    """Return the mean, 0 of nothing."""
    kept = list(values)
    return fsum(kept) / len(kept) if kept else 0.0


def _trajectory_record(member: Trajectory, rule: Rule) -> TrajectoryRecord:
    scored = member.path[-1].reward
    assert scored is not None  # it ended and is not void
    parts = measures(member, rule) | scored.components
    return TrajectoryRecord(
        outcome=member.outcome.value,
        answer=member.ended.answer,
        text=member.ended.text,
        reward=scored.value,
        exact_match=parts["exact_match"],
        format=parts["format"],
        f1=parts["f1"],
        search_calls=search_calls(member.path),
        turns=len(member.path),
        tokens_sampled=sum(len(view_tokens(node.sample.tokens)) for node in member.path),
    )


def _searches(group: Group) -> list[Observed]:
    return [
        node.observation
        for tree in group.trees.values()
        for node in tree.nodes.values()
        if node.observation is not None and node.tool_call is not None and node.tool_call.tool == SEARCH
    ]


def _search_record(group: Group) -> SearchRecord:
    seen = _searches(group)
    return SearchRecord(
        statuses=dict(sorted(Counter(result.status for result in seen).items())),
        cached=sum(result.cached for result in seen),
        seconds=fsum(result.latency for result in seen if not result.cached),
    )


def _search_summary(records: Sequence[QuestionRecord]) -> dict[str, float]:
    status: Counter[str] = Counter()
    for record in records:
        status.update(record.search.statuses)
    calls = status.total()
    cached = sum(record.search.cached for record in records)
    good = sum(status[name] for name in FOUND)
    paid = calls - cached
    return {
        "search/calls": float(calls),
        "search/success_rate": good / calls if calls else 0.0,
        "search/error_rate": (calls - good) / calls if calls else 0.0,
        "search/empty_rate": status["empty"] / calls if calls else 0.0,
        "search/timeout": float(status[TIMEOUT]),
        "search/429": float(status[RATE_LIMITED]),
        "search/latency": fsum(record.search.seconds for record in records) / paid if paid else 0.0,
        "search/cache_hit": cached / calls if calls else 0.0,
    }
