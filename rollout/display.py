"""Owns how a rollout process shows its progress: one living line, or JSON lines for scripts."""

import contextlib
import sys
import time
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from rollout.progress import Notify, Progress, Voice

SECONDS_BETWEEN = 1.0
"""Between two JSON lines; more would cost time and read no better."""
LINES_BETWEEN = 10.0
"""Seconds between two lines where there is no terminal to redraw one."""


@contextlib.contextmanager
def progress_display(*, quiet: bool, as_json: bool) -> Iterator[Voice]:
    """Yield the voice of a rollout command: where its counts are shown and its notices said."""
    progress = Progress()
    console = Console(stderr=True)
    if quiet or as_json:
        yield Voice(progress, _json_lines() if as_json else _hide, _plain)
        return
    if not console.is_terminal:
        yield Voice(progress, _seldom(lambda now: _plain(progress_line(now)), LINES_BETWEEN), _plain)
        _plain(progress_line(progress))
        return
    with Live(console=console, refresh_per_second=2, transient=False) as live:

        def show(progress: Progress) -> None:
            live.update(Text(progress_line(progress)))

        yield Voice(progress, show, lambda line: console.print(Text(line)))


def _hide(progress: Progress) -> None:
    del progress


def _plain(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _json_lines() -> Notify:
    def tell(progress: Progress) -> None:
        sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
        sys.stdout.flush()

    return _seldom(tell, SECONDS_BETWEEN)


def _seldom(tell: Notify, seconds: float) -> Notify:
    """Return `tell`, silent for some seconds after each time."""
    last = time.monotonic() - seconds

    def notify(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            tell(progress)

    return notify


def progress_line(progress: Progress) -> str:
    """Return the counts as one line."""
    scored = progress.scored
    parts = [
        f"groups {progress.groups_closed} closed, {progress.groups_open} open",
        f"trajectories {progress.trajectories_ended}",
        f"tokens {progress.tokens_sampled}",
        f"searches {progress.search_calls}",
    ]
    if scored:
        parts.append(
            f"reward {progress.reward_sum / scored:+.3f}  EM "
            f"{100 * progress.exact_match_sum / scored:.1f} %  format "
            f"{100 * progress.format_sum / scored:.1f} %"
        )
    for count, name in (
        (progress.groups_aborted, "aborted"),
        (progress.groups_adopted, "adopted"),
        (progress.trajectories_void, "void"),
        (progress.search_faults, "search faults"),
    ):
        if count:
            parts.append(f"{count} {name}")
    if progress.waiting:
        parts.append(f"waiting for {progress.waiting}")
    return "  ·  ".join(parts)
