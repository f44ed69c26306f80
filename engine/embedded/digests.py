"""Owns the digest of what the engine received, computed from the wire payload alone.

It shares no code with the client's digests on purpose: that the two agree proves that what was
planned is what arrived. A SHA-256 leaves the engine as eight floats of 32 bits each, because the
SDK's optim_step metrics are a dict of floats, and a float64 holds 32 bits exactly.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np

from engine.embedded.wire import WireDatum

POLICY_DOMAIN = b"rolltape.datum.v1"
CROSS_ENTROPY_DOMAIN = b"rolltape.datum.cross_entropy.v1"
DIGEST_METRIC = "payload_digest_"


class Call:
    """The datums of one forward_backward call, which the SDK may send in several events."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.digests: list[bytes] = []


def datum_digest(datum: WireDatum) -> bytes:
    """Return the SHA-256 of one received datum: domain, n (u64), then its arrays, little-endian."""
    tokens = datum.model_input.tokens()
    policy = datum.logprobs is not None and datum.advantages is not None
    sha = hashlib.sha256(POLICY_DOMAIN if policy else CROSS_ENTROPY_DOMAIN)
    sha.update(struct.pack("<Q", len(tokens)))
    sha.update(np.asarray(tokens, dtype="<i8").tobytes())
    sha.update(np.asarray(datum.target_ids, dtype="<i8").tobytes())
    floats = (datum.logprobs, datum.advantages) if policy else (datum.weights,)
    for values in floats:
        sha.update(np.asarray(values or (), dtype="<f4").tobytes())
    return sha.digest()


def payload_digest(calls: Sequence[Call]) -> bytes:
    """Return the SHA-256 over, per call, its datum count (u64) and its datum digests in order."""
    sha = hashlib.sha256()
    for call in calls:
        sha.update(struct.pack("<Q", len(call.digests)))
        for digest in call.digests:
            sha.update(digest)
    return sha.digest()


def as_metrics(digest: bytes) -> dict[str, float]:
    """Return payload_digest_0..7, each the next 32 bits (big-endian) of `digest` as a float."""
    words = struct.unpack(">8I", digest)
    return {f"{DIGEST_METRIC}{position}": float(word) for position, word in enumerate(words)}
