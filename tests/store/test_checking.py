"""What may not be written to a group is refused with its node and its rule, and nothing of it is written."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays import pack_logprobs, pack_tokens
from core.errors import Conflict, StoreError
from core.events import GroupEvent, Observed, ReferenceScored
from store.checking import check_writes, problem_of
from store.keys import MAX_TREE
from store.ports import StreamWrite
from tests.store.making import asked, claim, open_run, sampled
from tests.strategies import GROUP_EVENT_TYPES, events_of

UID = "000000.0"
GOOD = sampled(0, tokens=4)
NEGATIVE = np.array([5, -3], dtype="<i4").tobytes()


def turn(**changes: object) -> GroupEvent:
    """Return a turn of four tokens with other values."""
    return msgspec.structs.replace(GOOD, **changes)


def logprobs(*values: float) -> bytes:
    """Return logprobs that nobody has looked at."""
    return np.array(values, dtype="<f4").tobytes()


def reference(raw: bytes) -> GroupEvent:
    """Return the base model's logprobs of a turn."""
    return ReferenceScored(node="0.0.0", logprobs=raw, base_model="b")


def seen(tokens: bytes, reset: bytes | None = None) -> GroupEvent:
    """Return an observation."""
    return Observed(node="0.0.0", content="", tokens=tokens, prompt_reset=reset)


BAD: list[tuple[int, GroupEvent, str]] = [
    (-1, GOOD, "tree -1"),
    (MAX_TREE + 1, GOOD, f"expected 0 to {MAX_TREE}"),
    (1, asked(UID), "in stream 0"),
    (0, asked("000007.0"), "'000007.0', expected that of '000000.0'"),
    (0, msgspec.structs.replace(asked(UID), prompt=bytes(5)), "prompt have 5 bytes"),
    (1, turn(tokens=bytes(15), sampled_logprobs=bytes(15)), "node 0.0.0 have 15 bytes, expected a multiple"),
    (1, turn(sampled_logprobs=bytes(12)), "have 12 bytes, expected 16, one logprob per token"),
    (1, turn(sampled_logprobs=logprobs(-1, 0.5, -1, -1)), "hold 0.5 at offset 1"),
    (1, turn(sampled_logprobs=logprobs(-1, -1, float("nan"), -1)), "hold nan at offset 2"),
    (1, turn(sampled_logprobs=logprobs(float("-inf"), -1, -1, -1)), "hold -inf at offset 0"),
    (1, seen(bytes(6)), "tokens of node 0.0.0 have 6 bytes"),
    (1, seen(b"", bytes(7)), "prompt_reset of node 0.0.0 have 7 bytes"),
    (1, reference(bytes(6)), "logprobs of node 0.0.0 have 6 bytes, expected a multiple of 4"),
    (1, reference(logprobs(-1.0, 2.0)), "hold 2.0 at offset 1"),
]


@pytest.mark.parametrize(("tree", "event", "says"), BAD)
def test_a_bad_record_is_refused_with_its_rule(
    tmp_path: Path, tree: int, event: GroupEvent, says: str
) -> None:
    """With it the whole request; the records before it in the request are not written either."""
    with open_run(tmp_path) as log:
        group = claim(log)
        good = StreamWrite(2, None, [GOOD])
        with pytest.raises(StoreError, match=r"group 000000\.0") as refused:
            log.groups.append_sync(group, [good, StreamWrite(tree, None, [event])])
        assert says in str(refused.value)
        assert log.groups.fetch(group.uid).records == ()
        log.groups.append_sync(group, [good])


def test_two_bad_lengths_do_not_make_a_good_one(tmp_path: Path) -> None:
    """Six bytes and two are not two logprobs."""
    with open_run(tmp_path) as log:
        group = claim(log)
        with pytest.raises(StoreError, match="have 6 bytes"):
            log.groups.append_sync(group, [StreamWrite(1, None, [reference(bytes(6)), reference(bytes(2))])])
        assert log.groups.fetch(group.uid).records == ()


