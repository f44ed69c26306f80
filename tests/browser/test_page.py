"""The page in a real Chromium: what it draws, how it is gone through, and that links open the same place."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.arrays import view_logprobs
from core.events import Plan
from learner.page.model import HeldOut, Limits
from learner.page.render import PageSummary, render_page
from learner.page.steps import StepSource
from learner.pieces import Pieces
from tests.browser.conftest import Visit, Visitor, sync_api
from tests.learner.told import TREES, tokenizer, told_group, told_run, told_step, told_steps

pytestmark = pytest.mark.browser


def write(out: Path, steps: Sequence[StepSource], limits: Limits | None = None) -> PageSummary:
    """Write the page of made-up steps."""
    run = told_run(
        steps,
        [
            HeldOut(points=[(0, 0.2), (2, 0.5)]),
            HeldOut(differs="temperature 0.0", points=[(0, 0.4), (2, 0.9)]),
        ],
    )
    return render_page(run, steps, len(steps), Pieces(tokenizer()), out, limits or Limits())


@pytest.fixture(scope="module")
def trees() -> list[StepSource]:
    """Give three steps of three groups of trees."""
    return told_steps(3, 3, lambda ticket: told_group(ticket, TREES), estimator="tree")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, trees: list[StepSource]) -> Path:
    """Give the page of `trees`."""
    out = tmp_path_factory.mktemp("page") / "run.html"
    write(out, trees)
    return out


def selected(seen: Visit) -> tuple[str, str, list[str]]:
    """Return the question, the trajectory and the turn that are open."""
    page = seen.page
    return (
        page.locator("#trees h2").inner_text(),
        page.locator("#turns h3").inner_text(),
        seen.texts("#turns .turn.here header b"),
    )


def test_it_opens_whole_and_asks_for_nothing(file: Path, visit: Visitor) -> None:
    """Nothing is requested but the file itself, and nothing is reported as wrong."""
    seen = visit(file)
    assert seen.complaints == []
    assert seen.requests == [file.as_uri()]
    assert seen.ask("document.documentElement.scrollHeight") == 900
    assert seen.texts("#filter-count")[0].endswith("in 9 groups")
    assert seen.count("#charts path.line.reward") == 1
    assert seen.count("#charts circle.held-out") == 4
    assert seen.count("#charts path.line.held-out") == 2, "no line joins evaluations that asked otherwise"
    assert seen.page.locator("#charts .key.other").get_attribute("title") == "held-out, temperature 0.0"
    assert seen.texts(".step-row .verdict") == ["match"] * len(seen.texts(".step-row"))


def test_a_tree_is_drawn_with_its_shared_prefix_once(
    file: Path, trees: list[StepSource], visit: Visitor
) -> None:
    """Every turn stands once, below its parent's column, and every leaf shows reward and advantage."""
    group = trees[0].taken[0].group
    seen = visit(file, f"#step=0&group={group.uid}")
    nodes = [node for tree in group.trees.values() for node in tree.nodes.values()]
    assert (
        seen.count(".node")
        == len(nodes)
        < sum(len(tree.path(leaf.node)) for tree in group.trees.values() for leaf in tree.leaves())
    )
    leaves = [node for node in nodes if node.answer is not None]
    shown = seen.texts(".result .value:first-of-type")
    told = [f"{leaf.reward.value:.2f}".replace("-", "−") if leaf.reward else "–" for leaf in leaves]
    assert sorted(shown) == sorted(told)
    assert seen.count(".result i.reward.r8") == sum(text == "1.00" for text in told)
    assert seen.count(".result i.reward.low") == sum(text == "−0.10" for text in told)
    assert seen.ask("[...document.querySelectorAll('.node')].every(n => n.offsetLeft >= 30)")


