"""Owns turning published question sets into train, dev and test files.

Files are streamed twice: first to count, judge and choose, then to write. What is chosen depends on seed and
content alone, never on a row's place. Ids are unique over all files: an id that stands for several rows is
led by its source, and, where that is not enough, made from the content.
"""

import hashlib
import heapq
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from core.errors import ConfigError, DataError
from rollout.data import Example
from rollout.rows import Dropped, content_hash, content_id, read_row
from rollout.tables import read_rows

BENCHMARKS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
DEV_PER_SOURCE = 10
NOTICE_EVERY = 10_000


class Mix(NamedTuple):
    """Which sources train and which evaluate; () takes every source."""

    train: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()
    train_limits: tuple[tuple[str, int], ...] = ()
    """At most so many training questions of a source, drawn by seed."""


MIXES = {
    "search-r1": Mix(("nq", "hotpotqa"), BENCHMARKS),
    "single-hop": Mix(("nq",), BENCHMARKS[:3]),
    "multi-hop": Mix(("hotpotqa", "2wikimultihopqa", "musique"), BENCHMARKS[3:]),
    "web-agent": Mix(
        ("asearcher", "webdancer"),
        ("simpleqa", "gaia", "webwalkerqa", "browsecomp"),
        (("asearcher", 2000), ("webdancer", 200)),
    ),
    "all": Mix(),
}
"""The recipes' mixes: Search-R1's, and Tree-GRPO's three."""


class DroppedRow(msgspec.Struct, frozen=True):
    """A row that was left out, and why."""

    file: str
    row: int
    reason: str


class Prepared(msgspec.Struct, frozen=True):
    """What was written, in rows per split and source; what was left out, by reason."""

    counts: dict[str, dict[str, int]]
    dropped: dict[str, int]
    not_in_mix: dict[str, int]
    renamed: int
    """Questions whose id was taken or missing."""
    mix: str
    seed: int


Notify = Callable[[str], None]


class _Part(NamedTuple):
    """One output file's share of the input."""

    pool: str
    """"train" or "test": which input it is drawn from."""
    files: tuple[Path, ...]
    sources: tuple[str, ...]
    limits: dict[str, int]
    per_source: int | None = None

    def limit(self, source: str) -> int | None:
        """Return the most questions of a source, None for all."""
        return self.limits.get(source, self.per_source)


def prepare(
    out: Path, train: Sequence[Path], evaluation: Sequence[Path], *, mix: str, seed: int, notify: Notify
) -> Prepared:
    """Write train.jsonl, dev.jsonl, test.jsonl, dropped.jsonl and prepare.json into `out`; return the counts.

    test is every evaluation question, dev is DEV_PER_SOURCE of each of its sources, drawn by seed. A question
    that is also in test is left out of train. Raises ConfigError on an unknown mix or an input that would be
    overwritten, and DataError on a file that cannot be read or a part without a usable question.
    """
    if mix not in MIXES:
        raise ConfigError(f"no mix {mix!r}, expected one of {', '.join(MIXES)}")
    _check_inputs(out, (*train, *evaluation))
    chosen = MIXES[mix]
    test = _Part("test", tuple(evaluation), chosen.evaluation, {})
    parts = {
        "train": _Part("train", tuple(train), chosen.train, dict(chosen.train_limits)),
        "dev": test._replace(per_source=DEV_PER_SOURCE),
        "test": test,
    }
    survey = _Survey(seed, notify)
    survey.read(parts["test"])
    survey.read(parts["train"])
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / "dropped.jsonl", (msgspec.json.encode(row) for row in survey.dropped))
    counts = {name: _write(out / f"{name}.jsonl", part, survey) for name, part in parts.items() if part.files}
    prepared = Prepared(counts, dict(survey.reasons), dict(survey.outside), len(survey.renamed), mix, seed)
    _replace(out / "prepare.json", [msgspec.json.format(msgspec.json.encode(prepared), indent=2)])
    for name, found in counts.items():
        if not found:
            wanted = ", ".join(parts[name].sources) or "any source"
            raise DataError(
                f"no usable question for {name}.jsonl, expected some of {wanted}; "
                f"see {out / 'dropped.jsonl'} and {out / 'prepare.json'}"
            )
    return prepared


def _check_inputs(out: Path, files: Sequence[Path]) -> None:
    """Raise ConfigError when an input is one of the files to be written: it would be replaced, half read."""
    written = {(out / name).resolve() for name in ("train.jsonl", "dev.jsonl", "test.jsonl", "dropped.jsonl")}
    for path in files:
        if path.resolve() in written:
            raise ConfigError(
                f"{str(path)!r} would be overwritten: write into another folder than {str(out)!r}"
            )


