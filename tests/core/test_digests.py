"""Digests of datums and batches, against bytes put together by hand."""

import hashlib
import struct

import numpy as np

from core.datum import DatumArrays
from core.digests import batch_digest, datum_digest, payload_digest
from core.events import AdamParams

DATUM = DatumArrays(
    inputs=np.array([1, 248044], dtype=np.int64),
    targets=np.array([248044, 2], dtype=np.int64),
    logprobs=np.array([0.0, -0.5], dtype=np.float32),
    advantages=np.array([0.0, 0.25], dtype=np.float32),
)
A, B, C = (hashlib.sha256(name).hexdigest() for name in (b"a", b"b", b"c"))
ADAM = AdamParams(learning_rate=1e-4)


def test_datum_digest_is_the_documented_bytes() -> None:
    """Domain, n, inputs, targets, logprobs, advantages; widths and byte order are fixed."""
    expected = b"rolltape.datum.v1" + struct.pack("<Q", 2)
    expected += struct.pack("<4q", 1, 248044, 248044, 2) + struct.pack("<4f", 0.0, -0.5, 0.0, 0.25)
    assert datum_digest(DATUM) == hashlib.sha256(expected).hexdigest()


def test_datum_digest_is_pinned() -> None:
    """Logs hold these digests, so they never change."""
    assert datum_digest(DATUM) == "0003c2d289f82a88785c4af09d27b53c9ee979038b8f3de7e9f29b4cc95a130b"


def test_every_field_counts() -> None:
    """One changed bit anywhere changes the digest, a negative zero too."""
    seen = {datum_digest(DATUM)}
    for field, values in DATUM._asdict().items():
        for position in range(2):
            changed = values.copy()
            changed.view(np.uint8)[position * changed.itemsize] ^= 1
            seen.add(datum_digest(DATUM._replace(**{field: changed})))
    seen.add(datum_digest(DATUM._replace(logprobs=np.array([-0.0, -0.5], dtype=np.float32))))
    assert len(seen) == 10


def test_batch_digest_is_the_documented_bytes() -> None:
    """Per micro-batch its count and digests, then settings as sorted JSON with floats only."""
    settings = (
        b'{"adam":{"beta1":0.9,"beta2":0.95,"eps":1e-12,"grad_clip_norm":0.0,"learning_rate":0.0001,'
        b'"weight_decay":0.0},"loss":"ppo","loss_config":{"a":1.0,"clip":0.2}}'
    )
    framed = struct.pack("<Q", 2) + bytes.fromhex(A + B) + struct.pack("<Q", 1) + bytes.fromhex(C)
    found = batch_digest([[A, B], [C]], "ppo", {"clip": 0.2, "a": 1}, ADAM)
    assert found == hashlib.sha256(framed + settings).hexdigest()
    assert payload_digest([[A, B], [C]]) == hashlib.sha256(framed).hexdigest()


def test_batch_digest_sees_order_split_and_settings() -> None:
    """Other order, other micro-batches, a dropped one, other loss or Adam: another digest."""
    variants = [
        batch_digest([[A, B], [C]], "ppo", {}, ADAM),
        batch_digest([[B, A], [C]], "ppo", {}, ADAM),
        batch_digest([[A], [B, C]], "ppo", {}, ADAM),
        batch_digest([[A, B]], "ppo", {}, ADAM),
        batch_digest([[A, B], [C], []], "ppo", {}, ADAM),
        batch_digest([[A, B], [C]], "cispo", {}, ADAM),
        batch_digest([[A, B], [C]], "ppo", {"clip": 0.2}, ADAM),
        batch_digest([[A, B], [C]], "ppo", {}, AdamParams(learning_rate=2e-4)),
    ]
    assert len(set(variants)) == len(variants)
