"""Identifiers, packed numbers, the frozen configuration, and what a run has cost."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays import pack_logprobs, pack_tokens, view_logprobs, view_tokens
from core.budget import Spent, add, exceeded, money
from core.config import BudgetSettings, Config, LearnerSettings, config_digest, from_plain, to_plain
from core.errors import FoldError
from core.events import GoalSet, GroupAborted, GroupClosed, Recovered, StepCommitted
from core.ids import make_node, make_tree_uid, make_uid, parse_node, parse_uid

NUMBERS = st.integers(0, 2**40)


@given(NUMBERS, st.integers(0, 99))
def test_uids_name_ticket_and_attempt(ticket: int, attempt: int) -> None:
    """A uid is read back to its numbers."""
    assert parse_uid(make_uid(ticket, attempt)) == (ticket, attempt)


def test_forms_of_identifiers() -> None:
    """The text forms that logs and messages show."""
    assert make_uid(123, 0) == "000123.0"
    assert make_tree_uid("000123.0", 2) == "000123.0/t2"
    assert make_node(1, 0, 2) == "1.0.2"


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS)))
def test_node_ids_sort_by_number(places: list[tuple[int, int, int]]) -> None:
    """The order of node ids is that of round, expansion and depth."""
    nodes = [make_node(*place) for place in places]
    assert [parse_node(node) for node in sorted(nodes, key=parse_node)] == sorted(places)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "a.0", "1.0.x", "-1.0"])
def test_what_is_no_uid(text: str) -> None:
    """Malformed uids are refused, with an example of a good one."""
    with pytest.raises(FoldError, match=r"not a uid: .*000123\.0"):
        parse_uid(text)


@pytest.mark.parametrize("text", ["", "0.0", "0.0.0.0", "0.0.x", "0.0.-1", "0.00.1", "01.0.1", " 0.0.1"])
def test_what_is_no_node_id(text: str) -> None:
    """Malformed node ids are refused, and second spellings of one."""
    with pytest.raises(FoldError, match=r"not a node id: .*0\.0\.1"):
        parse_node(text)


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    """int32 little-endian, four bytes each."""
    raw = pack_tokens(tokens)
    assert len(raw) == 4 * len(tokens)
    assert view_tokens(raw).tolist() == tokens
    assert raw == b"".join(token.to_bytes(4, "little") for token in tokens)


@given(st.lists(st.floats(width=32)))
def test_logprobs_survive_packing_to_the_bit(values: list[float]) -> None:
    """float32 little-endian; NaN and negative zero keep their bits."""
    raw = pack_logprobs(np.array(values, dtype=np.float32))
    assert view_logprobs(raw).tobytes() == raw
    assert raw == np.array(values, dtype="<f4").tobytes()


@pytest.mark.parametrize("tokens", [[-1], [2**31], [5, 2**40]])
def test_token_ids_out_of_range_are_refused(tokens: list[int]) -> None:
    """No id is cut to 32 bits silently."""
    with pytest.raises(OverflowError, match="token ids out of range"):
        pack_tokens(tokens)


@pytest.mark.parametrize("value", [-1e308, 1e39, -3.5e38])
def test_logprobs_out_of_range_are_refused(value: float) -> None:
    """No number becomes an infinity silently; an infinity stays one."""
    with pytest.raises(OverflowError, match="float32"):
        pack_logprobs([-0.5, value])
    assert view_logprobs(pack_logprobs([-np.inf])).tolist() == [-np.inf]


def test_views_cannot_be_written() -> None:
    """Stored bytes are the truth: a view of them is read-only."""
    with pytest.raises(ValueError, match="read-only"):
        view_tokens(pack_tokens([1]))[0] = 2


def test_configuration_survives_the_log() -> None:
    """What the run event stores gives the configuration back, with the same digest."""
    config = Config(learner=LearnerSettings(loss_config={"clip": 0.2}, estimator="tree"))
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(config)))
    assert from_plain(stored) == config
    assert config_digest(from_plain(stored)) == config_digest(config)
    assert config_digest(Config()) != config_digest(config)


def test_an_unknown_setting_is_no_configuration() -> None:
    """A stored key that this release does not know is an error, not a default."""
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        from_plain({"run": {"colour": "red"}})


EVENTS = [
    GoalSet(max_steps=3),
    GroupClosed(uid="000001.0", chosen=(), records=3, digest="", tokens_sampled=700_000, search_calls=3),
    GroupAborted(uid="000002.0", reason="late", tokens_sampled=300_000, search_calls=1),
    StepCommitted(step=0, skipped=False, policy_version=1, tokens_trained=400_000),
    Recovered(restored_uri="", restored_step=0, resent_steps=(0,), training_run="", tokens_trained=100_000),
]


def test_costs_are_folded_from_the_journal() -> None:
    """Closed and aborted groups were sampled, committed and re-sent steps were trained."""
    spent = Spent()
    for event in EVENTS:
        spent = add(spent, event)
    assert spent == Spent(tokens_sampled=1_000_000, tokens_trained=500_000, search_calls=4)
    prices = BudgetSettings(
        price_per_million_sampled=2.0, price_per_million_trained=3.0, price_per_search=0.25
    )
    assert money(spent, prices) == pytest.approx(2.0 + 1.5 + 1.0)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (BudgetSettings(), ""),
        (BudgetSettings(tokens_sampled=1_000_001, tokens_trained=2, search_calls=9), "budget.tokens_trained"),
        (BudgetSettings(tokens_sampled=1_000_000), "tokens_sampled is used up: 1,000,000 of 1,000,000"),
        (BudgetSettings(search_calls=4), "budget.search_calls is used up: 4 of 4"),
        (BudgetSettings(money=0.5, price_per_search=0.25), "budget.money is used up: 1 of 0.5"),
        (BudgetSettings(money=math.inf, price_per_search=0.25), ""),
    ],
)
def test_a_used_up_budget_is_named(limits: BudgetSettings, said: str) -> None:
    """0 is no limit; the first limit that is reached is named with both numbers."""
    found = exceeded(Spent(tokens_sampled=1_000_000, tokens_trained=500_000, search_calls=4), limits)
    assert said in found
    assert bool(said) == bool(found)