def test_nodes_are_coloured_by_the_sign_of_their_advantage(
    file: Path, trees: list[StepSource], visit: Visitor
) -> None:
    """A node is blue or orange by the mean over the members below it; one that no member holds is hatched."""
    rebuilt = trees[0].rebuilt
    assert rebuilt is not None
    uid = trees[0].taken[0].group.uid
    below: dict[str, list[float]] = {}
    for member, value in zip(rebuilt.batch.members, rebuilt.batch.advantages.leaf, strict=True):
        for node in member.path if member.group.uid == uid else ():
            below.setdefault(f"{member.tree - 1} {node.node}", []).append(float(value))
    seen = visit(file, f"#step=0&group={uid}")
    drawn = seen.ask(
        "Object.fromEntries([...document.querySelectorAll('.node')].map(n => "
        "[n.id.split('-')[1] + ' ' + n.title.split(' ')[0], n.className]))"
    )
    assert below.keys() <= drawn.keys()
    for name, classes in drawn.items():
        mean = sum(below[name]) / len(below[name]) if name in below else None
        kind = "untrained" if mean is None else r"p[1-8]" if mean > 0 else r"n[1-8]"
        assert re.search(rf"\b{kind}\b", classes), (name, mean, classes)


def test_a_click_opens_the_turn_with_its_call_and_observation(file: Path, visit: Visitor) -> None:
    """The clicked turn is marked and in sight; its call and what was observed stand with it."""
    seen = visit(file)
    seen.page.locator(".node", has=seen.page.locator("svg")).first.click()
    seen.page.locator("#turns .turn.here").wait_for()
    part = seen.page.locator("#turns .turn.here").first
    assert part.locator(".call b").inner_text() == "search"
    assert "capital of" in part.locator(".call .argument").inner_text()
    assert "The capital of" in part.locator(".tokens.given").inner_text()
    assert "outside the loss" in part.locator(".given-part summary").inner_text()
    assert seen.complaints == []


def test_tokens_are_shaded_and_say_their_logprob(file: Path, trees: list[StepSource], visit: Visitor) -> None:
    """Sampled tokens carry the advantage's shade and the recorded logprob; observed ones neither."""
    rebuilt = trees[1].rebuilt
    assert rebuilt is not None
    position = int(abs(rebuilt.batch.advantages.leaf).argmax())
    member = rebuilt.batch.members[position]
    value = float(rebuilt.batch.advantages.leaf[position])
    seen = visit(file, f"#step=1&group={member.group.uid}&at={member.tree}/{member.leaf}")
    kind = "p8" if value > 0 else "n8"
    assert seen.count(f"#turns .sampled .token.{kind}") == sum(
        len(node.sample.tokens) // 4 for node in member.path
    )
    assert seen.count("#turns .given .token") > 0
    assert seen.count("#turns .given .token:is([class*=' p'], [class*=' n'])") == 0
    logprob = float(view_logprobs(member.path[0].sample.sampled_logprobs)[2])
    seen.page.locator("#turns .sampled").first.locator(".token").nth(2).hover()
    tip = seen.page.locator("#tip").inner_text()
    assert f"{abs(logprob):.4f}".rstrip("0").rstrip(".") in tip
    assert "inside" in tip
    seen.page.locator("#turns .given .token").nth(3).hover()
    assert "outside: given to the policy" in seen.page.locator("#tip").inner_text()


def test_shading_by_logprob_changes_no_place(file: Path, visit: Visitor) -> None:
    """The other shading is one key away, and part of the address."""
    seen = visit(file)
    before = selected(seen)
    seen.page.keyboard.press("s")
    assert "shade=logprob" in seen.ask("location.hash")
    assert seen.count("#turns .sampled .token[class*=' s']") > 0
    assert seen.count("#turns .sampled .token:is([class*=' p'], [class*=' n'])") == 0
    assert selected(seen) == before


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("outcome", "bad_format", lambda leaf: leaf.answer.outcome == "bad_format"),
        ("min", "0.5", lambda leaf: leaf.reward is not None and leaf.reward.value >= 0.5),
        ("max", "-0.05", lambda leaf: leaf.reward is not None and leaf.reward.value <= -0.05),
    ],
)
def test_filters_count_what_fits(
    file: Path, trees: list[StepSource], visit: Visitor, field: str, value: str, fits: Any
) -> None:
    """Outcome and reward filter leaves over all groups."""
    seen = visit(file)
    control = seen.page.locator(f"#filter-{field}")
    control.select_option(value) if field == "outcome" else control.fill(value)
    leaves = [
        leaf
        for step in trees
        for taken in step.taken
        for tree in taken.group.trees.values()
        for leaf in tree.leaves()
    ]
    expected = sum(bool(fits(leaf)) for leaf in leaves)
    seen.wait_for_count(re.compile(f"^{expected} of {len(leaves)} "))
    assert f"{field}=" in seen.ask("location.hash")


