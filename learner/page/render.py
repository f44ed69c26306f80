"""Owns the HTML file: the template filled with data blocks, style and scripts, whole or not at all.

The page needs no network and allows none: a content security policy lets exactly its own script and style
run, by their digests. Data stand in JSON blocks in which no markup can begin or end; the scripts build
the document from text only.
"""

import base64
import contextlib
import hashlib
import html
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

import msgspec

from core.errors import ConfigError
from learner.page.groups import show_group
from learner.page.model import GroupCard, Limits, PageIndex, StepFacts
from learner.page.packing import Vocabulary
from learner.page.run import choose_steps, read_run, spread
from learner.page.steps import FORMULAS, RunSource, StepSource, curve_point, derived_of, read_step, step_facts
from learner.page.turns import Inks
from learner.pieces import Pieces, Tokenizer
from learner.rebuild import CodeLoader, no_code
from store.log import Log

_HERE: Final = Path(__file__).parent
SCRIPTS: Final = (
    "page_text.js",
    "page_data.js",
    "page_state.js",
    "page_charts.js",
    "page_list.js",
    "page_tree.js",
    "page_tokens.js",
    "page_turns.js",
    "page_keys.js",
    "page.js",
)
"""One program in parts, in this order."""
PLACE: Final = re.compile(r"\{\{(\w+)\}\}")
"""Where the template is filled in."""
ESCAPES: Final = (
    (b"<", b"\\u003c"),
    (b">", b"\\u003e"),
    (b"&", b"\\u0026"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


class PageSummary(NamedTuple):
    """What a written page holds."""

    path: Path
    steps: int
    groups: int
    trajectories: int
    size: int
    """Bytes of the file."""
    cut: str
    """What it does not hold; "" when it holds all that was asked for."""


def write_page(
    log: Log,
    tokenizer: Tokenizer,
    out: Path,
    *,
    steps: Sequence[int] | None = None,
    max_trajectories: int = 1000,
    load: CodeLoader = no_code,
) -> PageSummary:
    """Write the page of a run, or of some of its steps, to `out`, replacing it whole.

    Whole steps are kept while they fit (the last, the first, then between), groups of the first one at least.
    Raises ReplayError (a step that was never planned, an empty log) or ConfigError (`out` not writable).
    """
    run = read_run(log)
    wanted = choose_steps(run, steps)
    sources = (read_step(log, step, load) for step in spread(wanted))
    limits = Limits(trajectories=max_trajectories)
    return render_page(run, sources, len(wanted), Pieces(tokenizer), out, limits)


def render_page(
    run: RunSource, sources: Iterable[StepSource], wanted: int, pieces: Pieces, out: Path, limits: Limits
) -> PageSummary:
    """Write the page of `wanted` steps that `sources` yield, the most important first; see `write_page`."""
    head, tail = _template().split("{{blocks}}")
    title = html.escape(f"Rolltape · {run.facts.run_id[:12]}")
    filling = _Filling(Vocabulary(pieces), limits)
    with _replacing(out) as file:
        file.write(_fill(head, {"title": title, "policy": _policy(), "style": _style()}).encode())
        for source in sources:
            if not filling.has_room(source):
                break
            filling.add(source, file)
        cut = filling.cut(wanted)
        index = PageIndex(
            run=msgspec.structs.replace(run.facts, cut=cut),
            steps=filling.steps(run),
            groups=sorted(filling.cards, key=lambda card: card.step),
            formulas=dict(FORMULAS),
        )
        file.write(_block("vocabulary", filling.inks.vocabulary.block()))
        file.write(_block("index", index))
        file.write(_fill(tail, {"script": _script()}).encode())
        size = file.tell()
    return PageSummary(out, len(filling.shown), len(filling.cards), filling.trajectories, size, cut)


class _Filling:
    """What the page holds so far."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        self.inks = Inks(vocabulary, limits)
        self.shown: dict[int, StepFacts] = {}
        self.cards: list[GroupCard] = []
        self.trajectories = 0
        self.hidden_groups = 0
        self._size = 0

    def __repr__(self) -> str:
        return f"<_Filling of {len(self.shown)} steps, {self.trajectories} trajectories, {self._size} bytes>"

    @property
    def _left(self) -> int:
        full = self._size >= self.inks.limits.size
        return 0 if full else self.inks.limits.trajectories - self.trajectories

    def has_room(self, source: StepSource) -> bool:
        """Tell whether a step fits whole, or is the first."""
        return not self.shown or source.planned.members <= self._left

    def add(self, source: StepSource, file: IO[bytes]) -> None:
        """Write the blocks of a step's groups, as many as fit."""
        step, derived = source.planned.step, derived_of(source)
        self.shown[step] = step_facts(source)
        for taken in source.taken:
            if self._left <= 0:
                self.hidden_groups += 1
                continue
            shown = show_group(taken, step, derived, self.inks, self._left)
            written = _block(f"group-{step}-{shown.card.uid}", shown.block)
            file.write(written)
            self._size += len(written)
            self.trajectories += len(shown.card.leaves)
            self.cards.append(shown.card)

    def cut(self, wanted: int) -> str:
        """Return what was asked for and is not on the page; "" when nothing is missing."""
        leaves = sum(card.hidden_leaves for card in self.cards)
        missing = [
            (len(self.shown) < wanted, f"{len(self.shown)} of {wanted} steps, spread over the run"),
            (self.hidden_groups > 0, f"{self.hidden_groups} groups of a step are left out"),
            (leaves > 0, f"{leaves} trajectories of a group are left out"),
        ]
        parts = [text for is_missing, text in missing if is_missing]
        limit = f"the limit is {self.inks.limits.trajectories} trajectories (--max-trajectories)"
        return f"This page is cut: {'; '.join(parts)}; {limit}." if parts else ""

    def steps(self, run: RunSource) -> list[StepFacts]:
        """Return every planned step, those on the page in full."""
        return [self.shown.get(step) or curve_point(step, run.commits.get(step)) for step in run.members]


def escape_json(raw: bytes) -> bytes:
    """Return JSON in which no markup can begin or end, and which every JavaScript reads alike."""
    for character, escaped in ESCAPES:
        raw = raw.replace(character, escaped)
    return raw


def _block(name: str, content: msgspec.Struct) -> bytes:
    body = escape_json(msgspec.json.encode(content))
    return b'<script type="application/json" id="%s">%s</script>\n' % (html.escape(name).encode(), body)


def _fill(template: str, values: Mapping[str, str]) -> str:
    return PLACE.sub(lambda found: values[found[1]], template)


def _policy() -> str:
    return (
        f"default-src 'none'; script-src '{_source(_script())}'; style-src '{_source(_style())}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _source(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _template() -> str:
    return (_HERE / "page.html").read_text(encoding="utf-8")


def _style() -> str:
    return (_HERE / "page.css").read_text(encoding="utf-8")


def _script() -> str:
    parts = [(_HERE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `out` when it is complete."""
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".rolltape-page-") as folder:
            path = Path(folder) / out.name
            with path.open("wb") as file:
                yield file
            path.replace(out)
    except OSError as error:
        raise ConfigError(
            f"cannot write the page to {str(out)!r}: {error}; name a file in a folder that exists"
        ) from error
