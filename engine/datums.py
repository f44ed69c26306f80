"""Owns the way from arrays to `pytrio.Datum`, and the digests of what is handed to the SDK.

The SDK's constructors check every number several times (0.65 s for 64 datums of 8,191 tokens). The
arrays here are checked already, so the objects are built as the constructors would leave them; a
test compares the two. Digests are computed back from the finished objects: they say what the SDK
was given, not what we meant to give it.
"""

import gc
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pytrio
from pytrio.types.forward.encoded_text_chunk import EncodedTextChunk
from pytrio.types.forward.tensor_data import TensorData

from core.arrays import Float32, Int64
from core.datum import DatumArrays, datum_digest

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
    built = build_all(datums)
    return PreparedBatch(built, [datum_digest(arrays_of(datum)) for datum in built])


def build_all(datums: Sequence[DatumArrays]) -> list[pytrio.Datum]:
    """Return the `pytrio.Datum` of each example, as `build` does, unseen by the garbage collector."""
    enabled = gc.isenabled()
    # What is young garbage now would otherwise become old below, and hardly ever be collected.
    gc.collect(1)
    gc.disable()
    try:
        return [build(datum) for datum in datums]
    finally:
        # Both together move all objects to the oldest generation. Walked as young ones, millions of numbers
        # in lists took as long as making them; references free them, no collection does.
        gc.freeze()
        gc.unfreeze()
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
    filled = np.zeros(len(bits) + 2, dtype=np.bool_)
    np.not_equal(bits, 0, out=filled[1:-1])
    edges = np.flatnonzero(filled[1:] != filled[:-1]).reshape(-1, 2)
    for start, end in edges.tolist():
        same = bits[start] == bits[end - 1] and (bits[start:end] == bits[start]).all()
        piece = values[start:end]
        result[start:end] = [float(piece[0])] * (end - start) if same else piece.tolist()
    return result


def arrays_of(datum: pytrio.Datum) -> DatumArrays:
    """Return the arrays inside a finished `pytrio.Datum` of one text chunk, read-only."""
    (chunk,) = datum.model_input.chunks
    assert isinstance(chunk, EncodedTextChunk)
    given = datum.loss_fn_inputs
    targets = _packed(given["target_tokens"].data, "q")
    if chunk.tokens[1:] == given["target_tokens"].data[:-1]:
        # As nearly always. Comparing costs a third of packing once more.
        inputs = _packed(chunk.tokens[:1], "q") + targets[:-8]
    else:
        inputs = _packed(chunk.tokens, "q")
    return DatumArrays(
        inputs=np.frombuffer(inputs, dtype=np.int64),
        targets=np.frombuffer(targets, dtype=np.int64),
        logprobs=np.frombuffer(_packed(given["logprobs"].data, "f"), dtype=np.float32),
        advantages=np.frombuffer(_packed(given["advantages"].data, "f"), dtype=np.float32),
    )


def _packed(values: Sequence[float], code: str) -> bytes:
    """Return numbers as the processor's own bytes; struct needs half the time that numpy does."""
    return struct.pack(f"{len(values)}{code}", *values)


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
