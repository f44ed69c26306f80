"""Owns the choice of a search back-end from the settings."""

from pathlib import Path

from core.config import SearchSettings
from core.errors import ConfigError
from rollout.search.base import Backend
from rollout.search.index import Notify
from rollout.search.local import open_local
from rollout.search.none import NoSearch

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
        case _:
            raise ConfigError(f"no search back-end {settings.backend!r}")
