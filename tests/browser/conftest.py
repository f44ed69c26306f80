"""A real headless Chromium for the page's tests; they are skipped where there is none."""

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Give one browser for all tests of this process, with a profile of its own."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium here: install Debian's package `chromium`")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit(NamedTuple):
    """An open page, and all that it said or asked for since it was opened."""

    page: Any
    complaints: list[str]
    """Console errors, uncaught exceptions, dialogs."""
    requests: list[str]

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements that a selector finds."""
        return list(self.page.locator(selector).all_inner_texts())

    def count(self, selector: str) -> int:
        """Return how many elements a selector finds."""
        return int(self.page.locator(selector).count())

    def wait_for_count(self, text: str | re.Pattern[str]) -> None:
        """Wait until the search has ended and its count reads so."""
        sync_api.expect(self.page.locator("#filter-count")).to_have_text(text)

    def ask(self, script: str) -> Any:
        """Return what a script says in the page."""
        return self.page.evaluate(script)


Visitor = Callable[..., Visit]


@pytest.fixture
def visit(chromium: Any) -> Iterator[Visitor]:
    """Give a function that opens a file in a fresh context and waits until its list is drawn."""
    contexts: list[Any] = []

    def open_file(path: Path, address: str = "", *, scheme: str = "light", width: int = 1440) -> Visit:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        seen = Visit(page, [], [])
        page.on("console", lambda message: note(seen, message.type, message.text))
        page.on("pageerror", lambda error: seen.complaints.append(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: (seen.complaints.append("dialog"), dialog.dismiss()))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.goto(f"{path.as_uri()}{address}")
        seen.wait_for_count(re.compile("in [0-9,]+ groups?$"))
        return seen

    yield open_file
    for context in contexts:
        context.close()


def note(seen: Visit, kind: str, text: str) -> None:
    """Keep what the console says when something is wrong."""
    if kind in {"error", "warning"}:
        seen.complaints.append(f"{kind}: {text}")
