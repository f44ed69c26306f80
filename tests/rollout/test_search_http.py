"""Search over HTTP: reported replies of the real services, faults as typed results, keys, retries."""

import gzip
import json
import threading
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest

from core.config import SearchSettings
from core.errors import ConfigError
from rollout.search.base import Backend, Found, clean
from rollout.search.build import build_backend, check_address
from rollout.search.http import MAX_BODY_BYTES, MAX_WAIT, HttpService
from rollout.search.keys import find_keys
from rollout.search.retrieval import Retrieval
from rollout.search.wikipedia import INTERVAL, Wikipedia
from rollout.search.zhihu import Zhihu
from tests.rollout.loopback import Clock, Reply, Request, Server, json_reply, reported_reply, serve
from tests.rollout.reported import Reported, case, cases

KEY = "secret-key-1"
PAGE = {"batchcomplete": True, "query": {"pages": [{"pageid": 1, "index": 1, "title": "A", "extract": "x"}]}}
HIT = {
    "Code": 0,
    "Data": {"Items": [{"Title": "T", "ContentText": "x", "Url": "u", "ContentType": "Answer"}]},
}


def backend(name: str, server: Server, clock: Clock, *, retries: int = 2, timeout: float = 5.0) -> Backend:
    """Return a back-end that asks the loopback server."""
    service = HttpService(server.url, timeout=timeout, retries=retries, timer=clock.timer())
    if name == "zhihu":
        return Zhihu((KEY,), service)
    return Wikipedia(service) if name == "wikipedia" else Retrieval(service)


async def ask(asked: Backend, query: str = "capital of Australia", top_k: int = 3) -> Found:
    """Return the result of one search, and close the back-end."""
    try:
        return await asked.search(query, top_k)
    finally:
        await asked.aclose()


def one(
    name: str, *script: Reply, retries: int = 2, timeout: float = 5.0
) -> tuple[Found, Clock, list[Request]]:
    """Return what one search made of scripted replies, with the clock it waited by and what it sent."""
    clock = Clock()
    with serve(script) as server:
        asked = backend(name, server, clock, retries=retries, timeout=timeout)
        return anyio.run(ask, asked), clock, server.requests


def shown(found: Found, fields: tuple[str, ...]) -> list[dict[str, object]]:
    """Return the passages as the cases write them."""
    return [{field: getattr(passage, field) for field in fields} for passage in found.passages]


SERVED = ("01", "03", "05", "06", "08", "10", "11", "13", "15", "16", "18", "21")


@pytest.mark.parametrize("reported", cases("e-search", *SERVED))
def test_reported_replies(reported: Reported) -> None:
    """Every reported reply of a service becomes the result that is right for it."""
    given, expected = reported["input"], reported["expected"]
    clock = Clock()
    with serve([reported_reply(reply) for reply in given["replies"]]) as server:
        found = anyio.run(ask, backend(given["backend"], server, clock), given["query"])
        count = len(server.requests)
    assert found.ok == expected["ok"]
    if "items" in expected and given["backend"] != "search_r1_retrieve":
        assert shown(found, ("title", "content", "url", "source")) == expected["items"]
    elif "items" in expected and "also_acceptable" not in reported:
        assert shown(found, ("title", "content", "score")) == expected["items"]
    if "titles_in_order" in expected:
        assert [passage.title for passage in found.passages] == expected["titles_in_order"]
        assert all(passage.content for passage in found.passages)
    if "error_kind" in expected:
        assert (found.status, found.passages) == (expected["error_kind"], ())
        assert found.error
    if expected.get("error", "") is None:
        assert found.error == ""
    if "waits_seconds" in expected:
        assert [wait for wait in clock.waits if wait > INTERVAL] == expected["waits_seconds"]
    assert found.fatal == expected.get("run_should_stop", False)
    assert found.rate_limited == expected.get("rate_limit_count", 0)
    if "retries" in expected:
        assert (found.retries, count) == (expected["retries"], expected["retries"] + 1)
    if "item_count_min" in expected:
        assert len(found.passages) >= expected["item_count_min"]
        assert len(found.passages[-1].content) <= expected["last_item_content_chars_max"]
        assert not any(word in ("None", "") for p in found.passages for word in (p.title, p.content))


