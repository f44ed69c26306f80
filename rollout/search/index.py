"""Owns the BM25 index of a corpus: built once per content, cached on disk, opened by memory map.

The corpus is JSONL, {"id", "contents"} or {"id", "title", "text"} a line, streamed: nothing of it is held
in Python. An index is named by the SHA-256 of its corpus, built aside and renamed into place, so processes
may race and a killed build leaves nothing that looks whole. BM25 is tantivy's (k1 = 1.2, b = 0.75, document
lengths in 256 steps); words are runs of letters and digits, lower case, accents folded; Chinese and Japanese
characters and Hangul syllables are words of their own.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import tantivy

from core.errors import DataError
from rollout.search.base import Passage

FORMAT = "1"
"""Raised when words are cut or stored differently: old indexes are then built anew."""

HEAP_BYTES = 128_000_000
READ_BYTES = 1 << 20
NOTICE_EVERY = 500_000
MAX_QUERY_WORDS = 128
MAX_TIED = 4096
"""How far to look for passages that tie with the last one shown."""

UNSPACED = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"
)

Notify = Callable[[str], None]


class CorpusLine(msgspec.Struct):
    """One passage as the corpus has it."""

    id: str | int
    contents: str | None = None
    title: str | None = None
    text: str | None = None

    def passage(self) -> str:
        """Return the text that is searched and shown."""
        if self.contents is not None:
            return self.contents
        return f'"{self.title or ""}"\n{self.text or ""}'


class Hit(NamedTuple):
    """A passage with its BM25 score."""

    score: float
    passage: Passage


class Index:
    """An open index; searching is thread-safe."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.digest = digest
        self._analyser = _analyser()
        index = tantivy.Index.open(str(folder))
        index.register_tokenizer("words", _analyser())
        index.reload()
        self._schema = index.schema
        self._searcher = index.searcher()

    def __repr__(self) -> str:
        return f"<Index of {self._searcher.num_docs} passages, corpus {self.digest[:12]}>"

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return the best `top_k` passages; equal scores stand in the order of their ids."""
        words = list(dict.fromkeys(self._analyser.analyze(_spaced(query))))[:MAX_QUERY_WORDS]
        if not words or top_k < 1:
            return []
        terms = [
            (tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "words", word)) for word in words
        ]
        found = tantivy.Query.boolean_query(terms)
        limit = top_k + 16
        hits = self._searcher.search(found, limit, count=False).hits
        while len(hits) == limit and hits[-1][0] == hits[top_k - 1][0] and limit < MAX_TIED:
            limit *= 4
            hits = self._searcher.search(found, limit, count=False).hits
        worst = hits[min(top_k, len(hits)) - 1][0] if hits else 0.0
        shown = [self._hit(score, address) for score, address in hits if score >= worst]
        return sorted(shown, key=lambda hit: (-hit.score, id_order(hit.passage.id)))[:top_k]

    def _hit(self, score: float, address: tantivy.DocAddress) -> Hit:
        document = self._searcher.doc(address)
        content = bytes(document["contents"][0]).decode()
        return Hit(score, Passage(content=content, id=document["id"][0], score=score))


def id_order(identifier: str) -> tuple[int, int, str]:
    """Return what ids are ordered by: whole numbers by value, then the others as text."""
    if identifier.isascii() and identifier.isdecimal():
        return (0, int(identifier), identifier)
    return (1, 0, identifier)


def open_index(corpus: Path, root: Path, notify: Notify) -> Index:
    """Return the index of `corpus`, from the cache folder `root` or built into it.

    Raises DataError when the corpus cannot be read, naming the line.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        digest = _digest(corpus, root)
        folder = root / f"{digest[:32]}-{FORMAT}"
        with _locked(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _build(corpus, folder, notify)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"cannot index the corpus {str(corpus)!r} under {str(root)!r}: {reason}") from error
    return Index(folder, digest)


def corpus_lines(corpus: Path) -> Iterator[CorpusLine]:
    """Yield the passages of a JSONL corpus; raises DataError naming the line."""
    decoder = msgspec.json.Decoder(CorpusLine)
    with corpus.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                decoded = decoder.decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                expected = '{"id": ..., "contents": ...}'
                raise DataError(f"{corpus} line {number}: {error}; expected {expected}") from error
            if decoded.contents is None and decoded.text is None:
                raise DataError(f"{corpus} line {number}: neither 'contents' nor 'text' in it")
            yield decoded


def _digest(corpus: Path, root: Path) -> str:
    """Return the SHA-256 of the corpus; remembered per path, size and time, for it may be many gigabytes."""
    stat = corpus.stat()
    place = f"{corpus.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    memo = root / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.digest"
    if memo.is_file():
        return memo.read_text(encoding="ascii")
    digest = hashlib.sha256()
    with corpus.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    temporary = memo.with_suffix(f".{os.getpid()}")
    temporary.write_text(digest.hexdigest(), encoding="ascii")
    temporary.rename(memo)
    return digest.hexdigest()


class _locked:  # noqa: N801 reads as a statement
    """Holds a file lock: two processes must not build the same index twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> None:
        self._file = self._path.open("ab")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()


def _build(corpus: Path, folder: Path, notify: Notify) -> None:
    aside = folder.with_suffix(".building")
    shutil.rmtree(aside, ignore_errors=True)  # of a build that was killed: we hold the lock
    aside.mkdir()
    schema = tantivy.SchemaBuilder()
    schema.add_text_field("id", stored=True, tokenizer_name="raw", index_option="basic")
    schema.add_text_field("words", tokenizer_name="words", index_option="freq")
    schema.add_bytes_field("contents", stored=True, indexed=False)
    index = tantivy.Index(schema.build(), path=str(aside))
    index.register_tokenizer("words", _analyser())
    writer = index.writer(HEAP_BYTES, 1)
    count = 0
    for line in corpus_lines(corpus):
        writer.add_document(_document(line))
        count += 1
        if count % NOTICE_EVERY == 0:
            notify(f"indexing {corpus.name}: {count:,} passages")
    if not count:
        raise DataError(f"{corpus}: no passages in it, expected one JSON object per line")
    writer.commit()
    writer.wait_merging_threads()
    aside.rename(folder)


def _document(line: CorpusLine) -> tantivy.Document:
    document = tantivy.Document()
    text = line.passage()
    document.add_text("id", str(line.id))
    document.add_text("words", _spaced(text))
    document.add_bytes("contents", text.encode())
    return document


def _analyser() -> tantivy.TextAnalyzer:
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    return builder.filter(tantivy.Filter.lowercase()).filter(tantivy.Filter.ascii_fold()).build()


def _spaced(text: str) -> str:
    """Return the text with space around characters that are words of their own."""
    return text if text.isascii() else UNSPACED.sub(r" \g<0> ", text)
