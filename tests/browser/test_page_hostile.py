"""Text that wants to act: markup, control characters and enormous lines, fed through a real Chromium."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.config import PackingSettings
from core.events import Outcome, Plan, Rewarded, ToolCalled, TurnSampled
from learner.page.model import Limits
from learner.page.render import render_page
from learner.page.turns import NAME, cut
from learner.pieces import Pieces
from tests.browser.conftest import Visit, Visitor
from tests.learner.told import Teller, Texts, tokenizer, told_run, told_step

pytestmark = pytest.mark.browser

MARKUP = (
    "<script>window.hit = 1</script><img src=x onerror='window.hit=2'>\"><svg onload=window.hit=3>"
    "</script><script>window.hit=4</script><!--<script>--><a href='javascript:window.hit=5'>go</a>"
    "<iframe srcdoc='<script>parent.hit=6</script>'></iframe><style>body{display:none}</style>"
    "{{script}}${window.hit=7}`$&'&lt;&amp;]]><math><mi//xlink:href='data:x,<script>hit=8</script>'>"
)
CONTROLS = "\u202edrawkcab\u202c \u2066isolate\u2069 \u200fmark \u200bzero \u2028line \u2029paragraph \x00nul \x1b[31mred \U000e0041tag \ufeff"
LONG = "x" * 1_000_000
WIDE = "שלום مرحبا ﷽ 👩‍👩‍👧‍👦 𠜎 e\u0301\u0301\u0301"


def hostile_page(out: Path, text: str) -> None:
    """Write a page in which every text that a model, a search engine or a question file can write is `text`."""
    texts = Texts(
        question=text,
        references=(text, text),
        source=text,
        query=text,
        content=text,
        thought=text,
        answer=text,
        error=text,
    )
    teller = Teller(1, texts, Plan(mode="chain", group_size=3))
    for tree in range(1, 4):
        teller.search(tree, "0.0.0", None, text, text)
        teller.end(tree, "0.0.1", "0.0.0", Outcome.ANSWERED if tree > 1 else Outcome.BAD_FORMAT)
    teller.records = [(tree, rewritten(event, text)) for tree, event in teller.records]
    wide = PackingSettings(max_datum_tokens=10_000_000, max_padded_tokens=50_000_000)
    step = told_step(0, [teller.taken()], packing=wide)
    run = told_run([step])
    facts = msgspec.structs.replace(
        run.facts,
        run_id=cut(text, NAME),
        base_model=cut(text, NAME),
        facts=[(cut(text, NAME), cut(text, NAME))],
        books=[(cut(text, NAME), 1)],
    )
    render_page(run._replace(facts=facts), [step], 1, Pieces(tokenizer()), out, Limits())


def rewritten(event: Any, text: str) -> Any:
    """Return an event in which names are hostile too."""
    match event:
        case ToolCalled():
            return msgspec.structs.replace(event, tool=text, arguments={text: text, "n": 3})
        case Rewarded():
            return msgspec.structs.replace(
                event, scorer=text, scorer_version=text, components={text: 1.0, "exact_match": 1.0}
            )
        case TurnSampled():
            return msgspec.structs.replace(event, stop_reason=text)
        case _:
            return event


def go_through(seen: Visit) -> None:
    """Open everything that can be opened: all parts, the dialogs, a tip, the other shading, a search."""
    page = seen.page
    for node in page.locator(".node").all():
        node.click()
    seen.ask("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    page.locator("#turns .token").first.hover()
    page.keyboard.press("s")
    page.locator("#about-open").click()
    page.keyboard.press("Escape")
    page.locator("#filter-text").fill("script")
    page.keyboard.press("Escape")
    page.keyboard.press("n")


@pytest.mark.parametrize("text", [MARKUP, CONTROLS, WIDE], ids=["markup", "controls", "scripts of the world"])
def test_nothing_runs_and_nothing_breaks(tmp_path: Path, visit: Visitor, text: str) -> None:
    """No script, no handler, no request, no dialog, no error; the page stays whole."""
    hostile_page(tmp_path / "hostile.html", text)
    seen = visit(tmp_path / "hostile.html")
    go_through(seen)
    assert seen.ask("window.hit") is None
    assert seen.complaints == []
    assert [request for request in seen.requests if not request.startswith("file:")] == []
    assert seen.count("script:not([type])") == 1
    assert seen.count("iframe, img, object, embed, math, link, a, body style") == 0
    assert seen.ask("document.documentElement.scrollWidth <= innerWidth")
    assert seen.page.locator("#turns .turn").count() == 2
    assert seen.page.locator("#help-open").is_visible()


def test_markup_is_read_as_text(tmp_path: Path, visit: Visitor) -> None:
    """What looks like markup is shown letter by letter."""
    hostile_page(tmp_path / "hostile.html", MARKUP)
    seen = visit(tmp_path / "hostile.html")
    assert seen.ask("document.querySelector('#trees h2').textContent") == MARKUP
    assert MARKUP in seen.ask("document.querySelector('#turns .sampled').textContent")
    assert MARKUP in seen.ask("document.querySelector('#turns .given-part .tokens').textContent")


def test_hidden_characters_become_visible(tmp_path: Path, visit: Visitor) -> None:
    """Direction, control and invisible characters are labels, in headings and inside tokens."""
    hostile_page(tmp_path / "hostile.html", CONTROLS)
    seen = visit(tmp_path / "hostile.html")
    for place in ("#trees h2", "#turns .sampled", "#list", ".reference", ".call"):
        labels = set(seen.texts(f"{place} .hidden-character"))
        assert {"U+202E", "U+2066", "U+200F", "U+0000", "U+001B", "U+2028", "U+E0041"} <= labels, place
    raw = seen.ask("document.body.innerText")
    assert not any(character in raw for character in "\u202e\u2066\u200f\u200b\x00\x1b\U000e0041")


def test_lines_of_a_megabyte_stay_quick(tmp_path: Path, visit: Visitor) -> None:
    """Texts of 1 MB are cut, which is said; the page opens, scrolls and searches within seconds."""
    hostile_page(tmp_path / "long.html", LONG)
    assert (tmp_path / "long.html").stat().st_size < 3_000_000
    seen = visit(tmp_path / "long.html")
    go_through(seen)
    assert seen.complaints == []
    assert seen.ask("document.documentElement.scrollWidth <= innerWidth")
    assert seen.count("#turns .tokens .token") < 20_000
    assert "more tokens" in " ".join(seen.texts("#turns .more"))
    assert "more characters" in " ".join(seen.texts("#trees .more"))
    took = seen.ask(
        "(() => { const from = performance.now(); const turns = document.getElementById('turns');"
        "for (let i = 0; i < 20; i += 1) { turns.scrollTop = i * 500; turns.getBoundingClientRect(); }"
        "return performance.now() - from; })()"
    )
    assert took < 2000


def test_the_policy_stops_what_the_page_itself_would_never_do(tmp_path: Path, visit: Visitor) -> None:
    """A second wall: an injected script, handler, style or request is refused by the browser."""
    hostile_page(tmp_path / "plain.html", "plain")
    seen = visit(tmp_path / "plain.html")
    attempts = (
        "const box = document.createElement('b'); box.setAttribute('onclick', 'window.hit=1'); box.click()",
        "const box = document.createElement('script'); box.text = 'window.hit = 2'; document.body.append(box)",
        "document.body.innerHTML = '<img src=x onerror=window.hit=3>'",
    )
    for attempt in attempts:
        assert (
            seen.ask(f"(() => {{ try {{ {attempt}; return 'done'; }} catch {{ return 'refused'; }} }})()")
            == "refused"
        )
    seen.ask(
        "{ const image = document.createElement('img'); image.src = 'http://127.0.0.1:9/x.png'; document.body.append(image); }"
    )
    refused = seen.ask("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert refused == "refused"
    assert seen.ask("window.hit") is None
    assert any("Content Security Policy" in complaint for complaint in seen.complaints)


@pytest.mark.parametrize("size", [(1280, 800), (1024, 700), (1024, 560)])
@pytest.mark.parametrize("text", ["x" * 5000, MARKUP], ids=["a long word", "markup"])
def test_long_texts_leave_room_for_the_tree(
    tmp_path: Path, visit: Visitor, text: str, size: tuple[int, int]
) -> None:
    """Question, references and source take their part of the window and scroll in it."""
    hostile_page(tmp_path / "page.html", text)
    seen = visit(tmp_path / "page.html", width=size[0])
    seen.page.set_viewport_size({"width": size[0], "height": size[1]})
    forest, pane = (seen.page.locator(part).bounding_box() for part in (".forest", "#trees"))
    assert forest is not None
    assert pane is not None
    assert forest["height"] >= 60
    assert forest["y"] + forest["height"] <= pane["y"] + pane["height"] + 1
