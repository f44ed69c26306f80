"""Owns how a step's datums are divided into micro-batches."""

from collections.abc import Sequence

from core.config import PackingSettings
from core.errors import ConfigError


def pack(lengths: Sequence[int], limits: PackingSettings) -> tuple[tuple[int, ...], ...]:
    """Return datum indices per micro-batch: first-fit decreasing, equal lengths in index order.

    A micro-batch holds at most max_datums, and at most max_padded_tokens as count × its longest. Because
    datums come longest first, only the newest micro-batch can have room, so that first fit means filling it.
    Raises ConfigError when a datum is longer than max_datum_tokens (or than a micro-batch).
    """
    longest = min(limits.max_datum_tokens, limits.max_padded_tokens)
    batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if lengths[index] > longest:
            raise ConfigError(
                f"datum {index} has {lengths[index]} tokens, learner.packing allows {longest}: raise "
                "max_datum_tokens and max_padded_tokens, or lower rollout.max_trajectory_tokens"
            )
        if not room:
            batches.append([])
            room = min(limits.max_datums, limits.max_padded_tokens // max(lengths[index], 1))
        batches[-1].append(index)
        room -= 1
    return tuple(tuple(sorted(batch)) for batch in batches)
