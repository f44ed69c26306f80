"""Metrics of a step, by hand."""

import msgspec
import pytest

from core.batch import BatchSettings, build_step
from core.config import PackingSettings
from core.events import ChosenLeaf, Outcome
from core.tree import Group, members
from learner.metrics import GroupFacts, Metrics, step_metrics
from tests.building import Script, bush


def with_components(script: Script, tree: int, node: str, **components: float) -> None:
    """Give a leaf's reward its components."""
    for position, (at, event) in enumerate(script.records):
        if at == tree and getattr(event, "node", "") == node and type(event).__name__ == "Rewarded":
            script.records[position] = (at, msgspec.structs.replace(event, components=components))


def measured(*scored: tuple[Group, tuple[ChosenLeaf, ...]], staleness: tuple[int, ...] = (0,)) -> Metrics:
    """Return the metrics of a step of these groups."""
    batch = build_step(
        list(scored), BatchSettings(packing=PackingSettings(max_datums=2, max_datum_tokens=9000))
    )
    facts = [
        GroupFacts(group, members(group, chosen), age)
        for (group, chosen), age in zip(scored, staleness, strict=True)
    ]
    return step_metrics(facts, batch)


def searching() -> Script:
    """Return a group of three chains: right after a search, wrong without one, and ill-formed; and a void one."""
    script = Script(1, [1, 2, 3], data_source="hotpot")
    script.turn("0.0.0", None, [4, 5], tree=1).see("0.0.0", [6, 7, 8], tree=1)
    script.turn("0.0.1", "0.0.0", [9], tree=1).end("0.0.1", 1.0, tree=1)
    script.turn("0.0.0", None, [4, 5], tree=2).end("0.0.0", 0.0, tree=2)
    script.turn("0.0.0", None, [4, 5, 6, 7], tree=3)
    script.end("0.0.0", -0.1, tree=3, outcome=Outcome.BAD_FORMAT)
    script.turn("0.0.0", None, [4], tree=4).end("0.0.0", tree=4, outcome=Outcome.VOID_TOOL)
    with_components(script, 1, "0.0.1", exact_match=1.0, format=1.0)
    with_components(script, 2, "0.0.0", exact_match=0.0, format=1.0)
    with_components(script, 3, "0.0.0", exact_match=0.0, format=0.0)
    return script


def test_rewards_turns_and_outcomes_are_means_over_members() -> None:
    """Three members; the void trajectory is in no mean but in void_rate."""
    metrics = measured(searching().scored())
    assert metrics["reward/mean"] == pytest.approx(0.3)
    assert metrics["reward/correct"] == pytest.approx(1 / 3)
    assert metrics["reward/format"] == pytest.approx(2 / 3)
    assert metrics["reward/hotpot"] == pytest.approx(0.3)
    assert metrics["rollout/trajectories"] == 3
    assert metrics["rollout/turns"] == pytest.approx(4 / 3)
    assert metrics["rollout/search_calls"] == pytest.approx(1 / 3)
    assert metrics["rollout/trajectory_tokens"] == pytest.approx((9 + 5 + 7) / 3)
    assert metrics["rollout/longest_trajectory"] == 9
    assert metrics["rollout/tokens_sampled"] == 2 + 1 + 2 + 4 + 1
    assert metrics["rollout/valid_tool_call_rate"] == pytest.approx(1 / 2)
    assert metrics["rollout/void_rate"] == pytest.approx(1 / 4)
    assert metrics["rollout/degenerate_group_rate"] == 0
    assert metrics["outcome/answered"] == pytest.approx(2 / 3)
    assert metrics["outcome/bad_format"] == pytest.approx(1 / 3)


def test_leaves_are_counted_by_outcome_and_members_by_length() -> None:
    """Void leaves are counted too; a length that equals a bound belongs to it."""
    script = searching()
    for tree, length in ((5, 125), (6, 126), (7, 8189), (8, 8190)):
        script.turn("0.0.0", None, [4] * length, tree=tree).end("0.0.0", 1.0, tree=tree)
    metrics = measured(script.scored())
    counted = {name: value for name, value in metrics.items() if name.startswith("count/") and value}
    assert counted == {"count/answered": 6, "count/bad_format": 1, "count/void_tool": 1}
    assert len([name for name in metrics if name.startswith("count/")]) == len(Outcome)
    lengths = {name: value for name, value in metrics.items() if name.startswith("length/") and value}
    assert lengths == {
        "length/upto_0128": 4,
        "length/upto_0256": 1,
        "length/upto_8192": 1,
        "length/above_8192": 1,
    }


