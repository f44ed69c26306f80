"""Owns the Wikipedia back-end: full-text search of the MediaWiki Action API, introductions as evidence.

No key is needed. Requests start at least INTERVAL apart, as the service's etiquette asks.
"""

from collections.abc import Iterator
from urllib.parse import urlencode

import anyio
import msgspec

from rollout.search.base import MAX_FIELD_CHARS, MAX_URL_CHARS, Found, Passage, clean
from rollout.search.http import Attempt, HttpService, failed, succeeded

URL = "https://en.wikipedia.org/w/api.php"
INTERVAL = 0.31
"""Seconds between the starts of two requests (about 200 a minute)."""
MAX_TEXT_CHARS = 1200
MAX_QUERY_CHARS = 300
"""CirrusSearch refuses longer ones, and a refusal would void what the policy itself has written."""
MAX_BATCHES = 4
"""How many answers are followed for introductions that were left out of the first."""
TRANSIENT = ("maxlag", "readonly", "internal_api_error")


class _Page(msgspec.Struct):
    title: str | None = None
    pageid: int = 0
    index: int = 1_000_000
    extract: str | None = None
    fullurl: str | None = None


class _Query(msgspec.Struct):
    pages: list[msgspec.Raw] = []


class _Error(msgspec.Struct):
    code: str = ""


class _Body(msgspec.Struct):
    query: _Query | None = None
    error: _Error | None = None
    continues: dict[str, str | int] = msgspec.field(default_factory=dict, name="continue")


class Wikipedia:
    """Searches a MediaWiki."""

    name = "wikipedia"

    def __init__(self, service: HttpService) -> None:
        self._service = service
        self._turn = anyio.Lock()
        self._free_at = 0.0

    def __repr__(self) -> str:
        return f"<Wikipedia {self._service.url}>"

    @property
    def version(self) -> str:
        """The wiki's address: another language is another result."""
        return f"{self._service.url} intro {MAX_TEXT_CHARS}"

    async def search(self, query: str, top_k: int) -> Found:
        """Return the introductions of at most `top_k` pages, best first."""
        return await self._service.persist(lambda: self._try(query, top_k))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._service.aclose()

    async def _try(self, query: str, top_k: int) -> Attempt:
        """Ask, and ask on while a page still lacks its introduction."""
        pages: dict[int, _Page] = {}
        continues: dict[str, str | int] = {}
        for _ in range(MAX_BATCHES):
            body = await self._ask({**_parameters(query, top_k), **continues})
            if isinstance(body, Attempt):
                return body
            for page in _pages(body):
                known = pages.setdefault(page.pageid, page)
                known.extract = known.extract or page.extract
            continues = body.continues
            if "excontinue" not in continues or all(page.extract for page in pages.values()):
                break
        ordered = sorted(pages.values(), key=lambda page: (page.index, page.pageid))
        return succeeded([passage for page in ordered if (passage := _passage(page))], top_k)

    async def _ask(self, parameters: dict[str, str | int]) -> _Body | Attempt:
        await self._wait_turn()
        answer = await self._service.get(urlencode(parameters), _Body)
        if isinstance(answer, Attempt):
            return answer
        if answer.body.error is None:
            return answer.body
        code, wait = answer.body.error.code, answer.wait
        if code == "ratelimited":
            return failed("rate_limited", "too many requests (ratelimited)", retryable=True, wait=wait)
        if code.startswith(TRANSIENT):
            return failed("error", "the service is not ready", retryable=True, wait=wait)
        return failed("bad_request", "the request was refused by the wiki", retryable=False)

    async def _wait_turn(self) -> None:
        async with self._turn:
            wait = self._free_at - self._service.timer.monotonic()
            if wait > 0:
                await self._service.timer.sleep(wait)
            self._free_at = self._service.timer.monotonic() + INTERVAL


def _parameters(query: str, top_k: int) -> dict[str, str | int]:
    return {
        "action": "query",
        "format": "json",
        "formatversion": 2,
        "generator": "search",
        "gsrsearch": query[:MAX_QUERY_CHARS],
        "gsrlimit": top_k,
        "prop": "extracts|info",
        "explaintext": 1,
        "exintro": 1,
        "exchars": MAX_TEXT_CHARS,
        "exlimit": "max",
        "inprop": "url",
        "redirects": 1,
    }


def _pages(body: _Body) -> Iterator[_Page]:
    """Yield the pages of an answer; one that cannot be read is no evidence, and costs no other."""
    for raw in body.query.pages if body.query is not None else ():
        try:
            yield msgspec.json.decode(raw, type=_Page)
        except msgspec.DecodeError:
            continue


def _passage(page: _Page) -> Passage | None:
    """Return a page's passage; one without text is no evidence."""
    content = clean(page.extract, MAX_TEXT_CHARS)
    if not content:
        return None
    return Passage(
        content=content,
        title=clean(page.title, MAX_FIELD_CHARS) or "Untitled",
        source="Wikipedia",
        url=clean(page.fullurl, MAX_URL_CHARS),
        id=str(page.pageid) if page.pageid else "",
    )
