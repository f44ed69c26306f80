"""Owns a group's records before they are decoded, and their digest."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RawRecord(NamedTuple):
    """A group's record before decoding; (tree, position) is its identity."""

    tree: int
    position: int
    schema: int
    raw: bytes


def group_digest(records: Sequence[RawRecord]) -> str:
    """Return SHA-256 hex over a group's records in key order.

    Hashed are `rolltape.group.v1`, the trees, positions, schemas and sizes as u32 LE columns, then the bytes.
    """
    digest = hashlib.sha256(b"rolltape.group.v1")
    if records:
        trees, positions, schemas, raws = zip(*records, strict=True)
        digest.update(np.array((trees, positions, schemas, list(map(len, raws))), dtype="<u4").tobytes())
        digest.update(b"".join(raws))
    return digest.hexdigest()
