"""Tickets and request seeds."""

import hashlib

import pytest

from core.errors import DataError
from rollout.seeds import derived_seed, request_seed
from rollout.tickets import Tickets


def test_every_epoch_hands_out_every_question_once() -> None:
    """Tickets wrap round; each epoch is another shuffle."""
    tickets = Tickets(3, 50)
    epochs = [[tickets.position(epoch * 50 + place) for place in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_ticket_does_not_depend_on_who_asks_or_when() -> None:
    """Any process gets the same question for a ticket, in any order of asking."""
    forward = Tickets(3, 7)
    backward = Tickets(3, 7)
    assert [forward.position(t) for t in range(40)] == [backward.position(t) for t in reversed(range(40))][
        ::-1
    ]
    assert [Tickets(4, 7).position(t) for t in range(40)] != [forward.position(t) for t in range(40)]


def test_shuffle_is_fixed_for_ever() -> None:
    """The order is part of the log's meaning: it must not change with a release of numpy or of ours."""
    tickets = Tickets(0, 8)
    assert [tickets.position(ticket) for ticket in range(16)] == EXPECTED_ORDER


EXPECTED_ORDER = [1, 7, 6, 3, 4, 0, 2, 5, 0, 5, 7, 3, 1, 6, 4, 2]


def test_no_questions_is_an_error() -> None:
    """Nothing can be handed out of nothing."""
    with pytest.raises(DataError, match="at least one"):
        Tickets(0, 0)


def test_request_seed_is_the_first_31_bits_of_a_sha256() -> None:
    """The seed is computed anew here, from its definition."""
    text = b"rolltape.seed.v1\x005\x00000001.0\x00t2/0.0.1\x003"
    bits = f"{int.from_bytes(hashlib.sha256(text).digest(), 'big'):0256b}"[:31]
    assert request_seed(5, "000001.0", 2, "0.0.1", 3) == int(bits, 2)


def test_request_seeds_differ_by_every_part() -> None:
    """Run seed, uid, tree, parent and ordinal each change the seed."""
    base = (5, "000001.0", 2, "0.0.1", 3)
    others = [(6, *base[1:]), (5, "000001.1", *base[2:]), (5, "000001.0", 1, *base[3:])]
    others += [(*base[:3], None, 3), (*base[:3], "0.0.2", 3), (*base[:4], 4)]
    seeds = {request_seed(*arguments) for arguments in [base, *others]}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_derived_seeds_stand_apart() -> None:
    """An evaluation's seed is another one than the run's."""
    assert derived_seed(0, "eval", "a") != derived_seed(0, "eval", "b") != 0
    assert 0 <= derived_seed(0, "eval", "a") < 2**63