class _Survey:
    """What the first reading found: which questions there are, ids in use, and what was left out."""

    def __init__(self, seed: int, notify: Notify) -> None:
        self.dropped: list[DroppedRow] = []
        self.reasons: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()
        self.renamed: set[bytes] = set()
        self._owners: dict[bytes, tuple[str, str]] = {}
        self._ids: Counter[bytes] = Counter()
        self._qualified: Counter[bytes] = Counter()
        self._seed = seed
        self._notify = notify
        self._rows = 0

    def read(self, part: _Part) -> None:
        """Judge every row of a part's files."""
        for path, number, example in _examples(part):
            self._rows += 1
            if self._rows % NOTICE_EVERY == 0:
                self._notify(f"read {self._rows:,} rows")
            if isinstance(example, Dropped):
                self._drop(path, number, example.reason)
            elif part.sources and example.data_source not in part.sources:
                self.outside[example.data_source] += 1
            else:
                self._keep(part, path, number, example)

    def _keep(self, part: _Part, path: Path, number: int, example: Example) -> None:
        content = content_hash(example)
        if content in self._owners:
            again = self._owners[content][0] == part.pool
            self._drop(path, number, "duplicate question" if again else "also in the test set")
            return
        self._owners[content] = (part.pool, sys.intern(example.data_source))
        self._ids[_short(example.id)] += 1
        self._qualified[_short(_qualify(example))] += 1

    def _drop(self, path: Path, number: int, reason: str) -> None:
        self.reasons[reason] += 1
        self.dropped.append(DroppedRow(str(path), number, reason))

    def usable(self, part: _Part) -> Iterator[Example]:
        """Yield a part's questions, each once, in the order of the files."""
        seen: set[bytes] = set()
        for _, _, example in _examples(part):
            if isinstance(example, Dropped):
                continue
            content = content_hash(example)
            if content not in seen and self._owners.get(content, ("", ""))[0] == part.pool:
                seen.add(content)
                yield example

    def name(self, example: Example) -> Example:
        """Return the example under an id that no other question has."""
        if example.id and self._ids[_short(example.id)] == 1:
            return example
        self.renamed.add(content_hash(example))
        qualified = _qualify(example)
        short = _short(qualified)
        unique = bool(example.id) and self._qualified[short] == 1 and not self._ids[short]
        return msgspec.structs.replace(example, id=qualified if unique else content_id(example))

    def rank(self, content: bytes) -> bytes:
        """Return where the seed's draw puts a question: its content decides, not its place."""
        return hashlib.sha256(f"{self._seed}\0".encode() + content).digest()[:8]

    def bounds(self, part: _Part) -> dict[str, bytes]:
        """Return per limited source the highest rank that is still drawn."""
        ranks: dict[str, list[bytes]] = {}
        for content, (pool, source) in self._owners.items():
            if pool == part.pool and part.limit(source) is not None:
                ranks.setdefault(source, []).append(self.rank(content))
        return {
            source: heapq.nsmallest(part.limit(source) or 0, found)[-1] for source, found in ranks.items()
        }


def _examples(part: _Part) -> Iterator[tuple[Path, int, Example | Dropped]]:
    for path in part.files:
        default_source = path.stem
        for row in read_rows(path):
            if row.problem:
                yield path, row.number, Dropped(row.problem)
            else:
                yield path, row.number, read_row(row.value, default_source)


def _write(path: Path, part: _Part, survey: _Survey) -> dict[str, int]:
    bounds = survey.bounds(part)
    counts: Counter[str] = Counter()

    def lines() -> Iterator[bytes]:
        for example in survey.usable(part):
            bound = bounds.get(example.data_source)
            if bound is None or survey.rank(content_hash(example)) <= bound:
                counts[example.data_source] += 1
                yield msgspec.json.encode(survey.name(example))

    _replace(path, lines())
    return dict(sorted(counts.items()))


def _replace(path: Path, lines: Iterator[bytes] | Sequence[bytes]) -> None:
    """Write a file aside and put it in place whole."""
    aside = path.with_suffix(f".{os.getpid()}.part")
    with aside.open("wb") as file:
        file.writelines(line + b"\n" for line in lines)
    aside.rename(path)


def _qualify(example: Example) -> str:
    return f"{example.data_source}_{example.id}"


def _short(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:8]
