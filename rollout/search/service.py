"""Owns what stands between a tool and a back-end: the run's cache, and one request for equal queries at once.

A successful result is kept under (back-end, version, top_k, query) and never bought again. Faults are not
kept.
"""

import hashlib
import time
from typing import Protocol
from weakref import WeakValueDictionary

import anyio
import msgspec

from rollout.search.base import Backend, Found, Passage, Status


class Cache(Protocol):
    """Where the results of a run are kept (store.log.Log)."""

    def cache_get(self, key: bytes) -> bytes | None:
        """Return what was put under the key."""
        ...

    def cache_put(self, key: bytes, value: bytes) -> None:
        """Keep a value, without blocking."""
        ...


_DECODER = msgspec.msgpack.Decoder(tuple[Passage, ...])


class SearchService:
    """A back-end behind the run's cache."""

    def __init__(self, backend: Backend, top_k: int, cache: Cache | None = None) -> None:
        self.backend = backend
        self.top_k = top_k
        self._cache = cache
        self._asking: WeakValueDictionary[bytes, anyio.Lock] = WeakValueDictionary()

    def __repr__(self) -> str:
        cached = "cached" if self._cache is not None else "not cached"
        return f"<SearchService {self.backend.name}, top {self.top_k}, {cached}>"

    async def search(self, query: str) -> Found:
        """Return the best passages for a query, from the cache where it was asked before."""
        if self._cache is None:
            return await self.backend.search(query, self.top_k)
        started = time.monotonic()
        key = self._key(query)
        lock = self._asking.setdefault(key, anyio.Lock())
        async with lock:
            kept = self._cache.cache_get(key)
            if kept is not None:
                return _from_cache(_DECODER.decode(kept), time.monotonic() - started)
            result = await self.backend.search(query, self.top_k)
            if result.ok:
                self._cache.cache_put(key, msgspec.msgpack.encode(result.passages))
            return result

    def _key(self, query: str) -> bytes:
        parts = (self.backend.name, self.backend.version, str(self.top_k), query)
        return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).digest()


def _from_cache(passages: tuple[Passage, ...], latency: float) -> Found:
    status: Status = "success" if passages else "empty"
    return Found(ok=True, passages=passages, status=status, latency=latency, cached=True)
