"""Owns the run's cache of search results: its own table, fixed-length keys, no promises."""

import hashlib

import msgspec
import zstandard

from core.errors import LogDamaged
from store import codec
from store.compression import compress, decompress
from store.environment import Environment
from store.keys import Table
from store.snapshot import Change, Snapshot
from store.writer import Job, Plan


class Cached(msgspec.Struct, frozen=True, array_like=True):
    """One entry before compression, with its whole key against collisions."""

    key: bytes
    value: bytes


def get(environment: Environment, key: bytes) -> bytes | None:
    """Return what was cached under `key`, None when nothing was or it is damaged."""
    digest = hashlib.sha256(key).digest()
    with environment.read() as snapshot:
        stored = snapshot.get(Table.CACHE, digest)
    if stored is None:
        return None
    try:
        body = codec.unpack(Table.CACHE, digest, stored).body
        cached = msgspec.msgpack.decode(decompress(body), type=Cached)
    except (LogDamaged, zstandard.ZstdError):
        return None
    return cached.value if cached.key == key else None


def put_job(key: bytes, value: bytes) -> Job[None]:
    """Return the job that caches a value."""
    digest = hashlib.sha256(key).digest()
    stored = codec.pack(Table.CACHE, digest, compress(msgspec.msgpack.encode(Cached(key, value))))

    def job(_: Snapshot) -> Plan[None]:
        return Plan([Change(Table.CACHE, digest, stored)], None)

    return job