def test_numbers_at_the_edge_are_taken(tmp_path: Path) -> None:
    """Zero, minus zero, a float32 whose square is none, and no number at all."""
    events = [
        turn(sampled_logprobs=logprobs(0.0, -0.0, -1e-45, -3.4e38)),
        turn(tokens=b"", sampled_logprobs=b""),
        turn(tokens=pack_tokens([0, 2**31 - 1]), sampled_logprobs=pack_logprobs([-1.0, -2.0])),
        seen(b"", b""),
        reference(b""),
    ]
    with open_run(tmp_path) as log:
        group = claim(log)
        log.groups.append_sync(group, [StreamWrite(MAX_TREE, None, events)])
        assert [record.event for record in log.groups.fetch(group.uid).records] == events


def test_what_is_wrong_with_stored_numbers_has_a_name() -> None:
    """`verify` also names negative ids, which `pack_tokens` keeps out of requests."""
    assert "tokens of node 0.0.0 hold the negative id -3" in problem_of(UID, 1, turn(tokens=NEGATIVE))
    assert "prompt hold the negative id -3" in problem_of(
        UID, 0, msgspec.structs.replace(asked(UID), prompt=NEGATIVE)
    )
    assert problem_of(UID, 1, GOOD) == ""


RAW = st.binary(max_size=9) | st.lists(st.floats(width=32), max_size=3).map(lambda values: logprobs(*values))
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=3).map(pack_tokens) | st.binary(max_size=5)
EVENTS: st.SearchStrategy[GroupEvent] = st.one_of(
    st.builds(reference, RAW),
    st.builds(lambda raw: turn(tokens=bytes(len(raw)), sampled_logprobs=raw), RAW),
    st.builds(lambda tokens, raw: turn(tokens=tokens, sampled_logprobs=raw), IDS, RAW),
    st.builds(seen, IDS, st.none() | IDS),
    st.builds(
        lambda raw, uid: msgspec.structs.replace(asked(uid), prompt=raw),
        IDS,
        st.sampled_from([UID, "000001.0"]),
    ),
    st.sampled_from(GROUP_EVENT_TYPES).flatmap(events_of),
)


@given(
    writes=st.lists(
        st.builds(
            StreamWrite,
            st.sampled_from([0, 0, 1, 2, -1]),
            st.none(),
            st.lists(EVENTS, min_size=1, max_size=3),
        ),
        max_size=3,
    )
)
def test_the_quick_look_refuses_what_the_slow_one_does(writes: Sequence[StreamWrite]) -> None:
    """All numbers of a request looked at together, or record by record: the same requests are refused."""
    problems = [problem_of(UID, tree, event) for tree, _, events in writes for event in events]
    bad = any(tree < 0 for tree, _, _ in writes)
    bad = bad or any(problem and "negative id" not in problem for problem in problems)
    try:
        check_writes(UID, writes)
    except StoreError:
        refused = True
    else:
        refused = False
    assert refused is bad


def test_positions_end_where_keys_do(tmp_path: Path) -> None:
    """A negative position is no position."""
    with open_run(tmp_path) as log:
        group = claim(log)
        with pytest.raises(Conflict, match="beyond the end"):
            log.groups.append_sync(group, [StreamWrite(1, -1, [GOOD])])


@pytest.mark.parametrize("uid", ["000000.65536", f"{2**64}.0"])
def test_numbers_that_nothing_can_have_are_an_error_of_ours(tmp_path: Path, uid: str) -> None:
    """Attempts, tickets, steps and positions beyond every key: a clear error, not that of a packer."""
    with open_run(tmp_path) as log:
        group = claim(log)._replace(uid=uid)
        uses = [
            lambda: log.group(uid),
            lambda: log.groups.fetch(uid),
            lambda: log.groups.append_sync(group, [StreamWrite(1, 0, [GOOD])]),
            lambda: log.groups.close_sync(group, (), 1.0),
            lambda: log.groups.take_over_sync(uid, "worker-2", 1.0),
            lambda: log.step(-1),
            lambda: log.plan(2**64),
            lambda: log.journal.get(-1),
            lambda: list(log.journal.read(-1)),
        ]
        for use in uses:
            with pytest.raises(StoreError, match="nothing in a log has the number"):
                use()
        for nothing in (lambda: log.step(7), lambda: log.journal.get(7), lambda: log.journal.schema(7)):
            with pytest.raises(StoreError, match="7"):
                nothing()
