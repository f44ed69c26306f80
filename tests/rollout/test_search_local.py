"""Local search: BM25 from an index on disk, the run's cache, and the tools that use them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.config import SearchSettings, ToolSettings
from core.errors import ConfigError, DataError
from engine.embedded.world import write_world
from rollout.calculator import calculate
from rollout.observations import text_of
from rollout.search.base import Found, Passage, fault, found
from rollout.search.index import Index, id_order, open_index
from rollout.search.local import LocalSearch, cache_root, open_local
from rollout.search.none import NoSearch
from rollout.search.render import show
from rollout.search.service import SearchService
from rollout.tools import CALCULATOR_SPEC, SEARCH_SPEC, SearchTool, Tool, ToolResult, build_tools
from tests.rollout.reported import ROOT, hotpot


def quiet(notice: str) -> None:
    """Say nothing."""


def write_corpus(path: Path, passages: list[tuple[object, str]]) -> Path:
    """Write a corpus of (id, contents)."""
    path.write_text("".join(json.dumps({"id": i, "contents": text}) + "\n" for i, text in passages))
    return path


def ids(index: Index, query: str, top_k: int = 3) -> list[str]:
    """Return the ids that a query finds, best first."""
    return [hit.passage.id for hit in index.search(query, top_k)]


def test_the_best_passage_comes_first(tmp_path: Path) -> None:
    """Rare words weigh more than common ones; words are found without accents and in any case."""
    corpus = write_corpus(
        tmp_path / "c.jsonl",
        [
            ("a", "The mayor of Melk is Orla."),
            ("b", "The founder of Melk is Beyoncé Knowles."),
            ("c", "The mayor of Tarsin is Hugo."),
        ],
    )
    index = open_index(corpus, tmp_path / "cache", quiet)
    assert ids(index, "mayor of Melk", 1) == ["a"]
    assert ids(index, "BEYONCE", 1) == ["b"]
    assert ids(index, "nothing like it") == []
    assert ids(index, "?!") == ids(index, "") == []


def test_equal_scores_stand_in_the_order_of_ids(tmp_path: Path) -> None:
    """Ties are broken by id (numbers by value), also across the last place, wherever passages stand."""
    passages: list[tuple[object, str]] = [(str(n), "same words here") for n in range(200)]
    passages += [("x1", "same words here"), ("best", "same words here same words here same")]
    shuffled = sorted(passages, key=lambda pair: str(pair[0])[::-1])
    index = open_index(write_corpus(tmp_path / "c.jsonl", shuffled), tmp_path / "cache", quiet)
    found_ids = ids(index, "same words", 6)
    assert found_ids[0] == "best"
    assert found_ids[1:] == ["0", "1", "2", "3", "4"]
    assert sorted(["x", "10", "9", "b"], key=id_order) == ["9", "10", "b", "x"]


def test_languages_without_spaces(tmp_path: Path) -> None:
    """Chinese characters are words, so a part of a name is found."""
    corpus = write_corpus(tmp_path / "c.jsonl", [(1, "北京大学在中国"), (2, "上海是城市"), (3, "Paris")])
    index = open_index(corpus, tmp_path / "cache", quiet)
    assert ids(index, "北京", 1) == ["1"]
    assert index.search("北京", 1)[0].passage.content == "北京大学在中国"


def test_an_index_is_built_once_per_content(tmp_path: Path) -> None:
    """Opened again or under another path it is found, changed it is built anew, both stay usable."""
    cache = tmp_path / "cache"
    corpus = write_corpus(tmp_path / "c.jsonl", [(1, "old fact")])
    first = open_index(corpus, cache, quiet)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(corpus.read_bytes())
    assert open_index(copy, cache, quiet).digest == first.digest
    kept = {path: path.stat().st_mtime_ns for path in before if path.suffix != ".lock"}
    assert kept == {path: at for path, at in before.items() if path.suffix != ".lock"}
    write_corpus(corpus, [(1, "new fact entirely")])
    second = open_index(corpus, cache, quiet)
    assert second.digest != first.digest
    assert (ids(first, "old"), ids(second, "new"), ids(second, "old")) == (["1"], ["1"], [])


def test_a_corpus_is_read_for_its_digest_once(tmp_path: Path) -> None:
    """Many gigabytes are not hashed at every start: the digest goes by path, size and time of change."""
    path = write_corpus(tmp_path / "a.jsonl", [(1, "one")])
    first = open_index(path, tmp_path / "cache", quiet)
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert open_index(path, tmp_path / "cache", quiet).digest == first.digest
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert open_index(path, tmp_path / "cache", quiet).digest != first.digest


def test_a_build_that_was_killed_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    """A half-built index is built again; two processes that need it at once build it once."""
    cache = tmp_path / "cache"
    corpus = write_corpus(tmp_path / "c.jsonl", [(n, f"fact number {n}") for n in range(60_000)])
    program = (
        "import sys; from pathlib import Path; from rollout.search.index import open_index;"
        "print(open_index(Path(sys.argv[1]), Path(sys.argv[2]), print).search('fact 777', 1)[0].passage.id)"
    )
    command = [sys.executable, "-c", program, str(corpus), str(cache)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    with anyio_deadline(20):
        while not list(cache.glob("*.building/*")):
            assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not [path for path in cache.iterdir() if path.is_dir() and path.suffix != ".building"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0].strip() for process in both] == ["777", "777"]
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


class anyio_deadline:  # noqa: N801
    """Fails a busy wait that lasts too long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = int(seconds)

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self.late)
        signal.alarm(self.seconds)

    def late(self, *_: object) -> None:
        """Raise in the waiting code."""
        raise TimeoutError(f"nothing happened within {self.seconds} s")

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"id": 1, "contents": "x"}\nnot json\n', "line 2"),
        (b'{"id": 1}\n', "line 1: neither 'contents' nor 'text'"),
        (b'{"contents": "x"}\n', "line 1"),
        (b'{"id": 1, "contents": "\xff"}\n', "line 1"),
        (b"\n\n", "no passages in it"),
    ],
)
def test_a_bad_corpus_names_its_line(tmp_path: Path, content: bytes, problem: str) -> None:
    """A corpus that cannot be read says where, and leaves no index behind."""
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(content)
    for _ in range(2):
        with pytest.raises(DataError, match=problem):
            open_index(corpus, tmp_path / "cache", quiet)
    with pytest.raises(DataError, match="No such file"):
        open_index(tmp_path / "absent.jsonl", tmp_path / "cache", quiet)