def test_training_counts_come_from_the_batch() -> None:
    """Lengths 8, 4 and 6; micro-batches of two, longest first: 2 × 8 and 1 × 4."""
    metrics = measured(searching().scored())
    assert metrics["train/members"] == 3
    assert metrics["train/datums"] == 3
    assert metrics["train/micro_batches"] == 2
    assert metrics["train/tokens"] == 8 + 4 + 6
    assert metrics["train/loss_tokens"] == 3 + 2 + 4
    assert metrics["train/padded_tokens"] == 2 * 8 + 1 * 4
    assert metrics["train/update_skipped"] == 0


def test_search_is_counted_by_status() -> None:
    """Rates are shares of all searches; latency is that of the searches that were made."""
    script = Script(1)
    for tree, (status, latency, cached) in enumerate(
        [
            ("success", 2.0, False),
            ("timeout", 4.0, False),
            ("rate_limited", 0.0, False),
            ("error", 6.0, False),
            ("empty", 0.0, True),
        ],
        start=1,
    ):
        script.turn("0.0.0", None, [4], tree=tree).see("0.0.0", [5], tree=tree)
        at, event = script.records[-1]
        changed = msgspec.structs.replace(event, status=status, latency=latency, cached=cached)
        script.records[-1] = (at, changed)
        script.turn("0.0.1", "0.0.0", [6], tree=tree).end("0.0.1", float(tree), tree=tree)
    metrics = measured(script.scored())
    counts = {name: metrics[f"search/{name}"] for name in ("calls", "success", "timeout", "429", "error")}
    assert counts == {"calls": 5, "success": 2, "timeout": 1, "429": 1, "error": 1}
    assert metrics["search/success_rate"] == pytest.approx(2 / 5)
    assert metrics["search/error_rate"] == pytest.approx(3 / 5)
    assert metrics["search/empty_rate"] == pytest.approx(1 / 5)
    assert metrics["search/latency"] == pytest.approx(3.0)
    assert metrics["search/cache_hit"] == pytest.approx(1 / 5)


def test_a_step_without_signal_says_so() -> None:
    """Nothing to send; the group counts as degenerate; its age is its own."""
    script = Script(1)
    for tree in (1, 2):
        script.turn("0.0.0", None, [4], tree=tree).end("0.0.0", 1.0, tree=tree)
    metrics = measured(script.scored(), staleness=(3,))
    assert metrics["train/update_skipped"] == 1
    assert metrics["rollout/degenerate_group_rate"] == 1
    assert metrics["staleness/max"] == 3


def test_trees_add_their_own_metrics() -> None:
    """One tree of four leaves; chains have no such metrics."""
    metrics = measured(bush((1.0, 0.0, 0.0, 1.0)).scored())
    assert metrics["tree/leaves_per_tree"] == 4
    assert metrics["tree/members_per_tree"] == 4
    assert metrics["tree/singleton_rate"] == 0
    assert metrics["tree/zero_std_rate"] == 0
    assert not any(name.startswith("tree/") for name in measured(searching().scored()))


def test_metrics_are_sorted_by_name() -> None:
    """So that two records of one step are the same bytes."""
    names = list(measured(searching().scored()))
    assert names == sorted(names)


def test_a_turn_that_was_never_sampled_is_a_void_end() -> None:
    """An engine that failed before a first turn and one that failed in the middle count as void, too."""
    script = searching()
    script.end("0.0.0", tree=5, outcome=Outcome.VOID_ENGINE)
    script.turn("0.0.0", None, [4], tree=6).see("0.0.0", [5], tree=6)
    script.end("0.0.1", tree=6, outcome=Outcome.VOID_ENGINE)
    metrics = measured(script.scored())
    assert metrics["rollout/void_rate"] == pytest.approx(3 / 6)
    assert (metrics["count/void_engine"], metrics["count/void_tool"]) == (2, 1)