def test_documents_of_every_shape() -> None:
    """A null document is skipped, title and text are taken, text without a line break is not lost."""
    reported = case("e-search", "21-retrieve-document-null")
    found, _, _ = one("retrieval", reported_reply(reported["input"]["replies"][0]))
    accepted = [reported["expected"]["items"][0], {"title": "Untitled", "content": "no line break here"}]
    assert shown(found, ("title", "content")) == accepted
    quoted = case("e-search", "18-retrieve-with-scores")
    found, _, requests = one("retrieval", reported_reply(quoted["input"]["replies"][0]))
    assert shown(found, ("title", "content", "score")) == quoted["expected"]["items"]
    assert found.passages[0].id == "7"
    sent = json.loads(requests[0].body)
    assert sent == {"queries": ["capital of Australia"], "topk": 3, "return_scores": True}


def test_fewer_lists_than_queries_are_not_believed() -> None:
    """One list short, no query gets any result: nobody knows which is missing."""
    reported = case("e-search", "20-retrieve-fewer-lists-than-queries")
    with serve([reported_reply(reported["input"]["replies"][0])]) as server:
        asked = backend("retrieval", server, Clock())

        async def ask_all() -> list[Found]:
            try:
                return await asked.search_many(reported["input"]["queries"], 3)
            finally:
                await asked.aclose()

        found = anyio.run(ask_all)
    assert [each.ok for each in found] == reported["expected"]["ok"]
    assert {each.status for each in found} == {reported["expected"]["error_kind"]}
    assert not any(each.passages for each in found)


def test_markup_in_a_document_is_only_text() -> None:
    """A page full of tags is one passage with all its text."""
    reported = case("e-search", "23-markup-inside-an-observation")
    found, _, _ = one("retrieval", reported_reply(reported["input"]["replies"][0]))
    document = reported["input"]["replies"][0]["json"]["result"][0][0]["document"]["contents"]
    assert [passage.content for passage in found.passages] == [document.partition("\n")[2]]


def test_a_query_is_encoded_as_a_form() -> None:
    """Signs, spaces, other scripts and a line break arrive as they were asked."""
    reported = case("e-search", "25-query-needs-encoding")
    with serve([json_reply(HIT)]) as server:
        found = anyio.run(ask, backend("zhihu", server, Clock()), reported["input"]["query"])
    query = urlsplit(server.requests[0].path).query
    assert found.ok
    assert query == reported["expected"]["query_string"]
    wanted = {name: [str(value)] for name, value in reported["input"]["parameters"].items()}
    assert parse_qs(query) == wanted


@pytest.mark.parametrize("name", ["zhihu", "wikipedia", "retrieval"])
@pytest.mark.parametrize(
    ("reply", "status", "tries"),
    [
        (Reply(404), "bad_request", 1),
        (Reply(401), "auth", 1),
        (Reply(403), "auth", 1),
        (Reply(302, (("Location", "http://127.0.0.1:9/"),)), "bad_response", 1),
        (Reply(500), "error", 3),
        (Reply(429), "rate_limited", 3),
        (Reply(200, (), b""), "bad_response", 3),
        (Reply(200, (), b'{"Code": 0, "result": ['), "bad_response", 3),
        (Reply(200, (), b"[" * 100_000), "bad_response", 3),
        (Reply(200, (("Content-Encoding", "gzip"),), b"not gzip"), "bad_response", 3),
        (Reply(200, (("Content-Encoding", "gzip"),), gzip.compress(b"{}" * 999)[:20]), "bad_response", 3),
        (Reply(200, (), b" " * (MAX_BODY_BYTES + 1)), "bad_response", 1),
        (Reply(200, (), b"x" * 100, cut=10), "error", 3),
        (Reply(200, (("Content-Type", "application/json; charset=no-such"),), b"{}"), "bad_response", 3),
        (json_reply({"Code": 7, "error": {"code": "other"}, "result": "x"}), None, None),
    ],
)
def test_faults_are_results(name: str, reply: Reply, status: str | None, tries: int | None) -> None:
    """Whatever a service does, a search returns a typed fault; only what may pass is tried again."""
    found, _, requests = one(name, reply)
    assert (found.ok, found.passages) == (False, ())
    assert found.error
    if status is not None:
        assert (found.status, len(requests)) == (status, tries)
        assert found.retries == tries - 1
        assert found.fatal == (status == "auth")