def test_titles_and_a_byte_order_mark(tmp_path: Path) -> None:
    """Passages with title and text are shown as Search-R1's corpus writes them."""
    corpus = tmp_path / "c.jsonl"
    corpus.write_bytes(b'\xef\xbb\xbf{"id": 7, "title": "Melk", "text": "A town."}\n')
    hit = open_index(corpus, tmp_path / "cache", quiet).search("town", 1)[0]
    assert (hit.passage.id, hit.passage.content) == ("7", '"Melk"\nA town.')


def test_real_passages_are_found(tmp_path: Path) -> None:
    """Over a thousand real passages, the supporting ones of most questions come up by their titles."""
    folder = hotpot()
    index = open_index(folder / "corpus.jsonl", tmp_path, quiet)
    questions = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    hits = 0
    for question in questions:
        shown = [hit.passage.content for hit in index.search(question["question"], 3)]
        hits += any(text.startswith(f'"{t}"') for text in shown for t in question["supporting_titles"])
    assert hits >= 80


class Memory:
    """A cache in memory."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def cache_get(self, key: bytes) -> bytes | None:
        """Return what was put."""
        return self.values.get(key)

    def cache_put(self, key: bytes, value: bytes) -> None:
        """Keep a value."""
        self.values[key] = value


class Scripted:
    """A back-end that answers what it is told, and counts."""

    name = "scripted"

    def __init__(self, *answers: Found, version: str = "1") -> None:
        self.version = version
        self.asked: list[str] = []
        self._answers = answers

    async def search(self, query: str, top_k: int) -> Found:
        """Return the next answer, the last one for ever."""
        self.asked.append(query)
        await anyio.lowlevel.checkpoint()
        return self._answers[min(len(self.asked), len(self._answers)) - 1]

    async def aclose(self) -> None:
        """Nothing is held."""


ONE = found([Passage("x", title="T", url="u", id="1", score=0.5)], 3)


def test_a_result_is_bought_once() -> None:
    """Equal queries, one after the other or at once, cost one request; the cached copy is equal."""
    backend, cache = Scripted(ONE), Memory()
    service = SearchService(backend, 3, cache)
    results: list[Found] = []

    async def ask() -> None:
        results.append(await service.search("q"))

    async def many() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
        await ask()

    anyio.run(many)
    assert backend.asked == ["q"]
    assert [result.cached for result in results] == [False] + [True] * 8
    assert {result.passages for result in results} == {ONE.passages}
    assert {(result.ok, result.status, result.error) for result in results} == {(True, "success", "")}


def test_what_the_cache_depends_on() -> None:
    """Another query, back-end version or number of results is another entry; an empty result is one too."""
    cache = Memory()

    async def run() -> None:
        for query, version, top_k in (("q", "1", 3), ("r", "1", 3), ("q", "2", 3), ("q", "1", 2)):
            backend = Scripted(found([], 3), version=version)
            assert not (await SearchService(backend, top_k, cache).search(query)).cached
        again = await SearchService(Scripted(ONE), 3, cache).search("q")
        assert (again.ok, again.cached, again.status, again.passages) == (True, True, "empty", ())

    anyio.run(run)
    assert len(cache.values) == 4


def test_faults_are_not_kept_and_no_cache_means_none() -> None:
    """A failed search is asked again; without a cache everything is."""

    async def run() -> None:
        backend = Scripted(fault("timeout", "no answer"), ONE)
        service = SearchService(backend, 3, Memory())
        assert not (await service.search("q")).ok
        assert (await service.search("q")).ok
        assert (await service.search("q")).cached
        assert len(backend.asked) == 2
        bare = Scripted(ONE)
        for _ in range(2):
            assert not (await SearchService(bare, 3).search("q")).cached
        assert len(bare.asked) == 2

    anyio.run(run)


class Stuck(Scripted):
    """A back-end whose first search never ends."""

    def __init__(self) -> None:
        super().__init__(ONE)
        self.begun = anyio.Event()

    async def search(self, query: str, top_k: int) -> Found:
        """Return an answer, but for the first time."""
        result = await super().search(query, top_k)
        if len(self.asked) == 1:
            self.begun.set()
            await anyio.sleep_forever()
        return result


def test_a_cancelled_search_lets_the_next_one_ask() -> None:
    """Whoever waits for the same query takes over when the one who asked is cancelled."""

    async def run() -> None:
        backend = Stuck()
        service = SearchService(backend, 3, Memory())
        scope = anyio.CancelScope()

        async def first() -> None:
            with scope:
                await service.search("q")

        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                await backend.begun.wait()
                tasks.start_soon(service.search, "q")
                await anyio.lowlevel.checkpoint()
                scope.cancel()
        assert backend.asked == ["q", "q"]

    anyio.run(run)


def run_tool(tool: Tool, **arguments: str) -> ToolResult:
    """Return what a tool answers."""
    return anyio.run(tool.run, arguments)


def test_tools_from_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The world's corpus is found in the run; search and the calculator are built."""
    monkeypatch.setenv("ROLLTAPE_CACHE", str(tmp_path / "cache"))
    write_world(tmp_path / "world", 0)
    cache = Memory()
    tools = build_tools(ToolSettings(declared=("search", "calculator")), tmp_path, cache)
    assert [tool.spec for tool in tools.values()] == [SEARCH_SPEC, CALCULATOR_SPEC]
    result = run_tool(tools["search"], query="mayor of Melk")
    text = text_of([piece for block in result.blocks for piece in block])
    assert text.startswith("[1] The mayor of Melk is ")
    assert (result.ok, result.status, result.backend, len(result.document_ids)) == (
        True,
        "success",
        "local",
        3,
    )
    assert not run_tool(tools["search"], query="mayor of Melk").cached
    with pytest.raises(ConfigError, match="no tool 'browse', expected search or calculator"):
        build_tools(ToolSettings(declared=("browse",)), tmp_path, None)
    for tool in tools.values():
        anyio.run(tool.aclose)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (SearchSettings(backend="retrieval", url="http://127.0.0.1:9/retrieve"), "cached"),
        (SearchSettings(backend="retrieval", url="http://127.0.0.1:9/retrieve", cache=False), "not cached"),
        (SearchSettings(backend="local", corpus="world"), "not cached"),
        (SearchSettings(backend="none"), "not cached"),
    ],
)
def test_what_is_bought_is_kept(tmp_path: Path, settings: SearchSettings, kept: str) -> None:
    """The run's cache stands before a service, unless switched off, and never before what costs nothing."""
    write_world(tmp_path / "world", 0)
    tool = build_tools(ToolSettings(search=settings), tmp_path, Memory())["search"]
    assert isinstance(tool, SearchTool)
    assert repr(tool.service).endswith(f", {kept}>")
    anyio.run(tool.aclose)


