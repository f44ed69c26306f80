"""The terminal views, on real logs: a run, a followed run, groups, trees and single trajectories."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from core.arrays import view_logprobs
from core.errors import FoldError, ReplayError, StoreError
from core.events import ChosenLeaf, Plan
from core.tree import fold_group, trajectories
from engine.client import Session
from learner.batch import fold_bundle
from learner.loop import run_learner
from learner.rebuild import rebuild
from learner.show import bars, show_group, show_run, show_trajectory
from learner.show_tokens import token_lines
from learner.view import TokenView
from store.log import Log, open_log
from store.ports import Admission, Claim
from tests.learner.support import CHAINS, Worker, make_config, open_event, working, writes
from tests.learner.told import Teller, Texts, tokenizer

ROOT = Path(__file__).parents[2]
HOSTILE = "[bold red]no markup[/] \x1b[31mred\x1b]0;title\x07 \u202etxet\u202c <script>"


class Screen:
    """A console that is read back."""

    def __init__(self, width: int = 120, *, terminal: bool = False) -> None:
        self.file = io.StringIO()
        self.console = Console(
            file=self.file,
            width=width,
            force_terminal=terminal,
            color_system="truecolor" if terminal else None,
        )

    @property
    def text(self) -> str:
        """What was printed."""
        return self.file.getvalue()


def printed(path: Path, show: Callable[[Log, Console], None], width: int = 120) -> str:
    """Return what a view prints of a log."""
    screen = Screen(width)
    with open_log(path, readonly=True) as log:
        show(log, screen.console)
    return screen.text


def told_log(path: Path, texts: Texts, plan: Plan, close: bool = True) -> str:
    """Make a log with one group of these texts; return its uid."""
    config = make_config()
    with open_log(path, create=True, role="rollout") as log:
        log.open_run(open_event(config))
        claim = log.groups.claim_sync(log.worker_id, Admission(0, 2), 0.0)
        assert isinstance(claim, Claim)
        teller = Teller(claim.ticket, texts, plan)
        for tree in range(1, plan.group_size + 1):
            teller.search(tree, "0.0.0", None, texts.query, texts.content)
            if close:
                teller.end(tree, "0.0.1", "0.0.0")
        log.groups.append_sync(claim, writes(teller.records))
        if close:
            ended = trajectories(fold_group(teller.records))
            log.groups.close_sync(claim, [ChosenLeaf(tree=one.tree, leaf=one.leaf) for one in ended], 0.0)
        return claim.uid


def test_a_run_at_a_glance(recorded: dict[str, Path]) -> None:
    """Steps, books, curves and the newest groups stand on one screen."""
    text = printed(recorded["chains"], lambda log, console: show_run(log, console, follow=False))
    assert "3 of 3 steps" in text
    assert "6 trained" in text
    assert "policy v3" in text
    assert text.count("trained in step") == 6
    with open_log(recorded["chains"], readonly=True) as log:
        means = [rebuild(log, log.plan(step)).batch.table.rewards.mean() for step in range(3)]
    for mean in means:
        assert f"{mean:.3f}" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_an_empty_log_is_no_run(tmp_path: Path) -> None:
    """Before the run is opened the message says what to start."""
    with open_log(tmp_path / "run", create=True) as log, pytest.raises(ReplayError, match="no run yet"):
        show_run(log, Screen().console, follow=False)


def test_following_ends_at_the_goal(session: Session, run_dir: Path) -> None:
    """While a learner trains, the view is drawn again and again; it ends when the last step is committed."""
    screen = Screen(terminal=True)
    config = make_config()
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        viewer = threading.Thread(target=show_run, args=(log, screen.console), kwargs={"follow": True})
        viewer.start()
        with working(Worker(log, config, CHAINS)):
            run_learner(log, session, config, 3)
        viewer.join(timeout=30)
        assert not viewer.is_alive()
    assert "3 of 3 steps" in screen.text
    assert screen.text.count("steps") > 1


def test_ctrl_c_ends_following_quietly(run_dir: Path, tmp_path: Path) -> None:
    """The run is not touched and the exit is clean."""
    told_log(run_dir, Texts(), Plan(mode="chain", group_size=2))
    script = (
        "import sys; from pathlib import Path; from rich.console import Console; from learner.show import show_run;"
        "from store.log import open_log; console = Console(force_terminal=True);"
        f"log = open_log(Path({str(run_dir)!r}), readonly=True); show_run(log, console, follow=True); log.close()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert "run" in first + out
    assert "no longer following" in out
    assert "Traceback" not in err


def test_a_trained_group_shows_its_trees_and_advantages(recorded: dict[str, Path]) -> None:
    """Every node is there once, with the mean advantage of the members below it."""
    with open_log(recorded["trees"], readonly=True) as log:
        uid = next(log.group_rows()).uid
        group = fold_bundle(log.groups.fetch(uid))
        batch = rebuild(log, log.plan(log.group(uid).step or 0)).batch
    text = printed(recorded["trees"], lambda log, console: show_group(log, uid, console))
    assert text.count("0.0.0 ") == len(group.trees)
    assert text.count("1.0.1 ") == len(group.trees)
    for position, member in enumerate(batch.members):
        if member.group.uid == uid:
            assert f"{member.leaf} {batch.advantages.leaf[position]:+.3f}" in text
    assert "z over the tree" in text


def test_a_closed_group_shows_what_the_settings_would_make_of_it(tmp_path: Path) -> None:
    """Before a step takes it, advantages follow the run's estimator."""
    uid = told_log(tmp_path / "run", Texts(), Plan(mode="chain", group_size=3))
    text = printed(tmp_path / "run", lambda log, console: show_group(log, uid, console))
    assert "closed" in text
    assert "group_mean: A = R − mean of the question" in text
    assert "search capital of Zorvia" in text
    assert text.count("●") == 3


