"""Owns what a search back-end is and says: typed results, never exceptions."""

import re
import unicodedata
from typing import Literal, Protocol

import msgspec

Status = Literal[
    "success", "empty", "timeout", "rate_limited", "auth", "bad_request", "bad_response", "error"
]

MAX_CONTENT_CHARS = 20_000
"""Of one passage: what a page may put into the log."""
MAX_FIELD_CHARS = 300
"""Of a title or source."""
MAX_URL_CHARS = 1000

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
"""Control characters but tab and line feed, half surrogates, and Unicode's non-characters."""


class Passage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of evidence."""

    content: str
    title: str = ""
    source: str = ""
    url: str = ""
    id: str = ""
    score: float | None = None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one search."""

    ok: bool
    passages: tuple[Passage, ...] = ()
    status: Status = "success"
    error: str = ""
    """What failed, in our own words: no body, header or key ever stands here."""
    latency: float = 0.0
    """Seconds, waiting included."""
    retries: int = 0
    rate_limited: int = 0
    """Answers that said "too many requests"."""
    fatal: bool = False
    """No later search can succeed either (keys refused): the run should stop."""
    cached: bool = False


class Backend(Protocol):
    """A place to search."""

    name: str

    @property
    def version(self) -> str:
        """What a cached result depends on besides the query: corpus digest, URL, interface version."""
        ...

    async def search(self, query: str, top_k: int) -> Found:
        """Return at most `top_k` passages, best first; never raises on a fault."""
        ...

    async def aclose(self) -> None:
        """Release connections."""
        ...


def clean(text: str | None, limit: int) -> str:
    """Return outside text fit for the log: NFC, no control characters, trimmed, at most `limit` long."""
    if not text:
        return ""
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", CONTROL.sub("", plain)).strip()[:limit].rstrip()


def fault(status: Status, error: str, *, fatal: bool = False) -> Found:
    """Return a failed search."""
    return Found(ok=False, status=status, error=error, fatal=fatal)


def found(passages: list[Passage], top_k: int) -> Found:
    """Return a successful search, which may have found nothing."""
    return Found(ok=True, passages=tuple(passages[:top_k]), status="success" if passages else "empty")
