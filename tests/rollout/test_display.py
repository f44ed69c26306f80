"""What a rollout process says where there is no terminal to redraw a line."""

import json

import pytest

from rollout import display
from rollout.display import progress_display, progress_line
from rollout.progress import Progress


def test_a_line_that_says_nothing_new_is_not_said_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that waits for hours does not repeat itself; its last line stands at the end."""
    monkeypatch.setattr(display, "LINES_BETWEEN", 0.0)
    with progress_display(quiet=False, as_json=False) as voice:
        for tokens in (1, 1, 1, 2):
            voice.progress.tokens_sampled = tokens
            voice.notify(voice.progress)
    told = [line.split(" · ")[2] for line in capsys.readouterr().err.splitlines()]
    assert told == ["1 tokens", "2 tokens", "2 tokens"]


def test_json_lines_end_with_the_last_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """However soon after the line before."""
    with progress_display(quiet=False, as_json=True) as voice:
        for closed in (1, 2, 3):
            voice.progress.groups_closed = closed
            voice.notify(voice.progress)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["groups_closed"] for line in lines] == [1, 3]


def test_the_usual_line_fits_80_columns() -> None:
    """A thousand groups, a million tokens."""
    progress = Progress(
        groups_open=64,
        groups_closed=1000,
        trajectories_ended=8000,
        tokens_sampled=1_234_567,
        reward_sum=-800.0,
    )
    assert len(progress_line(progress)) <= 80
