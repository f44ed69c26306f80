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
"""Between two notices of the same process; more would cost time and read no better."""


@contextlib.contextmanager
def progress_display(*, quiet: bool, as_json: bool) -> Iterator[Voice]:
    """Yield the voice of a rollout command: where its counts are shown and its notices said."""
    progress = Progress()
    console = Console(stderr=True)
    if quiet or as_json:
        notify = _json_lines() if as_json else _hide
        yield Voice(progress, notify, _plain)
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
    last = -SECONDS_BETWEEN

    def tell(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN:
            last = now
            sys.stdout.write(msgspec.json.encode(progress).decode() + "\n")
            sys.stdout.flush()

    return tell


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
            f"reward {progress.reward_sum / scored:+.3f}  EM {100 * progress.exact_match_sum / scored:.1f} %  "
            f"format {100 * progress.format_sum / scored:.1f} %"
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
