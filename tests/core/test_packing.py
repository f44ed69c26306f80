"""Micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import PackingSettings
from core.errors import ConfigError
from core.packing import pack

LIMITS = st.builds(
    PackingSettings,
    max_datums=st.integers(1, 8),
    max_datum_tokens=st.just(50),
    max_padded_tokens=st.integers(50, 300),
)


def test_longest_first_and_in_index_order_inside() -> None:
    """Lengths 9, 8 | 5, 5 | 3 under 2 datums of 20 padded tokens; equal lengths go by index."""
    limits = PackingSettings(max_datums=2, max_datum_tokens=10, max_padded_tokens=20)
    assert pack([5, 8, 3, 5, 9], limits) == ((1, 4), (0, 3), (2,))


def test_padded_tokens_are_count_times_longest() -> None:
    """Three datums of 1 token beside one of 10 are padded to 40."""
    limits = PackingSettings(max_datums=32, max_datum_tokens=10, max_padded_tokens=30)
    assert pack([1, 10, 1, 1], limits) == ((0, 1, 2), (3,))


def test_nothing_to_pack() -> None:
    """A step without signal has no micro-batch."""
    assert pack([], PackingSettings()) == ()


@given(st.lists(st.integers(0, 50), max_size=40), LIMITS)
def test_packing_keeps_every_limit_and_every_datum(lengths: list[int], limits: PackingSettings) -> None:
    """None is lost or doubled, no limit is broken, and the same input gives the same batches."""
    batches = pack(lengths, limits)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert 0 < len(batch) <= limits.max_datums
        assert len(batch) * longest <= limits.max_padded_tokens
    assert pack(lengths, limits) == batches


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), LIMITS)
def test_packing_is_first_fit_decreasing(lengths: list[int], limits: PackingSettings) -> None:
    """The same batches as the textbook's: longest first, each into the first batch with room."""
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for batch in bins:
            longest = max(lengths[i] for i in [*batch, index])
            if len(batch) < limits.max_datums and (len(batch) + 1) * longest <= limits.max_padded_tokens:
                batch.append(index)
                break
        else:
            bins.append([index])
    assert pack(lengths, limits) == tuple(tuple(sorted(batch)) for batch in bins)


@pytest.mark.parametrize(
    "limits",
    [
        PackingSettings(max_datums=4, max_datum_tokens=10, max_padded_tokens=100),
        PackingSettings(max_datums=4, max_datum_tokens=100, max_padded_tokens=10),
    ],
)
def test_a_datum_beyond_the_limits_is_said(limits: PackingSettings) -> None:
    """It cannot be sent, and must not be dropped."""
    with pytest.raises(ConfigError, match=r"datum 1 has 11 tokens, learner.packing allows 10: raise"):
        pack([3, 11], limits)
