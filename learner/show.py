"""Owns the look at a run in a terminal: what it is, how its steps went, what its newest groups are doing.

Text of models and of search results is shown as text: never as console markup, never with its control
characters (learner/visible.py).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from core.errors import ReplayError
from core.events import RunOpened, StepCommitted
from core.tree import trajectories
from learner.batch import fold_bundle
from learner.page.run import books, run_rows
from learner.show_group import reward_dots, show_group
from learner.show_tokens import show_trajectory
from learner.visible import one_line
from store.log import Log
from store.ports import GroupFate, GroupRow, RunState

__all__ = ["show_group", "show_run", "show_trajectory"]

NEWEST: Final = 14
"""Steps, and tickets, that are listed."""
OTHER_LINES: Final = 14
"""Lines of a followed view besides its steps and groups."""
QUESTION_WIDTH: Final = 60
POLL_SECONDS: Final = 1.0
"""Open groups grow without a journal entry, so a followed view is drawn at least this often."""
BARS: Final = "▁▂▃▄▅▆▇█"
HEADLINES: Final = ("preset", "rollouts", "estimator", "loss", "search", "scorer")


class Seen(NamedTuple):
    """A run as one look finds it."""

    opened: RunOpened
    state: RunState
    commits: Sequence[StepCommitted]
    books: Sequence[tuple[str, int]]
    groups: Sequence[tuple[GroupRow, Text]]
    """The newest groups with what they ask and how they stand, oldest first."""


def show_run(log: Log, console: Console, *, follow: bool) -> None:
    """Print the run; with `follow`, keep the print up to date until the goal is reached or Ctrl-C.

    Raises ReplayError for an empty log, LogDamaged or FoldError for a group that cannot be read.
    """
    watch = _Watch(log)
    if not follow:
        console.print(run_view(watch.look()))
        return
    try:
        seen = watch.look()
        rows = max(2, min(NEWEST, (console.height - OTHER_LINES) // 2))
        with Live(run_view(seen, rows), console=console, auto_refresh=False) as live:
            while not _is_over(seen.state):
                log.journal.wait_sync(seen.state.journal_length, POLL_SECONDS)
                seen = watch.look()
                live.update(run_view(seen, rows), refresh=True)
    except KeyboardInterrupt:
        console.print("no longer following; the run goes on")


class _Watch:
    """Looks at a run again and again, and reads each journal entry once."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._position = 0
        self._commits: list[StepCommitted] = []

    def __repr__(self) -> str:
        return f"<_Watch at journal position {self._position}>"

    def look(self) -> Seen:
        """Return the run as it is now."""
        opened = self._log.run_event()
        if opened is None:
            raise ReplayError(
                f"the log in {str(self._log.run_dir)!r} holds no run yet: start `rollout` or `learn`"
            )
        state = self._log.state()
        for record in self._log.journal.read(self._position, state.journal_length):
            self._position = record.index + 1
            if isinstance(record.event, StepCommitted):
                self._commits.append(record.event)
        return Seen(opened, state, self._commits, books(self._log), list(self._groups(state)))

    def _groups(self, state: RunState) -> Iterator[tuple[GroupRow, Text]]:
        for row in self._log.group_rows(start_ticket=max(0, state.next_ticket - NEWEST)):
            records = self._log.groups.fetch(row.uid).records
            if not records:
                yield row, Text("nothing recorded yet", style="dim")
                continue
            group = fold_bundle(self._log.groups.fetch(row.uid))
            text = Text(one_line(group.asked.question, QUESTION_WIDTH))
            yield row, Text("  ").join([reward_dots(list(trajectories(group))), text])


def _is_over(state: RunState) -> bool:
    return state.max_steps is not None and state.committed_steps >= state.max_steps


def run_view(seen: Seen, rows: int = NEWEST) -> RenderableType:
    """Return what is printed of a run, with at most `rows` of its newest steps and groups."""
    parts: list[RenderableType] = [_headline(seen), Padding(_curves(seen.commits), (1, 0, 0, 0))]
    if seen.commits:
        parts.append(Padding(_steps(seen.commits[-rows:]), (1, 0, 0, 0)))
    if seen.groups:
        parts.append(Padding(_groups(seen.groups[-rows:]), (1, 0, 0, 0)))
    return Group(*parts)


def _headline(seen: Seen) -> Text:
    rows = dict(run_rows(seen.opened))
    goal = "" if seen.state.max_steps is None else f" of {seen.state.max_steps}"
    text = Text()
    text.append(f"run {one_line(seen.opened.run_id, 16)}", style="bold")
    text.append(f"  {one_line(seen.opened.base_model or 'embedded base model', 40)}\n")
    settings = [f"{name} {one_line(rows[name], 50)}" for name in HEADLINES if name in rows]
    text.append(" · ".join(settings) + "\n", style="dim")
    text.append(f"{seen.state.committed_steps}{goal} steps", style="bold")
    text.append(f" · policy v{seen.state.policy_version} · groups: ")
    text.append(", ".join(f"{count} {one_line(name, 60)}" for name, count in seen.books) or "none yet")
    return text


def _curves(commits: Sequence[StepCommitted]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, metric in (
        ("reward", "reward/mean"),
        ("exact match", "reward/correct"),
        ("format", "reward/format"),
    ):
        values = [commit.rollout_metrics[metric] for commit in commits if metric in commit.rollout_metrics]
        if values:
            table.add_row(
                Text(name, style="dim"),
                Text(bars(values), style="cyan"),
                f"{values[0]:.3f} → {values[-1]:.3f}",
            )
    return table


def bars(values: Sequence[float], width: int = 60) -> str:
    """Return the values as bars, the mean of neighbours where there are more than `width`."""
    count = min(width, len(values))
    edges = [round(position * len(values) / count) for position in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, high = min(means), max(means)
    top = len(BARS) - 1
    return "".join(
        BARS[round((value - low) / (high - low) * top) if high > low else top // 2] for value in means
    )


def _steps(commits: Sequence[StepCommitted]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("step", "reward", "EM", "format", "datums", "tokens", "seconds", "policy"):
        table.add_column(name, justify="right")
    for commit in commits:
        metrics = commit.rollout_metrics
        shares = [_number(metrics.get(f"reward/{name}")) for name in ("mean", "correct", "format")]
        table.add_row(
            str(commit.step),
            *shares,
            _number(metrics.get("train/datums"), 0),
            str(commit.tokens_trained),
            f"{sum(commit.seconds.values()):.1f}",
            f"v{commit.policy_version}" + (" skipped" if commit.skipped else ""),
        )
    return table


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


FATE_STYLES: Final = {
    GroupFate.OPEN: "cyan",
    GroupFate.CLOSED: "yellow",
    GroupFate.PLANNED: "yellow",
    GroupFate.TRAINED: "green",
    GroupFate.DROPPED: "dim",
    GroupFate.ABORTED: "red",
}


def _groups(groups: Sequence[tuple[GroupRow, Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, width in (("group", 8), ("fate", 18), ("policy", 6)):
        table.add_column(name, no_wrap=True, min_width=width)
    table.add_column("trajectories", no_wrap=True, overflow="ellipsis", ratio=1)
    for row, text in groups:
        fate = Text(row.fate.value, style=FATE_STYLES[row.fate])
        if row.step is not None:
            fate.append(f" in step {row.step}", style="dim")
        if row.reason:
            fate.append(f" ({one_line(row.reason, 40)})", style="dim")
        table.add_row(row.uid, fate, f"v{row.policy_version}", text)
    return table
