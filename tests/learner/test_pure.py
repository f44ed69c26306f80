"""The learner's pure parts: schedules, selection, evidence, budgets, estimates."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.budget import Spent, add, exceeded, money
from core.config import BudgetSettings, Config, LearnerSettings, RolloutSettings
from core.datum import DatumArrays
from core.events import GroupAborted, GroupClosed, Plan, Recovered, StepCommitted
from learner import evidence
from learner.estimate import estimate, estimate_lines
from learner.evidence import Located
from learner.schedule import learning_rate
from learner.selection import Rule, decide
from learner.weights import keeps, lifetime, superseded
from store.ports import GroupFate, GroupRow, PolicyRow

RULE = Rule(groups_per_step=2, max_staleness=1, group_deadline=10.0)


def row(ticket: int, fate: GroupFate = GroupFate.CLOSED, opened_at_step: int = 5) -> GroupRow:
    """Return a group's row."""
    return GroupRow(
        uid=f"{ticket:06d}.0",
        ticket=ticket,
        attempt=0,
        owner=1,
        worker="w",
        policy_version=0,
        weights_uri="",
        opened_at_step=opened_at_step,
        fate=fate,
    )


def uids(rows: tuple[GroupRow, ...]) -> list[int]:
    """Return tickets."""
    return [one.ticket for one in rows]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ],
)
def test_schedules_rise_over_the_warm_up_and_fall_to_the_goal(schedule: str, expected: list[float]) -> None:
    """Two steps of warm-up, then four to the goal."""
    settings = LearnerSettings(learning_rate=1.0, schedule=schedule, warmup_steps=2)
    assert [learning_rate(settings, step, 6) for step in range(6)] == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_whole_rate() -> None:
    """And beyond a goal that was reached nothing becomes negative."""
    settings = LearnerSettings(learning_rate=0.25, schedule="linear")
    assert learning_rate(settings, 0, 4) == 0.25
    assert learning_rate(settings, 9, 4) == 0.0


def test_the_lowest_tickets_are_waited_for_even_when_later_ones_are_ready() -> None:
    """Taking the first to finish would favour short trajectories."""
    rows = [row(0), row(1, GroupFate.OPEN), row(2), row(3)]
    decision = decide(rows, 5, RULE, {})
    assert decision.ready == ()
    assert uids(decision.waiting) == [1]


def test_a_whole_step_is_taken_in_ticket_order() -> None:
    """Whatever order the rows come in."""
    assert uids(decide([row(7), row(3), row(4)], 5, RULE, {}).ready) == [3, 4]


def test_too_old_groups_leave_and_the_next_ticket_moves_up() -> None:
    """Staleness counts from the steps committed when the group was opened."""
    rows = [row(0, opened_at_step=3), row(1, GroupFate.OPEN, opened_at_step=3), row(2), row(3)]
    decision = decide(rows, 5, RULE, {})
    assert uids(decision.too_old) == [0, 1]
    assert uids(decision.ready) == [2, 3]


def test_offline_no_group_is_too_old() -> None:
    """Recorded rollouts are trained again, however old."""
    rule = RULE._replace(max_staleness=None)
    assert uids(decide([row(0, opened_at_step=0), row(1)], 99, rule, {}).ready) == [0, 1]


def test_an_aborted_ticket_is_waited_for_until_it_is_opened_again() -> None:
    """It is neither too old nor late while nobody has it."""
    decision = decide([row(0, GroupFate.ABORTED, opened_at_step=0), row(1)], 5, RULE, {"000000.0": 99.0})
    assert (decision.ready, decision.too_old, decision.late) == ((), (), ())
    assert uids(decision.waiting) == [0]


def test_only_open_groups_that_were_waited_for_long_enough_are_late() -> None:
    """The deadline counts from when the step began to wait for the group."""
    rows = [row(0, GroupFate.OPEN), row(1, GroupFate.OPEN)]
    assert uids(decide(rows, 5, RULE, {"000000.0": 10.0, "000001.0": 9.9}).late) == [0]


VALUES = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_the_sums_of_a_row_are_the_documented_bytes(values: list[int]) -> None:
    """Σ v_i and Σ (i + 1) v_i modulo 2^64, by Python's own numbers; plans hold them for ever."""
    plain, weighted = sum(values) % 2**64, sum((i + 1) * v for i, v in enumerate(values)) % 2**64
    expected = plain.to_bytes(8, "little") + weighted.to_bytes(8, "little")
    assert evidence.sums(np.array(values, dtype=np.uint64)) == expected


@given(VALUES, st.data())
def test_one_altered_value_is_located_with_its_original(values: list[int], data: st.DataObject) -> None:
    """Any value at any place, from 16 bytes of sums."""
    row_ = np.array(values, dtype=np.uint64)
    place = data.draw(st.integers(0, len(values) - 1))
    new = data.draw(st.integers(0, 2**32 - 1).filter(lambda value: value != values[place]))
    altered = row_.copy()
    altered[place] = new
    assert Located(place, values[place]) in evidence.locate(evidence.sums(row_), altered)


@given(VALUES)
def test_an_unaltered_row_has_nothing_to_locate(values: list[int]) -> None:
    """Equal sums, no finding."""
    row_ = np.array(values, dtype=np.uint64)
    assert evidence.locate(evidence.sums(row_), row_) == []