def test_a_service_that_does_not_answer() -> None:
    """Silence is a timeout, and a port that nobody listens on an error; both are retried."""
    stall = threading.Event()
    try:
        found, clock, _ = one("wikipedia", Reply(stall=stall), timeout=0.15)
    finally:
        stall.set()
    assert (found.status, found.retries, found.error) == ("timeout", 2, "no answer within 0.15 s")
    assert [wait for wait in clock.waits if wait >= 1] == [1.0, 2.0]
    with serve([Reply()]) as gone:
        pass
    refused = anyio.run(ask, backend("retrieval", gone, Clock()))
    assert (refused.status, refused.error) == ("error", "connection failed (ConnectError)")


@pytest.mark.parametrize(
    ("said", "waits"),
    [
        ("7", [7.0]),
        ("0", [0.0]),
        ("86400", [MAX_WAIT]),
        (formatdate(1_700_000_020, usegmt=True), [20.0]),
        (formatdate(1_600_000_000, usegmt=True), [0.0]),
        ("soon", [1.0]),
        ("nan", [1.0]),
        ("-5", [0.0]),
        ("", [1.0]),
    ],
)
def test_retry_after_is_honoured_within_bounds(said: str, waits: list[float]) -> None:
    """Seconds or a date, capped; what cannot be read leaves the usual wait."""
    found, clock, _ = one("retrieval", Reply(503, (("Retry-After", said),)), json_reply({"result": [[]]}))
    assert (found.ok, found.status) == (True, "empty")
    assert clock.waits == pytest.approx(waits, abs=1)


def test_odd_encodings_are_read() -> None:
    """A byte order mark, gzip, and a charset that the service names."""
    body = json.dumps(PAGE, ensure_ascii=False).replace('"x"', '"北京"')
    for reply in (
        Reply(200, (), b"\xef\xbb\xbf" + body.encode()),
        Reply(200, (("Content-Encoding", "gzip"),), gzip.compress(body.encode())),
        Reply(200, (("Content-Type", "application/json; charset=GBK"),), body.encode("gbk")),
    ):
        found, _, _ = one("wikipedia", reply)
        assert [passage.content for passage in found.passages] == ["北京"]


def test_unreadable_items_cost_only_themselves() -> None:
    """An item of the wrong type is left out; the others are shown, cleaned and cut."""
    items = [
        "no object",
        {"ContentText": 3},
        {"ContentText": "  a\x00b\x1b[31m\r\nc\u0301 ", "Title": "t" * 999, "Url": "u" * 9999},
    ]
    found, _, _ = one("zhihu", json_reply({"Code": 0, "Data": {"Items": items}}))
    (passage,) = found.passages
    assert passage.content == "ab[31m\n\u0107"
    assert (len(passage.title), len(passage.url)) == (300, 1000)
    pages = [
        7,
        {"pageid": 2, "title": ["x"], "extract": "y"},
        {"pageid": 3, "index": 2, "extract": "z"},
        None,
    ]
    found, _, _ = one("wikipedia", json_reply({"query": {"pages": pages}}))
    assert [(page.title, page.content) for page in found.passages] == [("Untitled", "z")]
    assert one("zhihu", json_reply({"Code": 0, "Data": None}))[0].status == "empty"
    assert one("retrieval", json_reply({"result": [None]}))[0].status == "empty"
    assert one("retrieval", json_reply({"result": [[3, {"id": 1}, None]]}))[0].status == "empty"


@pytest.mark.parametrize(
    ("code", "status", "tries"),
    [
        (10001, "bad_request", 1),
        (20001, "auth", 1),
        (30001, "rate_limited", 3),
        (90001, "error", 3),
        (7, "error", 1),
    ],
)
def test_faults_under_http_200(code: object, status: str, tries: int) -> None:
    """Zhihu's own codes count as what they mean, though HTTP says that all is well."""
    found, _, requests = one("zhihu", json_reply({"Code": code, "Message": "m"}))
    assert (found.status, len(requests)) == (status, tries)


