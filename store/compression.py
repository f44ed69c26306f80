"""Owns zstd as the store uses it: one compressor per thread, for its objects may be used by one at a time."""

import threading

import zstandard

LEVEL = 6
"""A twentieth smaller than 3 for a third more time; higher levels cost many times as much for as little."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self.decompress = zstandard.ZstdDecompressor().decompress


_local = _Local()


def compress(content: bytes) -> bytes:
    """Return one zstd frame that names its size."""
    return _local.compress(content)


def decompress(frame: bytes) -> bytes:
    """Return what was compressed; raises zstandard.ZstdError on anything else."""
    return _local.decompress(frame)
