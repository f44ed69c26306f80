"""Owns the way from arrays to `pytrio.Datum`, and the digests of what is handed to the SDK.

The SDK's constructors check every number several times (0.65 s for 64 datums of 8,191 tokens). The
arrays here are checked already, so the objects are built as the constructors would leave them; a
test compares the two. Digests are computed back from the finished objects: they say what the SDK
was given, not what we meant to give it.
"""

import contextlib
import gc
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import pytrio
from numpy.typing import NDArray
from pytrio.types.forward.encoded_text_chunk import EncodedTextChunk
from pytrio.types.forward.tensor_data import TensorData

from core.arrays import Float32, Int64
from core.datum import DatumArrays, datum_digest

T = TypeVar("T", np.int64, np.float32)

DIGEST_METRIC = "payload_digest_"
DIGEST_WORDS = 8


class PreparedBatch(NamedTuple):
    """One micro-batch as it is handed to the SDK."""

    datums: list[pytrio.Datum]
    digests: list[str]
    """SHA-256 hex of each finished datum."""


class EngineReport(NamedTuple):
    """Metrics of an optimizer step with the engine's payload digest taken out."""

    metrics: dict[str, float]
    digest: str
    """SHA-256 hex, or "" when the service reports none."""


def prepare(datums: Sequence[DatumArrays]) -> PreparedBatch:
    """Return the SDK's objects and the digest of each. Arrays are int64 / float32 of one length."""
    with _no_collection():
        built = [build(datum) for datum in datums]
        return PreparedBatch(built, [datum_digest(arrays_of(datum)) for datum in built])


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from walking the lists being made: a third of the time, for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def build(arrays: DatumArrays) -> pytrio.Datum:
    """Return the `pytrio.Datum` of one example, equal to what the plain constructors make."""
    length = len(arrays.inputs)
    if length == 0 or any(len(values) != length for values in arrays):
        sizes = ", ".join(f"{len(values)}" for values in arrays)
        raise ValueError(f"a datum needs four arrays of one length above 0, got {sizes}")
    tokens, targets = _token_lists(arrays.inputs, arrays.targets)
    chunk = EncodedTextChunk.model_construct(_fields_set={"tokens"}, tokens=tokens, type="encoded_text")
    inputs = {
        "target_tokens": _tensor(targets, "int64"),
        "logprobs": _tensor(_floats(arrays.logprobs), "float32"),
        "advantages": _tensor(_floats(arrays.advantages), "float32"),
    }
    model_input = pytrio.ModelInput.model_construct(_fields_set={"chunks"}, chunks=[chunk])
    return pytrio.Datum.model_construct(
        _fields_set={"model_input", "loss_fn_inputs"},
        model_input=model_input,
        loss_fn_inputs=inputs,
    )


def _tensor(data: list[float] | list[int], dtype: str) -> TensorData:
    return TensorData.model_construct(
        _fields_set={"data", "dtype", "shape"}, data=data, dtype=dtype, shape=[len(data)]
    )


def _token_lists(inputs: Int64, targets: Int64) -> tuple[list[int], list[int]]:
    """Return both as lists; where targets are the inputs moved by one they share their numbers."""
    tokens: list[int] = inputs.tolist()
    if not np.array_equal(inputs[1:], targets[:-1]):
        return tokens, targets.tolist()
    moved = tokens[1:]
    moved.append(int(targets[-1]))
    return tokens, moved


def _floats(values: Float32) -> list[float]:
    """Return float32 values as a list; most are zeros or repeat, and those share one number."""
    result = [0.0] * len(values)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
    # By bits, so that a negative zero stays one.
    edges = np.flatnonzero(np.diff(bits != 0, prepend=False, append=False)).reshape(-1, 2)
    for start, end in edges.tolist():
        same = (bits[start:end] == bits[start]).all()
        piece = values[start:end]
        result[start:end] = [float(piece[0])] * (end - start) if same else piece.tolist()
    return result


def arrays_of(datum: pytrio.Datum) -> DatumArrays:
    """Return the arrays inside a finished `pytrio.Datum`, read-only."""
    inputs = datum.loss_fn_inputs
    tokens: list[int] = datum.model_input.to_ints()
    targets = inputs["target_tokens"].data
    if tokens[1:] == targets[:-1]:
        # As nearly always: packed once, with the one token that only the targets have.
        whole = _packed([*tokens, *targets[-1:]], "q", np.int64)
        moved, kept = whole[1:], whole[:-1]
    else:
        kept, moved = _packed(tokens, "q", np.int64), _packed(targets, "q", np.int64)
    return DatumArrays(
        inputs=kept,
        targets=moved,
        logprobs=_packed(inputs["logprobs"].data, "f", np.float32),
        advantages=_packed(inputs["advantages"].data, "f", np.float32),
    )


def _packed(values: Sequence[float], code: str, dtype: type[T]) -> NDArray[T]:
    """Return a list as an array; struct needs half the time that numpy does."""
    return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), dtype=dtype)


def engine_digest(metrics: Mapping[str, float]) -> EngineReport:
    """Return the step's metrics without the eight floats that carry the engine's digest, and it.

    A metric is a float; each holds 32 bits (big-endian words in order), which a float64 does exactly.
    """
    names = [f"{DIGEST_METRIC}{position}" for position in range(DIGEST_WORDS)]
    plain = {name: float(value) for name, value in metrics.items() if name not in names}
    if any(name not in metrics for name in names):
        return EngineReport(plain, "")
    words = [int(metrics[name]) for name in names]
    return EngineReport(plain, struct.pack(f">{DIGEST_WORDS}I", *words).hex())