@given(st.lists(st.floats(allow_nan=False, width=64), min_size=1, max_size=64), st.data())
def test_one_altered_reward_is_located_with_its_original(rewards: list[float], data: st.DataObject) -> None:
    """Round numbers too, whose float64 bits differ only in the highest places."""
    old = np.array(rewards)
    place = data.draw(st.integers(0, len(rewards) - 1))
    new = old.copy()
    new[place] = data.draw(st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, -0.1]))
    if old[place].tobytes() == new[place].tobytes():
        return
    found = evidence.locate(evidence.sums(evidence.reward_view(old)), evidence.reward_view(new))
    assert place in {hit.offset for hit in found}
    value = next(evidence.unview_reward(hit.recorded) for hit in found if hit.offset == place)
    assert np.float64(value).tobytes() == old[place].tobytes()


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.floats(width=32, allow_nan=False))
def test_the_one_value_of_all_trained_tokens_is_recovered(mask: list[bool], value: float) -> None:
    """An advantage per leaf stands at every trained token of its datum."""
    trained = np.array(mask)
    values = np.where(trained, np.float32(value), np.float32(0))
    found = evidence.constant(evidence.sums(evidence.float_view(values)), trained)
    if not trained.any():
        assert found is None
    else:
        assert found is not None
        assert np.float32(evidence.unview_float(found)).tobytes() == np.float32(value).tobytes()


def test_tokens_are_seen_as_the_whole_segment() -> None:
    """The first token stands in no target, the last in no input."""
    datum = DatumArrays(np.array([5, 6]), np.array([6, 7]), np.zeros(2, np.float32), np.zeros(2, np.float32))
    assert evidence.token_view(datum).tolist() == [5, 6, 7]


def test_spending_counts_closed_and_given_up_groups_and_what_was_sent_again() -> None:
    """Everything that was paid for, whatever became of it."""
    spent = Spent()
    for event in (
        GroupClosed(uid="000000.0", chosen=(), records=1, digest="", tokens_sampled=100, search_calls=3),
        GroupAborted(uid="000001.0", reason="x", tokens_sampled=20, search_calls=1),
        StepCommitted(step=0, skipped=False, policy_version=1, tokens_trained=500),
        Recovered(restored_uri="", restored_step=0, resent_steps=(0,), training_run="", tokens_trained=500),
    ):
        spent = add(spent, event)
    assert spent == Spent(tokens_sampled=120, tokens_trained=1000, search_calls=4)


@pytest.mark.parametrize(
    ("budget", "named"),
    [
        (BudgetSettings(), ""),
        (BudgetSettings(tokens_sampled=1001), ""),
        (BudgetSettings(tokens_sampled=1000), "budget.tokens_sampled"),
        (BudgetSettings(tokens_trained=10), "budget.tokens_trained"),
        (BudgetSettings(search_calls=2), "budget.search_calls"),
        (BudgetSettings(money=1.0, price_per_million_sampled=1000.0), "budget.money"),
    ],
)
def test_a_budget_ends_where_it_is_reached_and_is_named(budget: BudgetSettings, named: str) -> None:
    """0 is no limit."""
    assert exceeded(Spent(1000, 10, 2), budget).startswith(named)
    assert bool(exceeded(Spent(1000, 10, 2), budget)) == bool(named)


def test_money_is_the_sum_over_the_three_prices() -> None:
    """Two prices per million tokens, one per search."""
    budget = BudgetSettings(
        price_per_million_sampled=2.0, price_per_million_trained=4.0, price_per_search=0.5
    )
    assert money(Spent(1_000_000, 500_000, 3), budget) == pytest.approx(2.0 + 2.0 + 1.5)


CHAINS = Plan(mode="chain", group_size=4)
CONFIG = Config(rollout=RolloutSettings(group_size=4), learner=LearnerSettings(groups_per_step=2))


def test_an_estimate_before_the_first_step_is_the_most_that_the_limits_allow() -> None:
    """2 steps of 2 groups of 4 trajectories; 6 turns of 1,024 tokens, 8,192 a trajectory, 4 searches."""
    found = estimate(CONFIG, CHAINS, 2)
    assert (found.groups, found.trajectories, found.measured) == (4, 16, False)
    assert found.tokens_sampled == 16 * 6 * 1024
    assert found.tokens_trained == 16 * 8192
    assert found.search_calls == 16 * 4


def test_an_estimate_after_a_step_is_what_steps_have_cost_so_far() -> None:
    """Per group and per step."""
    history = [
        GroupClosed(uid="000000.0", chosen=(), records=1, digest="", tokens_sampled=90, search_calls=6),
        GroupClosed(uid="000001.0", chosen=(), records=1, digest="", tokens_sampled=110, search_calls=2),
        StepCommitted(step=0, skipped=False, policy_version=1, tokens_trained=700),
    ]
    found = estimate(CONFIG, CHAINS, 3, history)
    assert (found.tokens_sampled, found.tokens_trained, found.search_calls) == (600, 2100, 24)
    assert "from this run so far" in estimate_lines(found)[0]


def test_saved_evaluated_and_last_weights_are_kept_for_good() -> None:
    """All others live a day, or four deadlines if that is longer."""
    learner = LearnerSettings(save_every=4, eval_every=3, group_deadline=3600.0)
    assert [step for step in range(1, 11) if keeps(learner, step, 10)] == [3, 4, 6, 8, 9, 10]
    assert lifetime(learner, 4, 10) is None
    assert lifetime(learner, 5, 10) == 86_400
    slow = LearnerSettings(group_deadline=36_000.0)
    assert lifetime(slow, 1, 10) == 144_000


def test_weights_are_superseded_unless_current_pinned_or_kept() -> None:
    """The base model has no URI and is never deleted."""
    policies = [
        PolicyRow(policy_version=version, weights_uri=uri, step=version, index=version)
        for version, uri in enumerate(["", "one", "two", "three", "four"])
    ]
    assert superseded(policies, pinned=["two"], kept=["three"]) == {"one"}
