"""Comparing evaluations of one set."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from core.errors import ConfigError
from core.events import Evaluated, QuestionResult
from rollout.comparing import compare_evaluations, comparison_lines
from rollout.drawing import draw_evaluations


def made(
    name: str,
    scores: list[float],
    *,
    digest: str = "set",
    void: tuple[int, ...] = (),
    settings: dict[str, float | str] | None = None,
) -> Evaluated:
    """Return an evaluation: the first half of the questions is nq, the rest hotpotqa."""
    results = tuple(
        QuestionResult(
            example_id=f"q{place}",
            data_source="nq" if place < len(scores) // 2 else "hotpotqa",
            samples=0 if place in void else 1,
            exact_match=score,
            format=1.0,
            f1=score,
        )
        for place, score in enumerate(scores)
    )
    return Evaluated(
        weights_uri="w",
        policy_version=1,
        set_digest=digest,
        settings=dict(settings or {}),
        results=results,
        summary={},
        name=name,
    )


def test_macro_weighs_sources_alike() -> None:
    """Nq 1 of 2, hotpotqa 2 of 2 (one left out as void in the other evaluation)."""
    one = made("one", [1.0, 0.0, 1.0, 1.0])
    other = made("other", [0.0, 0.0, 1.0, 0.0], void=(3,))
    found = compare_evaluations([one, other])
    assert (found.questions, found.left_out) == (3, 1)
    assert found.rows[0].by_source == {"hotpotqa": 1.0, "nq": 0.5}
    assert found.rows[0].macro_em.value == 0.75
    assert found.rows[0].exact_match == pytest.approx(2 / 3)
    assert found.rows[0].difference is None
    assert found.rows[1].difference is not None
    assert found.rows[1].difference.value == -0.25


def test_interval_is_that_of_the_mean() -> None:
    """For 200 coin flips in two sources the interval is about ± 1.96 · sqrt(p(1-p)/n)."""
    scores = [float(place % 2) for place in range(200)]
    interval = compare_evaluations([made("flips", scores)]).rows[0].macro_em
    half = 1.96 * (0.25 / 200) ** 0.5
    assert interval.value == 0.5
    assert interval.low == pytest.approx(0.5 - half, abs=0.01)
    assert interval.high == pytest.approx(0.5 + half, abs=0.01)


def test_pairing_cancels_what_is_common() -> None:
    """Right on the same questions but one better in each source: a narrow interval around the difference."""
    base = [float(place % 2) for place in range(200)]
    better = list(base)
    better[0] = better[100] = 1.0
    difference = compare_evaluations([made("base", base), made("better", better)]).rows[1].difference
    assert difference is not None
    assert difference.value == pytest.approx(0.01)
    assert difference.low >= 0.0
    assert difference.high < 0.03


def test_same_answers_differ_by_nothing() -> None:
    """An evaluation against itself: exactly zero, interval included."""
    scores = np.random.default_rng(0).integers(0, 2, 60).astype(float).tolist()
    difference = compare_evaluations([made("a", scores), made("b", scores)]).rows[1].difference
    assert difference is not None
    assert (difference.value, difference.low, difference.high) == (0.0, 0.0, 0.0)


def test_other_sets_and_nothing_usable_are_errors() -> None:
    """Different questions cannot be paired; neither can void ones."""
    with pytest.raises(ConfigError, match="different questions"):
        compare_evaluations([made("a", [1.0, 0.0]), made("b", [1.0, 0.0], digest="other")])
    with pytest.raises(ConfigError, match="no question"):
        compare_evaluations([made("a", [1.0, 0.0], void=(0, 1))])
    with pytest.raises(ConfigError, match="at least one"):
        compare_evaluations([])


def test_table_and_picture(tmp_path: Path) -> None:
    """Every evaluation has its line, and the picture is a PNG."""
    found = compare_evaluations([made("base", [1.0, 0.0, 0.0, 0.0]), made("step 20", [1.0, 1.0, 1.0, 0.0])])
    lines = comparison_lines(found)
    assert lines[0] == "4 questions"
    assert "25.0%" in lines[2]
    assert "+50.0 [" in lines[3]
    assert len({len(line) for line in lines[1:]}) == 1
    draw_evaluations(found, tmp_path / "eval.png")
    assert (tmp_path / "eval.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write"):
        draw_evaluations(found, tmp_path / "none" / "eval.png")


def test_evaluations_that_were_not_asked_alike_are_said_to_be_so() -> None:
    """Greedy against sampled is no comparison of weights alone; equal settings are not mentioned."""
    greedy = made("greedy", [1.0, 0.0], settings={"temperature": 0.0, "samples": 1, "search": "local"})
    sampled = made("sampled", [1.0, 0.0], settings={"temperature": 1.0, "samples": 4, "search": "local"})
    found = compare_evaluations([greedy, sampled])
    assert found.asked_otherwise == {"samples": (1, 4), "temperature": (0.0, 1.0)}
    assert comparison_lines(found)[-2:] == [
        "note: not asked alike: samples 1, 4",
        "note: not asked alike: temperature 0.0, 1.0",
    ]
    assert compare_evaluations([greedy, greedy]).asked_otherwise == {}


def test_a_large_set_is_compared_in_bounded_memory() -> None:
    """Four thousand questions of a source, ten thousand times resampled, take tens of megabytes."""
    scores = [float(place % 2) for place in range(8000)]
    tracemalloc.start()
    try:
        found = compare_evaluations([made("a", scores), made("b", scores)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200e6
    half = 1.96 * (0.25 / 8000) ** 0.5
    assert found.rows[0].macro_em.low == pytest.approx(0.5 - half, abs=0.002)
    assert found.rows[0].macro_em.high == pytest.approx(0.5 + half, abs=0.002)
