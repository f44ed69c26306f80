"""Owns the digests of datums and batches, which decide whether two steps are the same.

They hash numbers in a fixed order and width, never a dump of an object, never a clock.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from core.arrays import Float32, Int64
from core.events import AdamParams

DATUM_DOMAIN = b"rolltape.datum.v1"


def datum_digest(datum: tuple[Int64, Int64, Float32, Float32]) -> str:
    """Return SHA-256 hex of a datum (inputs, targets, logprobs, advantages), each [n].

    Hashed: the domain, n as u64, then the arrays as i64, i64, f32, f32, all little-endian.
    """
    inputs, targets, logprobs, advantages = datum
    sha = hashlib.sha256(DATUM_DOMAIN)
    sha.update(struct.pack("<Q", len(inputs)))
    sha.update(np.ascontiguousarray(inputs, dtype="<i8").data)
    sha.update(np.ascontiguousarray(targets, dtype="<i8").data)
    sha.update(np.ascontiguousarray(logprobs, dtype="<f4").data)
    sha.update(np.ascontiguousarray(advantages, dtype="<f4").data)
    return sha.hexdigest()


def payload_digest(micro_batches: Sequence[Sequence[str]]) -> str:
    """Return what the embedded engine must report after these micro-batches, given their datum digests.

    SHA-256 hex over, per micro-batch, its count as u64 LE and its datum digests in order. The engine
    computes it from what it received, with code of its own.
    """
    return _payloads(micro_batches).hexdigest()


def _payloads(micro_batches: Sequence[Sequence[str]]) -> "hashlib._Hash":
    sha = hashlib.sha256()
    for digests in micro_batches:
        sha.update(struct.pack("<Q", len(digests)))
        for digest in digests:
            sha.update(bytes.fromhex(digest))
    return sha


def batch_digest(
    micro_batches: Sequence[Sequence[str]], loss: str, loss_config: Mapping[str, float], adam: AdamParams
) -> str:
    """Return SHA-256 hex of a logical batch, given the datum digests of each micro-batch in sending order.

    Hashed: per micro-batch its count as u64 LE and its datum digests (32 bytes each), then loss, loss config
    and Adam params as JSON with sorted keys, in which every number is a float.
    """
    sha = _payloads(micro_batches)
    settings = {
        "adam": {name: float(value) for name, value in msgspec.structs.asdict(adam).items()},
        "loss": loss,
        "loss_config": {name: float(value) for name, value in loss_config.items()},
    }
    sha.update(msgspec.json.encode(settings, order="sorted"))
    return sha.hexdigest()
