"""Owns the Zhihu back-end: the global search of developer.zhihu.com.

The service reports faults in the body's Code under HTTP 200 as well: 10001 bad parameters, 20001 access
refused, 30001 too many requests, 90001 a fault of its own.
"""

import html
import re
from urllib.parse import urlencode

import msgspec

from rollout.search.base import (
    MAX_FIELD_CHARS,
    MAX_URL_CHARS,
    Found,
    Passage,
    Status,
    clean,
)
from rollout.search.http import Attempt, HttpService, failed, succeeded
from rollout.search.keys import KeyRing

URL = "https://developer.zhihu.com/api/v1/content/global_search"
MAX_COUNT = 20
MAX_TEXT_CHARS = 1200
HIGHLIGHT = re.compile(r"</?em>")

CODES: dict[int, tuple[Status, str, bool]] = {
    10001: ("bad_request", "the request was refused (code 10001)", False),
    20001: ("auth", "access refused (code 20001)", False),
    30001: ("rate_limited", "too many requests (code 30001)", True),
    90001: ("error", "the service failed (code 90001)", True),
}


class _Item(msgspec.Struct, rename="pascal"):
    title: str | None = None
    content_type: str | None = None
    content_text: str | None = None
    url: str | None = None
    author_name: str | None = None


class _Data(msgspec.Struct, rename="pascal"):
    items: list[msgspec.Raw] | None = None


class _Body(msgspec.Struct, rename="pascal"):
    code: int
    data: _Data | None = None


class Zhihu:
    """Searches Zhihu with one or more keys in turn."""

    name = "zhihu"
    version = "global_search.v1"

    def __init__(self, keys: tuple[str, ...], service: HttpService) -> None:
        self._ring = KeyRing(keys, service.timer)
        self._service = service

    def __repr__(self) -> str:
        return f"<Zhihu {self._ring!r}>"

    async def search(self, query: str, top_k: int) -> Found:
        """Return at most `top_k` results."""
        return await self._service.persist(lambda: self._try_keys(query, top_k))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._service.aclose()

    async def _try_keys(self, query: str, top_k: int) -> Attempt:
        """Ask with one key after the other until one is neither limited nor refused."""
        for _ in range(len(self._ring)):
            index = self._ring.take()
            if index is None:
                break
            attempt = await self._ask(query, top_k, self._ring.key(index))
            if attempt.result.status == "rate_limited":
                self._ring.rest(index, attempt.wait)
            elif attempt.result.status == "auth":
                self._ring.refuse(index)
            else:
                return attempt
        if self._ring.all_refused:
            return failed("auth", f"access refused for each of {len(self._ring)} keys", retryable=False)
        return failed("rate_limited", "every key is rate limited", retryable=True, wait=self._ring.wait())

    async def _ask(self, query: str, top_k: int, key: str) -> Attempt:
        parameters = urlencode({"Query": query, "Count": min(top_k, MAX_COUNT), "SearchDB": "all"})
        stamp = str(int(self._service.timer.wall()))
        headers = {"Authorization": f"Bearer {key}", "X-Request-Timestamp": stamp}
        answer = await self._service.get(parameters, _Body, headers)
        if isinstance(answer, Attempt):
            return answer
        body = answer.body
        if body.code != 0:
            known = CODES.get(body.code, ("error", f"the service failed (code {body.code})", False))
            status, error, retryable = known
            return failed(status, error, retryable=retryable, wait=answer.wait)
        items = body.data.items if body.data is not None else None
        return succeeded([passage for raw in items or () if (passage := _passage(raw))], top_k)


def _passage(raw: msgspec.Raw) -> Passage | None:
    """Return one item's passage; one that cannot be read, or has no text, is no evidence."""
    try:
        item = msgspec.json.decode(raw, type=_Item)
    except msgspec.DecodeError:
        return None
    content = clean(_plain(item.content_text), MAX_TEXT_CHARS)
    if not content:
        return None
    origin = [clean(part, MAX_FIELD_CHARS) for part in (item.content_type or "Zhihu", item.author_name)]
    return Passage(
        content=content,
        title=clean(_plain(item.title), MAX_FIELD_CHARS) or "Untitled",
        source=" / ".join(part for part in origin if part),
        url=clean(item.url, MAX_URL_CHARS),
    )


def _plain(text: str | None) -> str:
    """Return text without highlighting, entities decoded once, in this order."""
    return html.unescape(HIGHLIGHT.sub("", text or ""))
