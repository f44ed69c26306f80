"""Owns the choice of a search back-end from the settings."""

import os
from pathlib import Path

from core.config import SearchSettings
from core.errors import ConfigError
from rollout.search import wikipedia, zhihu
from rollout.search.base import Backend
from rollout.search.http import HttpService, is_address
from rollout.search.index import Notify
from rollout.search.keys import find_keys
from rollout.search.local import open_local
from rollout.search.none import NoSearch
from rollout.search.retrieval import Retrieval
from rollout.search.wikipedia import Wikipedia
from rollout.search.zhihu import Zhihu

WORLD = "world"


def build_backend(settings: SearchSettings, run_dir: Path, notify: Notify) -> Backend:
    """Return the back-end; the corpus "world" is run_dir/world/corpus.jsonl.

    Raises ConfigError when something needed is not set, DataError when the corpus cannot be read.
    """
    match settings.backend:
        case "none":
            return NoSearch()
        case "local":
            if not settings.corpus:
                raise ConfigError("setting 'tools.search.corpus' is empty, expected a JSONL file or 'world'")
            named = Path(settings.corpus)
            corpus = run_dir / WORLD / "corpus.jsonl" if settings.corpus == WORLD else named
            return open_local(corpus, run_dir / "search-index", notify)
        case "zhihu":
            return Zhihu(find_keys(os.environ, Path(".env")), _service(settings, zhihu.URL))
        case "wikipedia":
            return Wikipedia(_service(settings, wikipedia.URL))
        case "retrieval":
            return Retrieval(_service(settings, settings.url))


def check_address(settings: SearchSettings) -> None:
    """Raise ConfigError when the server's address is missing where it is needed, or is none."""
    if settings.backend == "retrieval" and not settings.url:
        raise ConfigError(
            "search back-end 'retrieval' needs the server's address: "
            "--set tools.search.url=http://127.0.0.1:8000/retrieve"
        )
    if settings.url and not is_address(settings.url):
        raise ConfigError(
            f"setting 'tools.search.url': {settings.url!r}, expected http://HOST... or https://HOST..."
        )


def _service(settings: SearchSettings, usual: str) -> HttpService:
    check_address(settings)
    return HttpService(settings.url or usual, timeout=settings.timeout, retries=settings.retries)
