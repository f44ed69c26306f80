"""Owns the seeds of sampling requests: pure functions of what is asked, so that one can be made again."""

import hashlib

SEED_BITS = 31

ROOT = "root"
"""Stands for the prompt itself where a parent node is named."""


def request_seed(run_seed: int, uid: str, tree: int, parent: str | None, ordinal: int) -> int:
    """Return the seed of one request, 0..2^31-1.

    `tree` 0 is the first turn, whose one request serves every tree of the group; `parent` None is the root;
    `ordinal` counts the requests made for that parent, from 0.
    """
    place = ROOT if parent is None else parent
    if tree:
        place = f"t{tree}/{place}"
    text = "\0".join(("rolltape.seed.v1", str(run_seed), uid, place, str(ordinal)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> (32 - SEED_BITS)


def derived_seed(run_seed: int, *names: str) -> int:
    """Return a seed for another purpose than training (an evaluation), apart from all others."""
    text = "\0".join(("rolltape.derived.v1", str(run_seed), *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