def test_an_open_group_shows_what_is_in_flight(tmp_path: Path) -> None:
    """Nothing is derived for it, and that is said."""
    uid = told_log(tmp_path / "run", Texts(), Plan(mode="chain", group_size=2), close=False)
    text = printed(tmp_path / "run", lambda log, console: show_group(log, uid, console))
    assert "no advantages: the group is open" in text
    run = printed(tmp_path / "run", lambda log, console: show_run(log, console, follow=False))
    assert "1 open" in run


def test_a_group_that_is_not_there_is_an_error(recorded: dict[str, Path]) -> None:
    """An unknown uid or leaf is named."""
    with open_log(recorded["chains"], readonly=True) as log:
        with pytest.raises(StoreError, match=r"000999\.0"):
            show_group(log, "000999.0", Screen().console)
        uid = next(log.group_rows()).uid
        with pytest.raises(FoldError, match="no tree 9"):
            show_trajectory(log, uid, 9, "0.0.0", tokenizer(), Screen().console)


def test_a_trajectory_shows_logprob_and_advantage_below_each_token(recorded: dict[str, Path]) -> None:
    """What was sampled has three rows, what was observed none, and nothing is wider than the console."""
    with open_log(recorded["chains"], readonly=True) as log:
        batch = rebuild(log, log.plan(1)).batch
    key, datum = batch.keys[0], batch.datums[0]
    member = next(
        one for one in batch.members if (one.group.uid, one.tree, one.leaf) == (key.uid, key.tree, key.leaf)
    )
    text = printed(
        recorded["chains"],
        lambda log, console: show_trajectory(log, key.uid, key.tree, key.leaf, tokenizer(), console),
        width=60,
    )
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60
    logprobs = view_logprobs(member.path[0].sample.sampled_logprobs)
    assert any(f"{logprobs[0]:.2f}" in line for line in lines)
    advantage = next(value for value in datum.advantages.tolist() if value)
    assert f"{advantage:+.3g}" in text
    assert "6 tokens outside the loss" in text
    assert "trained in step 1" in text


@pytest.mark.parametrize("width", [20, 57, 120])
def test_token_rows_fill_the_width_and_keep_every_token(width: int) -> None:
    """Rows come in threes, none is wider than asked for, wide characters are counted as two."""
    texts = ["你好", "a", "\n", "word" * 9, "\x1b", "👩", "x" * 300, ""]
    run = [TokenView(number, text, True, -0.5, 0.25) for number, text in enumerate(texts)]
    lines = list(token_lines(run, width))
    assert len(lines) % 3 == 0
    assert all(line.cell_len <= width for line in lines)
    joined = "".join(line.plain for line in lines[::3])
    for shown in ("你好", "⏎", "⟨U+001B⟩", "👩", "·"):
        assert shown in joined
    assert sum(line.plain.count("-0.50") for line in lines[1::3]) == len(texts)


def test_hostile_text_is_only_text(tmp_path: Path) -> None:
    """No escape sequence, bell, direction control or console markup of the events reaches the terminal."""
    texts = Texts(question=HOSTILE, references=(HOSTILE,), query=HOSTILE, content=HOSTILE, answer=HOSTILE)
    uid = told_log(tmp_path / "run", texts, Plan(mode="chain", group_size=2))
    screen = Screen(200)
    with open_log(tmp_path / "run", readonly=True) as log:
        show_run(log, screen.console, follow=False)
        show_group(log, uid, screen.console)
        show_trajectory(log, uid, 1, "0.0.1", tokenizer(), screen.console)
    assert not any(character in screen.text for character in "\x1b\x07\u202e\u202c")
    assert "[bold red]no markup[/]" in screen.text
    assert "⟨U+001B⟩" in screen.text


def test_bars_follow_the_values() -> None:
    """The lowest value is the lowest bar, equal values are level, many values are averaged."""
    assert bars([0.0, 0.5, 1.0]) == "▁▅█"
    assert bars([2.0, 2.0]) == "▄▄"
    assert len(bars([float(value) for value in range(1000)])) == 60
    assert bars([float(value) for value in range(1000)])[-1] == "█"