def test_text_search_finds_observations_and_marks_tokens(
    file: Path, trees: list[StepSource], visit: Visitor
) -> None:
    """A word that only an observation holds finds its trajectories; its tokens are marked."""
    seen = visit(file)
    seen.page.keyboard.press("/")
    seen.page.keyboard.type("The ruler of Belmark")
    seen.wait_for_count(re.compile("^[0-9]+ of .* in 1 group$"))
    seen.page.keyboard.press("Escape")
    seen.page.keyboard.press("j")
    assert "Belmark" in selected(seen)[0]
    seen.page.locator(".node:not(.dim)").first.click()
    assert "".join(seen.texts("#turns .given .token.found")).startswith(
        " ruler of Belmark"
    ) or "ruler" in "".join(seen.texts("#turns .given .token.found"))
    assert seen.count(".result.dim") + seen.count(".result:not(.dim)") == seen.count(".result")
    seen.page.locator("#filter-clear").click()
    seen.wait_for_count(re.compile("in 9 groups$"))


def test_a_source_filter_keeps_its_groups(file: Path, visit: Visitor) -> None:
    """Groups of another source leave the list."""
    seen = visit(file)
    seen.page.locator("#filter-source").select_option("one-hop")
    seen.wait_for_count(re.compile("in 5 groups$"))
    assert seen.count(".group-row") == 5


def test_a_link_opens_the_same_place_again(file: Path, visit: Visitor) -> None:
    """Group, trajectory, turn, shading and filter all come back from the address alone."""
    first = visit(file)
    first.page.keyboard.press("[")
    first.page.keyboard.press("j")
    first.page.keyboard.press("n")
    first.page.keyboard.press("s")
    first.page.locator("#filter-outcome").select_option("answered")
    first.page.locator(".node.on").first.click()
    first.wait_for_count(re.compile("^[0-9]+ of"))
    address = first.ask("location.hash")
    second = visit(file, address)
    assert selected(second) == selected(first)
    assert second.page.locator("#filter-outcome").input_value() == "answered"
    assert second.ask("location.hash") == address
    assert second.texts("#filter-count") == first.texts("#filter-count")
    assert second.page.locator("[data-shade=logprob]").get_attribute("aria-pressed") == "true"


def test_back_returns_to_the_place_before(file: Path, visit: Visitor) -> None:
    """Places are part of the browser's history."""
    seen = visit(file)
    before = selected(seen)
    seen.page.keyboard.press("[")
    assert selected(seen) != before
    seen.page.go_back()
    sync_api.expect(seen.page.locator("#trees h2")).to_have_text(before[0])
    assert selected(seen)[:2] == before[:2]


@pytest.mark.parametrize(
    "address",
    ["#group=nothing", "#step=77", "#%E0%A4%A&group=<script>&at=%00", "#at=9/9.9.9", "#shade=x&min=abc", "#"],
)
def test_an_address_that_names_nothing_opens_all_the_same(file: Path, visit: Visitor, address: str) -> None:
    """A stale or broken link shows the nearest place, and breaks nothing."""
    seen = visit(file, address)
    assert seen.complaints == []
    assert selected(seen)[0]


