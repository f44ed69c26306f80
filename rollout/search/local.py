"""Owns the local back-end: BM25 over a JSONL corpus, deterministic and offline."""

import os
import time
from pathlib import Path

import anyio

from rollout.search.base import MAX_CONTENT_CHARS, Found, Passage, clean, found
from rollout.search.index import Index, Notify, open_index


class LocalSearch:
    """Searches an open index off the event loop."""

    name = "local"

    def __init__(self, index: Index) -> None:
        self._index = index

    def __repr__(self) -> str:
        return f"<LocalSearch {self._index!r}>"

    @property
    def version(self) -> str:
        """The corpus's SHA-256."""
        return self._index.digest

    async def search(self, query: str, top_k: int) -> Found:
        """Return the best passages; ties stand in the order of their ids."""
        started = time.monotonic()
        hits = await anyio.to_thread.run_sync(self._index.search, query, top_k)
        passages = [
            Passage(content=clean(hit.passage.content, MAX_CONTENT_CHARS), id=hit.passage.id, score=hit.score)
            for hit in hits
        ]
        return _timed(found(passages, top_k), started)

    async def aclose(self) -> None:
        """Nothing is held but a memory map."""


def _timed(result: Found, started: float) -> Found:
    return Found(
        ok=result.ok, passages=result.passages, status=result.status, latency=time.monotonic() - started
    )


def open_local(corpus: Path, spare_root: Path, notify: Notify) -> LocalSearch:
    """Return the back-end for a corpus; its index is cached for the user, or in `spare_root` if that fails.

    Raises DataError when the corpus cannot be read.
    """
    root = cache_root() / "bm25"
    writable = next(folder for folder in (root, *root.parents) if folder.is_dir())
    return LocalSearch(open_index(corpus, root if os.access(writable, os.W_OK) else spare_root, notify))


def cache_root() -> Path:
    """Return the cache folder: $ROLLTAPE_CACHE, else rolltape in $XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("ROLLTAPE_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rolltape"