@pytest.mark.parametrize(("code", "status"), [("ratelimited", "rate_limited"), ("maxlag", "error")])
def test_wiki_errors_under_http_200(code: object, status: str) -> None:
    """So do the wiki's."""
    found, _, requests = one("wikipedia", json_reply({"error": {"code": code, "info": "x"}}))
    assert (found.status, len(requests)) == (status, 3)


def test_wikipedia_is_asked_politely() -> None:
    """Requests name their sender, start apart, and ask for text introductions."""
    clock = Clock()
    with serve([json_reply(PAGE)]) as server:
        asked = backend("wikipedia", server, clock)

        async def many() -> None:
            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(asked.search, f"q{number}", 3)
            await asked.aclose()

        anyio.run(many)
    assert len(server.requests) == 4
    assert clock.waits == pytest.approx([INTERVAL] * 3)
    assert server.requests[0].headers["User-Agent"].startswith("Rolltape/")
    sent = parse_qs(urlsplit(server.requests[0].path).query)
    assert (sent["gsrlimit"], sent["exintro"], sent["formatversion"]) == (["3"], ["1"], ["2"])


def by_key(answers: dict[str, Reply]) -> Callable[[Request], Reply]:
    """Return a script that answers by the key of a request."""
    return lambda request: answers[request.headers["Authorization"].removeprefix("Bearer ")]


def test_keys_take_turns() -> None:
    """A limited key rests while the next one answers; a refused key is never used again."""
    clock = Clock()
    answers = {"one": Reply(429, (("Retry-After", "30"),)), "two": Reply(401), "three": json_reply(HIT)}
    with serve(by_key(answers)) as server:
        service = HttpService(server.url, timeout=5, retries=2, timer=clock.timer())
        asked = Zhihu(("one", "two", "three"), service)

        async def several() -> None:
            for _ in range(3):
                found = await asked.search("q", 3)
                assert (found.ok, found.retries, found.rate_limited) == (True, 0, 0)
            answers["three"] = Reply(429, (("Retry-After", "45"),))
            answers["one"] = json_reply(HIT)
            assert (await asked.search("q", 3)).ok
            await asked.aclose()

        anyio.run(several)
    used = [request.headers["Authorization"].removeprefix("Bearer ") for request in server.requests]
    assert used == ["one", "two", "three", "three", "three", "three", "one"]
    assert clock.waits == [30.0]


def test_no_key_left_stops_the_run() -> None:
    """When every key is refused no later search can succeed; nothing is asked again."""
    with serve([json_reply({"Code": 20001, "Message": "no"})]) as server:
        asked = Zhihu(("one", "two"), HttpService(server.url, timeout=5, retries=2, timer=Clock().timer()))

        async def twice() -> list[Found]:
            results = [await asked.search("q", 3), await asked.search("q", 3)]
            await asked.aclose()
            return results

        first, second = anyio.run(twice)
    assert (first.fatal, second.fatal, first.status) == (True, True, "auth")
    assert len(server.requests) == 2


def test_keys_never_leak() -> None:
    """A service that echoes the key, however it fails, cannot get it into a result or a representation."""
    for status in (200, 400, 401, 429, 500):
        echo = Reply(
            status, (("X-Key", KEY), ("Location", KEY)), f'{{"Code": 1, "Message": "{KEY}"}}'.encode()
        )
        clock = Clock()
        with serve([echo]) as server:
            asked = backend("zhihu", server, clock)
            found = anyio.run(ask, asked)
        assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"
        assert KEY not in repr(found) + repr(asked) + repr(asked.__dict__.get("_ring"))


def test_keys_come_from_environment_or_file(tmp_path: Path) -> None:
    """Commas or line breaks part keys; the environment comes first; none at all says what to do."""
    dotenv = tmp_path / ".env"
    with pytest.raises(ConfigError, match="ZHIHU_SEARCH_KEYS=key1,key2"):
        find_keys({}, dotenv)
    dotenv.write_text('# mine\nOTHER=1\nexport ZHIHU_SEARCH_KEYS="a, b,,a"\n')
    assert find_keys({}, dotenv) == ("a", "b")
    assert find_keys({"ZHIHU_SEARCH_KEYS": "c\nd"}, dotenv) == ("c", "d")