def test_a_search_that_fails_says_so() -> None:
    """A fault is a result that is not ok, with a notice that the policy may be shown."""
    tool = SearchTool(SearchService(Scripted(fault("auth", "access refused", fatal=True)), 3))
    result = run_tool(tool, query="q")
    assert (result.ok, result.fatal, result.status) == (False, True, "auth")
    assert text_of(result.blocks[0]) == "Search failed: access refused"


def test_finding_nothing(tmp_path: Path) -> None:
    """An empty result has a fixed text; the back-end that finds nothing always has it."""
    tools = build_tools(ToolSettings(search=SearchSettings(backend="none")), tmp_path, None)
    result = run_tool(tools["search"], query="anything")
    assert (result.ok, result.status, text_of(result.blocks[0])) == (True, "empty", "No results found.")
    assert repr(NoSearch()) == "<NoSearch>"


def test_results_with_titles_are_small_forms() -> None:
    """Title, content, source and URL, each on a line of its own, numbered from 1."""
    blocks = show([Passage("One.", title="A", source="S", url="u"), Passage("Two.")])
    assert text_of([p for block in blocks for p in block]) == (
        "[1] Title: A\n    Content: One.\n    Source: S\n    URL: u\n[2] Two."
    )


def test_the_index_is_cached_for_the_user_or_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache folder is the user's; the environment may name another."""
    monkeypatch.setenv("ROLLTAPE_CACHE", str(tmp_path / "mine"))
    corpus = write_corpus(tmp_path / "c.jsonl", [(1, "fact")])
    made = open_local(corpus, tmp_path / "spare", quiet)
    assert isinstance(made, LocalSearch)
    assert (tmp_path / "mine" / "bm25").is_dir()
    assert not (tmp_path / "spare").exists()
    monkeypatch.delenv("ROLLTAPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "rolltape"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(2014 - 1957) * 12", "684"),
        ("7 / 2", "3.5"),
        ("2 ** 10 % 1000", "24"),
        ("-3 // 2", "-2"),
        ("1e3 + .5", "1000.5"),
        ("10 ** -2", "0.01"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    """Numbers, operators and parentheses are computed; whole results are written as such."""
    assert calculate(expression) == (value, "")


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0",
        "2 +",
        "__import__('os')",
        "x",
        "9 ** 9 ** 9",
        "1e308 * 10",
        "(-1) ** .5",
        "'a' * 3",
        "",
        "1" * 300,
        "(" * 100 + "1" + ")" * 100,
        "-" * 150 + "1",
        "True + 1",
        "[1]",
    ],
)
def test_expressions_that_are_not_computed(expression: str) -> None:
    """Everything else is refused with a reason, whatever it would cost to compute."""
    value, problem = calculate(expression)
    assert (value, bool(problem)) == ("", True)


@given(st.text(alphabet="0123456789+-*/%(). e", max_size=60))
def test_no_expression_raises(expression: str) -> None:
    """Any string gives a value or a reason."""
    value, problem = calculate(expression)
    assert bool(value) != bool(problem)


def test_the_calculator_answers_errors() -> None:
    """A wrong expression is the policy's doing: an answer, not a fault."""
    tools = build_tools(ToolSettings(declared=("calculator",)), Path(), None)
    result = run_tool(tools["calculator"], expression="1/0")
    assert (result.ok, result.status) == (True, "bad_input")
    assert text_of(result.blocks[0]) == "Error: division by zero"
