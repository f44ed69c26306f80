"""Owns the look at one trajectory in a terminal: its text with every sampled token's logprob and advantage.

Sampled tokens stand in three rows (token, logprob, advantage), wrapped to the console's width; what the
policy was given stands behind a bar, outside the loss.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from learner.pieces import Pieces, Tokenizer
from learner.rebuild import CodeLoader, no_code
from learner.show_group import advantage_style, reward_style
from learner.view import Name, TokenView, TrajectoryView, view_trajectory
from learner.visible import visible
from store.log import Log

GAP: Final = 1
INDENT: Final = 4


def show_trajectory(  # noqa: PLR0913 - the three parts of a trajectory's name stand by themselves
    log: Log,
    uid: str,
    tree: int,
    leaf: str,
    tokenizer: Tokenizer,
    console: Console,
    *,
    load: CodeLoader = no_code,
) -> None:
    """Print one trajectory. Advantages are as sent to the trainer, scaled by their micro-batch.

    Raises StoreError (no such group), FoldError (no such leaf) or CodeNotAllowed.
    """
    view = view_trajectory(log, Name(uid, tree, leaf), Pieces(tokenizer).texts, load)
    console.print(_headline(view))
    for number, segment in enumerate(view.segments):
        if number:
            console.print(Text("the template rewrote the history: a new segment", style="yellow"))
        if view.step is not None and not segment.datum:
            console.print(Text("not sent: all advantages of this segment are 0", style="yellow"))
        for run in _runs(segment.tokens):
            if run[0].sampled:
                for line in token_lines(run, console.width - INDENT):
                    console.print(Padding(line, (0, 0, 0, INDENT)), no_wrap=True, overflow="crop")
            else:
                console.print(_given(run, console))


def _headline(view: TrajectoryView) -> Text:
    text = Text()
    text.append(f"{view.uid}/t{view.tree}/{view.leaf}", style="bold")
    text.append("  ● " if view.reward is not None else "  ○ ", style=reward_style(view.reward))
    text.append("not scored" if view.reward is None else f"reward {view.reward:.4g}")
    text.append(f" · {view.outcome}")
    text.append(" · not trained yet" if view.step is None else f" · trained in step {view.step}")
    text.append(
        "".join(f" · {visible(name)} {value:g}" for name, value in view.components.items()), style="dim"
    )
    text.append(f"\n{visible(view.question)}\n", style="bold")
    text.append(f"expected: {visible(' | '.join(view.references))}; answer: {visible(view.answer or '–')}")
    return text


def _runs(tokens: Sequence[TokenView]) -> Iterator[list[TokenView]]:
    """Yield stretches of tokens of one kind, sampled or given."""
    run: list[TokenView] = []
    for token in tokens:
        if run and token.sampled != run[-1].sampled:
            yield run
            run = []
        run.append(token)
    if run:
        yield run


def _given(run: Sequence[TokenView], console: Console) -> Text:
    text = Text(visible("".join(token.text for token in run)).strip("\n"))
    body = Text(f"  {len(run)} tokens outside the loss", style="dim italic")
    for line in text.wrap(console, max(1, console.width - INDENT)):
        body.append(f"\n  │ {line.plain}", style="dim not italic")
    return body


def token_lines(run: Sequence[TokenView], width: int) -> Iterator[Text]:
    """Yield lines of at most `width` cells: three rows of tokens, their logprobs, their advantages."""
    rows = _new_rows()
    used = 0
    for token in run:
        cells = _cells(token, width)
        size = max(map(cell_len, cells)) + GAP
        if used and used + size > width:
            yield from rows
            rows, used = _new_rows(), 0
        styles = (f"bold {advantage_style(token.advantage)}", "dim", advantage_style(token.advantage))
        for row, cell, style in zip(rows, cells, styles, strict=True):
            row.append(cell, style=style)
            row.append(" " * (size - cell_len(cell)))
        used += size
    yield from rows


def _new_rows() -> tuple[Text, Text, Text]:
    return Text(), Text(), Text()


def _cells(token: TokenView, width: int) -> tuple[str, str, str]:
    shown = visible(token.text).replace("\n", "⏎").replace("\t", "⇥") or "·"
    text = shown if cell_len(shown) < width else shown[: max(1, width // 2 - 2)] + "…"
    logprob = "" if token.logprob is None else f"{token.logprob:.2f}"
    return text, logprob, f"{token.advantage:+.3g}" if token.advantage else "·"
