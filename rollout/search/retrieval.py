"""Owns the client of a /retrieve server, as Search-R1 and Tree-GRPO run one beside the training.

POST {"queries", "topk", "return_scores"} is answered by {"result": [[{"document", "score"}, ...], ...]},
one list per query in their order. Queries that are asked at once share a request.
"""

import anyio
import msgspec

from rollout.search.base import MAX_CONTENT_CHARS, MAX_FIELD_CHARS, Found, Passage, clean, found
from rollout.search.http import Attempt, HttpService, failed

MAX_BATCH = 64
REQUESTS_AT_ONCE = 4


class _Document(msgspec.Struct):
    id: str | int | None = None
    contents: str | None = None
    title: str | None = None
    text: str | None = None


class _Entry(_Document):
    """A document, or (with scores) one wrapped."""

    document: _Document | msgspec.UnsetType | None = msgspec.UNSET
    score: float | None = None


class _Body(msgspec.Struct):
    result: list[list[msgspec.Raw] | None]


class _Waiting:
    """A query that waits for its batch."""

    def __init__(self, query: str, top_k: int) -> None:
        self.query = query
        self.top_k = top_k
        self.result: Found | None = None
        self.woken = anyio.Event()


class Retrieval:
    """Searches with a /retrieve server."""

    name = "retrieval"

    def __init__(self, service: HttpService, requests_at_once: int = REQUESTS_AT_ONCE) -> None:
        self._service = service
        self._slots = anyio.Semaphore(requests_at_once)
        self._queue: list[_Waiting] = []

    def __repr__(self) -> str:
        return f"<Retrieval {self._service.url}, {len(self._queue)} queued>"

    @property
    def version(self) -> str:
        """The server's address: it does not tell what it serves."""
        return self._service.url

    async def search(self, query: str, top_k: int) -> Found:
        """Return at most `top_k` documents; whoever comes to a free slot sends all that is queued."""
        waiting = _Waiting(query, top_k)
        self._queue.append(waiting)
        try:
            while waiting.result is None:
                async with self._slots:
                    if waiting in self._queue:
                        await self._send_batch()
                if waiting.result is None:
                    await waiting.woken.wait()
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)
        return waiting.result

    async def aclose(self) -> None:
        """Close the connections."""
        await self._service.aclose()

    async def _send_batch(self) -> None:
        """Send the head of the queue; if this task is cancelled, the others' queries are queued again."""
        top_k = self._queue[0].top_k
        batch = [waiting for waiting in self._queue if waiting.top_k == top_k][:MAX_BATCH]
        for waiting in batch:
            self._queue.remove(waiting)
        try:
            results = await self.search_many([waiting.query for waiting in batch], top_k)
            for waiting, result in zip(batch, results, strict=True):
                waiting.result = result
        finally:
            for waiting in batch:
                woken, waiting.woken = waiting.woken, anyio.Event()
                if waiting.result is None:
                    self._queue.append(waiting)
                woken.set()

    async def search_many(self, queries: list[str], top_k: int) -> list[Found]:
        """Return one result per query; none is believed if their number is wrong."""
        lists: list[list[Passage]] = []

        async def attempt() -> Attempt:
            answer = await self._ask(queries, top_k)
            if isinstance(answer, Attempt):
                return answer
            lists[:] = answer
            return Attempt(found(lists[0] if lists else [], top_k))

        outcome = await self._service.persist(attempt)
        if not outcome.ok:
            return [outcome for _ in queries]
        return [
            msgspec.structs.replace(
                found(passages, top_k),
                latency=outcome.latency,
                retries=outcome.retries,
                rate_limited=outcome.rate_limited,
            )
            for passages in lists
        ]

    async def _ask(self, queries: list[str], top_k: int) -> list[list[Passage]] | Attempt:
        answer = await self._service.post({"queries": queries, "topk": top_k, "return_scores": True}, _Body)
        if isinstance(answer, Attempt):
            return answer
        body = answer.body
        if len(body.result) != len(queries):
            problem = f"{len(body.result)} result lists for {len(queries)} queries"
            return failed("bad_response", problem, retryable=True)
        return [[p for raw in entries or () if (p := _passage(raw))] for entries in body.result]


def _passage(raw: msgspec.Raw) -> Passage | None:
    """Return one entry's passage; one that cannot be read is no evidence."""
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except msgspec.DecodeError:
        return None
    document = entry if entry.document is msgspec.UNSET else entry.document
    if document is None or isinstance(document, msgspec.UnsetType):
        return None
    title, content = document.title, document.text
    if content is None:
        first, line_break, rest = (document.contents or "").partition("\n")
        title, content = (first.strip().strip('"'), rest) if line_break else (title, first)
    text = clean(content, MAX_CONTENT_CHARS)
    if not text:
        return None
    return Passage(
        content=text,
        title=clean(title, MAX_FIELD_CHARS) or "Untitled",
        id="" if document.id is None else str(document.id),
        score=entry.score,
    )