def test_queries_asked_at_once_share_requests() -> None:
    """Every query gets its own list, in a few requests; one that is cancelled holds up no other."""

    def answer(request: Request) -> Reply:
        queries = json.loads(request.body)["queries"]
        return json_reply({"result": [[{"id": 1, "contents": f'"{q}"\nfor {q}'}] for q in queries]})

    with serve(answer) as server:
        asked = backend("retrieval", server, Clock())
        found: dict[str, Found] = {}

        async def search(query: str) -> None:
            found[query] = await asked.search(query, 3)

        async def many() -> None:
            async with anyio.create_task_group() as tasks:
                for number in range(100):
                    tasks.start_soon(search, f"q{number}")
            await asked.aclose()

        anyio.run(many)
    assert {query: each.passages[0].content for query, each in found.items()} == {
        f"q{n}": f"for q{n}" for n in range(100)
    }
    assert len(server.requests) < 20


def test_a_cancelled_sender_hands_its_batch_on() -> None:
    """When the task that sent a batch is cancelled, the queries of the others are sent again."""
    stall, arrived = threading.Event(), threading.Event()

    def answer(request: Request) -> Reply:
        queries = json.loads(request.body)["queries"]
        reply = json_reply({"result": [[{"contents": f'"{q}"\nfor {q}'}] for q in queries]})
        if not arrived.is_set():
            arrived.set()
            return reply._replace(stall=stall)
        return reply

    with serve(answer) as server:
        service = HttpService(server.url, timeout=20, retries=0, timer=Clock().timer())
        asked = Retrieval(service, requests_at_once=1)
        found: dict[str, Found] = {}

        async def search(query: str) -> None:
            found[query] = await asked.search(query, 3)

        async def leader(scope: anyio.CancelScope) -> None:
            with scope:
                await search("cancelled")

        async def run() -> None:
            scope = anyio.CancelScope()
            with anyio.fail_after(10):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(leader, scope)
                    for query in ("a", "b"):
                        tasks.start_soon(search, query)
                    await anyio.to_thread.run_sync(arrived.wait)
                    scope.cancel()
            await asked.aclose()

        try:
            anyio.run(run)
        finally:
            stall.set()
    assert sorted(found) == ["a", "b"]
    assert all(each.passages[0].content == f"for {query}" for query, each in found.items())


