"""Owns how a rollout process shows its progress: one living line, or JSON lines for scripts."""

import contextlib
import copy
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
    if as_json:
        yield Voice(progress, _seldom(_tell_json, SECONDS_BETWEEN), _plain)
        _tell_json(progress)
        return
    if quiet:
        yield Voice(progress, _hide, _plain)
        return
    if not console.is_terminal:
        yield Voice(progress, _seldom(lambda now: _plain(progress_line(now)), LINES_BETWEEN), _plain)
        _plain(progress_line(progress))
        return
    with Live(console=console, refresh_per_second=2, transient=False) as live:

        def show(progress: Progress) -> None:
            live.update(Text(progress_line(progress)))

        yield Voice(progress, show, lambda line: console.print(Text(line)))
        progress.waiting = ""
        show(progress)


def _hide(progress: Progress) -> None:
    del progress


def _plain(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _tell_json(progress: Progress) -> None:
    sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
    sys.stdout.flush()


def _seldom(tell: Notify, seconds: float) -> Notify:
    """Return `tell`, silent for some seconds after each time, and while nothing has changed."""
    last = time.monotonic() - seconds
    told: Progress | None = None

    def notify(progress: Progress) -> None:
        nonlocal last, told
        now = time.monotonic()
        if now - last >= seconds and progress != told:
            last, told = now, copy.copy(progress)
            tell(progress)

    return notify


def progress_line(progress: Progress) -> str:
    """Return the counts as one line."""
    scored = progress.scored
    ended = f"{progress.trajectories_ended} ended"
    if scored:
        ended += (
            f", reward {progress.reward_sum / scored:+.3f}, "
            f"EM {100 * progress.exact_match_sum / scored:.1f} %"
        )
    parts = [f"{progress.groups_closed} groups, {progress.groups_open} open", ended]
    parts.append(f"{progress.tokens_sampled:,} tokens")
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
    return " · ".join(parts)
