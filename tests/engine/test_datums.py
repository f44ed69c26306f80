"""The fast way to `pytrio.Datum` gives what the plain constructors give, and is digested as sent."""

import gc
import hashlib
import struct
import weakref

import numpy as np
import pytest
import pytrio
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from core.datum import DatumArrays, datum_digest
from core.digests import payload_digest
from engine.datums import arrays_of, build, build_all, engine_digest, prepare

# Threads of the SDK, left by other tests of the process, draw their retry jitter from `random`.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

TOKEN = st.integers(0, 2**31 - 1)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def datums(draw: st.DrawFn) -> DatumArrays:
    """Datums whose targets are the inputs moved by one, or not; with zeros in runs, or not."""
    length = draw(st.integers(1, 40))
    tokens = draw(hnp.arrays(np.int64, length + 1, elements=TOKEN))
    targets = tokens[1:]
    if draw(st.booleans()):
        targets = draw(hnp.arrays(np.int64, length, elements=TOKEN))
    values = [draw(hnp.arrays(np.float32, length, elements=FLOATS)) for _ in range(2)]
    mask = draw(hnp.arrays(np.bool_, length))
    if draw(st.booleans()):
        values = [np.where(mask, value, np.float32(0)) for value in values]
    if draw(st.booleans()):
        values[1] = np.where(mask, values[1][0], np.float32(-0.0)).astype(np.float32)
    return DatumArrays(tokens[:-1], targets, *values)


def plain(arrays: DatumArrays) -> pytrio.Datum:
    """Return what the SDK's own constructors make."""
    return pytrio.Datum(
        model_input=pytrio.ModelInput.from_ints(arrays.inputs.tolist()),
        loss_fn_inputs={
            "target_tokens": arrays.targets,
            "logprobs": arrays.logprobs,
            "advantages": arrays.advantages,
        },
    )


@given(datums())
def test_fast_datums_equal_plain_ones(arrays: DatumArrays) -> None:
    """Objects, dumps, types and the sets of given fields are the same; the arrays come out again."""
    fast, slow = build(arrays), plain(arrays)
    assert fast == slow
    assert repr(fast) == repr(slow), "a negative zero is equal to zero but not the same"
    assert fast.model_dump() == slow.model_dump()
    for one, two in (
        (fast, slow),
        (fast.model_input, slow.model_input),
        (fast.model_input.chunks[0], slow.model_input.chunks[0]),
        *((fast.loss_fn_inputs[key], slow.loss_fn_inputs[key]) for key in slow.loss_fn_inputs),
    ):
        assert one.model_fields_set == two.model_fields_set
        assert type(one) is type(two)
    assert {type(x) for x in fast.loss_fn_inputs["logprobs"].data} == {float}
    assert {type(x) for x in fast.loss_fn_inputs["target_tokens"].data} == {int}
    for given_, back in zip(arrays, arrays_of(fast), strict=True):
        assert given_.tobytes() == back.tobytes()
    assert prepare([arrays]).digests == [datum_digest(arrays)]


@pytest.mark.parametrize("enabled", [True, False])
def test_many_datums_are_made_as_one_and_leave_the_collector_as_it_was(*, enabled: bool) -> None:
    """Also when one of them is refused; nothing stays out of a full collection."""
    good = DatumArrays(np.arange(3), np.arange(3), np.zeros(3, np.float32), np.ones(3, np.float32))
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert build_all([good, good]) == [build(good), build(good)]
        assert gc.isenabled() is enabled
        with pytest.raises(ValueError, match="one length"):
            build_all([good, good._replace(inputs=np.arange(2))])
        assert gc.isenabled() is enabled
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if was else gc.disable)()


def test_the_digest_is_of_the_finished_object() -> None:
    """Changing what is handed to the SDK changes the digest, bit by bit as defined."""
    arrays = DatumArrays(np.array([1, 2]), np.array([2, 3]), np.float32([0, -0.5]), np.float32([0, 1.5]))
    expected = hashlib.sha256(
        b"rolltape.datum.v1"
        + struct.pack("<Q", 2)
        + struct.pack("<4q", 1, 2, 2, 3)
        + struct.pack("<4f", 0, -0.5, 0, 1.5)
    ).hexdigest()
    (datum,), digests = prepare([arrays])
    assert digests == [expected]
    datum.loss_fn_inputs["advantages"].data[1] = -1.5
    assert datum_digest(arrays_of(datum)) != expected


class Node:
    """Garbage that only the collector frees."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_does_not_become_old_with_the_datums() -> None:
    """What was young garbage when a batch was built is gone; a learner of thousands of steps stays as small."""
    arrays = DatumArrays(np.arange(2), np.arange(2), np.zeros(2, np.float32), np.zeros(2, np.float32))
    gone = weakref.ref(Node())
    assert gone() is not None
    build_all([arrays])
    assert gone() is None


def test_unequal_or_empty_arrays_are_refused() -> None:
    """A datum needs four arrays of one length; the lengths are named."""
    good = DatumArrays(np.arange(2), np.arange(2), np.zeros(2, np.float32), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="2, 1, 2, 2"):
        build(good._replace(targets=np.arange(1)))
    empty = DatumArrays(*(values[:0] for values in good))
    with pytest.raises(ValueError, match="above 0"):
        build(empty)


def test_the_engine_digest_travels_in_floats() -> None:
    """Eight floats of 32 bits give the digest back; without them there is none."""
    digest = hashlib.sha256(b"x").digest()
    metrics = {f"payload_digest_{i}": float(w) for i, w in enumerate(struct.unpack(">8I", digest))}
    assert engine_digest({"grad_norm": 1.0} | metrics) == ({"grad_norm": 1.0}, digest.hex())
    assert engine_digest({"grad_norm": 1.0}) == ({"grad_norm": 1.0}, "")
    del metrics["payload_digest_3"]
    assert engine_digest(metrics).digest == ""


def test_the_payload_digest_depends_on_the_cut_into_calls() -> None:
    """Order and micro-batch borders count."""
    a, b = hashlib.sha256(b"a").hexdigest(), hashlib.sha256(b"b").hexdigest()
    cuts = [[[a, b]], [[b, a]], [[a], [b]], [[a, b], []], []]
    assert len({payload_digest(cut) for cut in cuts}) == len(cuts)