def test_settings_choose_the_back_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each name builds its back-end; what is missing is said at once."""
    monkeypatch.setenv("ZHIHU_SEARCH_KEYS", "k")
    for name, url, kind in (
        ("zhihu", "", Zhihu),
        ("wikipedia", "", Wikipedia),
        ("retrieval", "http://127.0.0.1:1/retrieve", Retrieval),
    ):
        made = build_backend(SearchSettings(backend=name, url=url), tmp_path, print)
        assert isinstance(made, kind)
        anyio.run(made.aclose)
    for settings, problem in (
        (SearchSettings(backend="retrieval"), "needs the server's address"),
        (SearchSettings(backend="wikipedia", url="ftp://x"), "expected http://"),
        (SearchSettings(backend="local", corpus=""), "expected a JSONL file"),
    ):
        with pytest.raises(ConfigError, match=problem):
            build_backend(settings, tmp_path, print)
    monkeypatch.delenv("ZHIHU_SEARCH_KEYS")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="ZHIHU_SEARCH_KEYS"):
        build_backend(SearchSettings(backend="zhihu"), Path(), print)


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "http://", "http:///retrieve", "http://[::1", "http://a b/", "http://x:99999999/", "x.org/r"],
)
def test_an_address_that_is_none_is_refused_early(url: str) -> None:
    """Before a run is made, in one line that shows it."""
    with pytest.raises(ConfigError, match=r"'tools.search.url': .* expected http://HOST"):
        check_address(SearchSettings(backend="retrieval", url=url))
    for good in ("http://127.0.0.1:8000/retrieve", "https://[::1]:65535/", "http://böse.example/w/api.php"):
        check_address(SearchSettings(backend="retrieval", url=good))


@pytest.mark.parametrize("proxy", ["socks5://user:secret@127.0.0.1:1", "::secret::"])
def test_a_proxy_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    """In words, without the proxy's own address, which may hold a password."""
    for name in ("https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(ConfigError, match="proxy") as caught:
        HttpService("https://example.org", timeout=1, retries=0)
    assert "secret" not in str(caught.value)


def test_outside_text_is_cleaned() -> None:
    """Control characters, half surrogates and non-characters never reach the log."""
    assert clean(None, 5) == ""
    assert clean("\ufeff a\tb\n\x85c\ud800\uffff ", 50) == "\ufeff a\tb\nc"
    assert clean("abc   def", 5) == "abc"


@pytest.mark.parametrize(
    "text",
    [
        "\ufeffZHIHU_SEARCH_KEYS=a,b\n",
        'ZHIHU_SEARCH_KEYS="a,b" # mine\n',
        "ZHIHU_SEARCH_KEYS=a,b  # mine\n",
        "export ZHIHU_SEARCH_KEYS = 'a, b'\r\n",
    ],
)
def test_key_files_as_editors_write_them(tmp_path: Path, text: str) -> None:
    """A byte order mark, quotes, comments and blanks are no part of a key."""
    (tmp_path / ".env").write_bytes(text.encode())
    assert find_keys({}, tmp_path / ".env") == ("a", "b")


@pytest.mark.parametrize(
    "key", ["secr\u00e9t", "\ufeffsecret", "secret\u200b", "sec ret", "sec\tret", "secret\x00"]
)
def test_a_key_that_no_request_can_hold_is_refused_early(tmp_path: Path, key: str) -> None:
    """It would end every trajectory with an exception; the message counts keys and shows none."""
    with pytest.raises(ConfigError, match="key 2 of 2 in ZHIHU_SEARCH_KEYS") as caught:
        find_keys({"ZHIHU_SEARCH_KEYS": f"good,{key}"}, tmp_path / ".env")
    assert not any(part in str(caught.value) for part in ("sec", "good", key))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("zhihu", {"Code": 30001}),
        ("zhihu", {"Code": 90001}),
        ("wikipedia", {"error": {"code": "ratelimited"}}),
        ("wikipedia", {"error": {"code": "maxlag"}}),
    ],
)
@pytest.mark.parametrize(("asked", "waited"), [("7", 7.0), ("86400", MAX_WAIT)])
def test_retry_after_counts_under_http_200_too(name: str, said: object, asked: str, waited: float) -> None:
    """A limit that only the body tells of is waited out as its header asks, capped like any other."""
    limited = Reply(200, (("Retry-After", asked),), json.dumps(said).encode())
    found, clock, _ = one(name, limited, json_reply(HIT if name == "zhihu" else PAGE))
    assert (found.ok, found.retries) == (True, 1)
    assert [wait for wait in clock.waits if wait > INTERVAL] == [waited]


def test_a_long_query_is_cut_to_what_the_wiki_takes() -> None:
    """A query that the policy made too long finds something by its beginning, and is no fault."""
    with serve([json_reply(PAGE)]) as server:
        found = anyio.run(ask, backend("wikipedia", server, Clock()), "word " * 200)
    assert found.ok
    sent = parse_qs(urlsplit(server.requests[0].path).query)["gsrsearch"]
    assert sent == [("word " * 60)]


@pytest.mark.parametrize(
    ("name", "good"), [("zhihu", HIT), ("wikipedia", PAGE), ("retrieval", {"result": [[{"contents": "x"}]]})]
)
def test_what_a_search_cost_in_tries_is_told(name: str, good: object) -> None:
    """One limit and one fault before it worked: two tries more, one of them limited, and the time of all."""
    found, clock, _ = one(name, Reply(429, (("Retry-After", "3"),)), Reply(500), json_reply(good))
    assert (found.ok, found.retries, found.rate_limited) == (True, 2, 1)
    assert found.latency == pytest.approx(sum(clock.waits), abs=2.0)
    assert found.latency >= 5.0