def test_the_keyboard_reaches_everything(file: Path, visit: Visitor) -> None:
    """Without a mouse: list, tree and single tokens, each with a visible focus."""
    seen = visit(file)
    page = seen.page
    page.locator("#filter-text").focus()
    page.keyboard.press("Escape")
    assert seen.ask("document.activeElement.id") == "list"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    chosen = page.locator("#list").get_attribute("aria-activedescendant")
    assert page.locator(f"#{chosen}").get_attribute("aria-selected") == "true"
    page.keyboard.press("Tab")
    while not seen.ask("document.activeElement.classList.contains('forest')"):
        page.keyboard.press("Tab")
    page.keyboard.press("End")
    last = selected(seen)
    page.keyboard.press("ArrowUp")
    assert selected(seen) != last
    page.keyboard.press("ArrowLeft")
    node = page.locator(".forest").get_attribute("aria-activedescendant")
    assert page.locator(f"#{node}").get_attribute("aria-selected") == "true"
    page.keyboard.press("Enter")
    assert seen.ask("document.activeElement.id") == "turns"
    while not seen.ask("document.activeElement.classList.contains('sampled')"):
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert seen.count(".token.cursor") == 1
    assert "logprob" in page.locator("#tip").inner_text()
    assert seen.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("?")
    assert seen.ask("document.getElementById('help').open")
    page.keyboard.press("Escape")
    assert not seen.ask("document.getElementById('help').open")
    assert seen.complaints == []


def test_a_thousand_leaves_stay_readable(tmp_path: Path, visit: Visitor) -> None:
    """One group of 1,000 leaves: only what is in sight is in the document, and the last leaf is one key away."""
    step = told_step(0, [told_group(1, Plan(mode="chain", group_size=1000))])
    summary = write(tmp_path / "wide.html", [step])
    assert summary.trajectories == 1000
    seen = visit(tmp_path / "wide.html")
    assert 20 < seen.count(".node") < 250
    seen.page.locator(".forest").focus()
    seen.page.keyboard.press("End")
    assert selected(seen)[1].startswith("t1000 /")
    assert seen.page.locator(".tree-label").last.inner_text() == "t1000"
    assert seen.count(".node") < 250
    took = seen.ask(
        "(() => { const from = performance.now(); const forest = document.querySelector('.forest');"
        "forest.scrollTop = 9000; drawn = forest.offsetHeight; return performance.now() - from; })()"
    )
    assert took < 1000
    assert seen.complaints == []


def test_what_is_cut_is_said(tmp_path: Path, visit: Visitor) -> None:
    """With fewer trajectories than the run has, the page says what it holds and where to ask for more."""
    steps = told_steps(6, 2)
    summary = write(tmp_path / "cut.html", list(reversed(steps)), Limits(trajectories=40))
    assert summary.cut
    seen = visit(tmp_path / "cut.html")
    assert seen.texts("#cut") == [summary.cut]
    assert "2 of 6 steps" in summary.cut
    assert "--max-trajectories" in summary.cut
    assert seen.page.locator("#charts path.line.reward").get_attribute("d").count("L") == 5


def test_a_step_that_cannot_be_derived_says_why(tmp_path: Path, visit: Visitor) -> None:
    """Without advantages the trees and tokens are still there, with the reason."""
    source = told_step(0, [told_group(1)])._replace(rebuilt=None, problem="the log names user code 'm:f'")
    write(tmp_path / "code.html", [source])
    seen = visit(tmp_path / "code.html")
    assert "the log names user code" in seen.texts("#trees .notice")[0]
    assert seen.count(".node") > 8
    assert "advantages are not derived" in seen.texts("#turns .credit")[0]
    assert seen.complaints == []


def test_a_mismatch_cannot_be_overlooked(tmp_path: Path, visit: Visitor) -> None:
    """A step that is not what was planned says so in the list and above its trees."""
    source = told_step(0, [told_group(1)])
    write(tmp_path / "altered.html", [source._replace(match=False)])
    seen = visit(tmp_path / "altered.html")
    assert seen.texts(".step-row .verdict.mismatch") == ["MISMATCH"]
    assert seen.texts("#trees .verdict.mismatch") == ["re-derived: MISMATCH"]


