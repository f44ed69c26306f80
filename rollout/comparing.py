"""Owns the comparison of evaluations of one set: a table, and paired bootstrap intervals.

Questions are resampled within their sources, the same ones for all evaluations, so that what makes a question
hard cancels out; a macro mean weighs every source alike. Questions that were void in any evaluation are left
out of all and counted.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from core.arrays import Float64
from core.choice import draw, uniform
from core.errors import ConfigError
from core.events import Evaluated, QuestionResult

DRAWS = 10_000
PICKS_AT_ONCE = 2_000_000
"""Questions picked before their means are taken: a source of 10,000 questions must not take gigabytes."""
LOW, HIGH = 2.5, 97.5
"""Percentiles of a 95 % interval."""


class Interval(msgspec.Struct, frozen=True):
    """A value with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class EvalRow(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation."""

    name: str
    policy_version: int
    weights_uri: str
    macro_em: Interval
    difference: Interval | None
    """Of macro exact match from the first evaluation; None for the first itself."""
    exact_match: float
    format: float
    f1: float
    search_calls: float
    by_source: dict[str, float]


class EvalComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluations of one set, the first being the reference."""

    questions: int
    left_out: int
    """Questions that were void in at least one of them."""
    rows: tuple[EvalRow, ...]
    asked_otherwise: dict[str, tuple[float | str | bool | None, ...]] = {}
    """Settings in which the evaluations differ → the value of each; part of any difference is theirs."""


def compare_evaluations(events: Sequence[Evaluated], seed: int = 0) -> EvalComparison:
    """Compare evaluations; raises ConfigError unless there are any, of one set and with usable questions."""
    _check(events)
    usable = _usable(events)
    if not usable:
        raise ConfigError("no question was answered in all of these evaluations: nothing can be compared")
    places = _places_by_source(events[0], usable)
    macro = np.mean([_resampled(events, chosen, seed, name) for name, chosen in places.items()], axis=0)
    first = _macro(events[0], places)
    rows = []
    for index, event in enumerate(events):
        value = _macro(event, places)
        difference = _interval(value - first, macro[index] - macro[0]) if index else None
        rows.append(_row(event, places, _interval(value, macro[index]), difference))
    return EvalComparison(
        questions=len(usable),
        left_out=len(events[0].results) - len(usable),
        rows=tuple(rows),
        asked_otherwise=_asked_otherwise(events),
    )


def comparison_lines(found: EvalComparison) -> list[str]:
    """Return the comparison as text."""
    width = max(len("evaluation"), *(len(row.name) for row in found.rows))
    left_out = f", {found.left_out} void ones left out" if found.left_out else ""
    head = (
        f"{'evaluation':<{width}}  {'policy':>6}  {'macro EM (95 %)':>22}  {'against the first (95 %)':>26}  "
        f"{'EM':>6}  {'format':>6}  {'F1':>6}  {'searches':>8}"
    )
    lines = [f"{found.questions} questions{left_out}", head]
    for row in found.rows:
        difference = "" if row.difference is None else _signed(row.difference)
        lines.append(
            f"{row.name:<{width}}  {row.policy_version:>6}  {_percent(row.macro_em):>22}  {difference:>26}  "
            f"{100 * row.exact_match:>5.1f}%  {100 * row.format:>5.1f}%  {100 * row.f1:>5.1f}%  "
            f"{row.search_calls:>8.2f}"
        )
    lines += [
        f"note: not asked alike: {name} {', '.join(map(str, values))}"
        for name, values in found.asked_otherwise.items()
    ]
    return lines


def _check(events: Sequence[Evaluated]) -> None:
    if not events:
        raise ConfigError("no evaluation to compare, expected at least one name")
    first = events[0]
    for event in events[1:]:
        if event.set_digest != first.set_digest:
            raise ConfigError(
                f"evaluations {first.name!r} and {event.name!r} asked different questions "
                f"({len(first.results)} and {len(event.results)}): compare evaluations of one set"
            )


def _asked_otherwise(events: Sequence[Evaluated]) -> dict[str, tuple[float | str | bool | None, ...]]:
    names = sorted({name for event in events for name in event.settings})
    told = {name: tuple(event.settings.get(name) for event in events) for name in names}
    return {name: values for name, values in told.items() if len(set(values)) > 1}


def _usable(events: Sequence[Evaluated]) -> list[int]:
    """Return the positions of the questions that were answered in every evaluation."""
    return [
        place
        for place in range(len(events[0].results))
        if all(event.results[place].samples for event in events)
    ]


def _places_by_source(event: Evaluated, usable: Sequence[int]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for place in usable:
        places.setdefault(event.results[place].data_source or "unnamed", []).append(place)
    return dict(sorted(places.items()))


def _resampled(events: Sequence[Evaluated], places: Sequence[int], seed: int, source: str) -> Float64:
    """Return the mean exact match of resampled questions of one source: float64 [evaluations, draws]."""
    scores = np.asarray([[event.results[place].exact_match for place in places] for event in events])
    at_once = max(PICKS_AT_ONCE // len(places), 1)
    parts = []
    for start in range(0, DRAWS, at_once):
        count = min(at_once, DRAWS - start)
        names = (source, start) if start else (source,)
        draws = draw(seed, "bootstrap", *names, count=count * len(places))
        chosen = uniform(draws, len(places)).reshape(count, len(places))
        parts.append(scores[:, chosen].mean(axis=2))
    return np.concatenate(parts, axis=1)


def _by_source(event: Evaluated, places: dict[str, list[int]]) -> dict[str, float]:
    return {
        source: _mean([event.results[place] for place in chosen], "exact_match")
        for source, chosen in places.items()
    }


def _macro(event: Evaluated, places: dict[str, list[int]]) -> float:
    return float(np.mean(list(_by_source(event, places).values())))


def _row(
    event: Evaluated, places: dict[str, list[int]], macro: Interval, difference: Interval | None
) -> EvalRow:
    results = [event.results[place] for chosen in places.values() for place in chosen]
    return EvalRow(
        name=event.name,
        policy_version=event.policy_version,
        weights_uri=event.weights_uri,
        macro_em=macro,
        difference=difference,
        exact_match=_mean(results, "exact_match"),
        format=_mean(results, "format"),
        f1=_mean(results, "f1"),
        search_calls=_mean(results, "search_calls"),
        by_source=_by_source(event, places),
    )


def _interval(value: float, draws: Float64) -> Interval:
    low, high = np.percentile(draws, [LOW, HIGH])
    return Interval(value, float(low), float(high))


def _mean(results: Sequence[QuestionResult], name: str) -> float:
    return float(np.mean([getattr(result, name) for result in results]))


def _percent(interval: Interval) -> str:
    return f"{100 * interval.value:.1f}% [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _signed(interval: Interval) -> str:
    return f"{100 * interval.value:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