def contrast(first: str, second: str) -> float:
    """Return the WCAG contrast ratio of two `rgb(…)` colours."""

    def luminance(colour: str) -> float:
        channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_light_and_dark(file: Path, visit: Visitor, scheme: str) -> None:
    """Every kind of text reaches WCAG AA (4.5) against its background, by the system's scheme."""
    seen = visit(file, scheme=scheme)
    paper = seen.ask("getComputedStyle(document.body).backgroundColor")
    panel = seen.ask("getComputedStyle(document.getElementById('turns')).backgroundColor")
    assert (contrast(paper, "rgb(255, 255, 255)") < 2) == (scheme == "light")
    for selector in (
        ".figures",
        "#run",
        ".tokens.given",
        ".tokens.sampled",
        ".formula",
        ".provenance",
        ".readout",
        "h2",
    ):
        colour = seen.ask(f"getComputedStyle(document.querySelector('{selector}')).color")
        assert min(contrast(colour, paper), contrast(colour, panel)) >= 4.5, selector


def test_the_theme_can_be_chosen(file: Path, visit: Visitor) -> None:
    """One key goes from the system's scheme to light to dark."""
    seen = visit(file, scheme="light")
    seen.page.keyboard.press("t")
    seen.page.keyboard.press("t")
    assert contrast(seen.ask("getComputedStyle(document.body).backgroundColor"), "rgb(255, 255, 255)") > 10


def test_narrow_windows_lose_nothing(file: Path, visit: Visitor) -> None:
    """On a small screen the parts stand below each other and nothing sticks out."""
    seen = visit(file, width=480)
    assert seen.ask("document.documentElement.scrollWidth") <= 480
    for part in ("#list", ".forest", "#turns .sampled"):
        assert seen.page.locator(part).first.is_visible()


CLIPPED = """() => {
  const found = [];
  for (const part of document.querySelectorAll("button, label, h1, h2, summary, #filter-count, #filters input, #filters select")) {
    const box = part.getBoundingClientRect();
    if (!box.width || !box.height || part.closest("dialog:not([open])")) continue;
    if (part.scrollWidth > part.clientWidth + 1 && part.tagName !== "INPUT") found.push(["clipped", part.textContent.slice(0, 40)]);
    if (part.tagName === "INPUT" || part.tagName === "SELECT") {
      const pen = document.createElement("canvas").getContext("2d");
      const style = getComputedStyle(part);
      pen.font = `${style.fontSize} ${style.fontFamily}`;
      const text = part.tagName === "INPUT" ? part.placeholder : part.selectedOptions[0].textContent;
      const room = part.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - (part.tagName === "SELECT" ? 18 : 0);
      if (pen.measureText(text).width > room + 1) found.push(["cut", text]);
    }
    for (let outer = part.parentElement; outer && outer !== document.body; outer = outer.parentElement) {
      const frame = outer.getBoundingClientRect();
      if (box.right > frame.right + 1 && getComputedStyle(outer).overflowX === "visible") found.push(["sticks out", part.textContent.slice(0, 40)]);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("width", [1440, 1280, 1024])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_label_is_cut_at_common_widths(file: Path, visit: Visitor, width: int, scheme: str) -> None:
    """Buttons, labels, headings and the filters' fields show their whole text, inside their frame."""
    assert visit(file, width=width, scheme=scheme).ask(CLIPPED) == []


@pytest.mark.parametrize("button", ["#about-open", "#help-open"])
def test_a_long_dialog_opens_at_its_beginning(visit: Visitor, file: Path, button: str) -> None:
    """Its heading is in sight, also in a low window."""
    seen = visit(file)
    seen.page.set_viewport_size({"width": 1024, "height": 150})
    seen.page.click(button)
    heading = seen.page.locator("dialog[open] h2").first
    assert seen.ask(
        "document.querySelector('dialog[open]').scrollHeight > document.querySelector('dialog[open]').clientHeight"
    )
    box, frame = heading.bounding_box(), seen.page.locator("dialog[open]").bounding_box()
    assert box["y"] >= frame["y"]
