"""Owns the process that hands points to SwanLab, so that nothing SwanLab does can reach a training step.

SwanLab prints, starts threads, hooks into the end of its process and may wait for a network without limit.
Here it may: this process has its own session, the learner waits for none of it, and ends it at a deadline.

Standard input carries an Opening, then Points, as JSON lines; standard output answers each with a Taken.
The file `lock` keeps a successor waiting until this
process has ended. What SwanLab prints goes to standard error.
"""

import contextlib
import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import swanlab

from learner.points import Opening, Point, Taken, read_position, write_position

LOCK = "lock"
PROJECT = "rolltape"
PROJECT_VARIABLES = ("SWANLAB_PROJECT_NAME", "SWANLAB_PROJ_NAME")
"""SwanLab's own; where one is set, it names the project."""

ORPHAN_SECONDS = 120
"""How long SwanLab may go on uploading when the learner is gone."""

PROBES = ("hardware", "runtime", "requirements", "conda", "git", "swanlab", "monitor")


def main() -> None:
    """Take points until standard input ends, then let SwanLab finish."""
    answers = os.dup(1)
    os.dup2(2, 1)
    lines = sys.stdin.buffer
    opening = msgspec.json.decode(lines.readline(), type=Opening)
    folder = Path(opening.folder)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    run = _start(opening, folder)
    place = run.url if opening.mode == "online" else str(run.dir)
    _answer(answers, Taken(position=read_position(folder), place=place))
    for line in lines:
        point = msgspec.json.decode(line, type=Point)
        run.log(point.metrics, step=point.step)
        write_position(folder, point.position)
        _answer(answers, Taken(position=point.position))
    signal.alarm(ORPHAN_SECONDS)
    run.finish()


def _start(opening: Opening, folder: Path) -> Any:
    """Return the SwanLab run; only metrics and the run's configuration are given to it."""
    named = any(os.environ.get(variable) for variable in PROJECT_VARIABLES)
    online = {"id": opening.run_id, "resume": "allow"} if opening.mode == "online" else {}
    return swanlab.init(
        mode=opening.mode,
        project=None if named else PROJECT,
        name=opening.name,
        config=opening.config,
        log_dir=str(folder / "log"),
        settings=swanlab.Settings(
            interactive=False, terminal={"proxy_type": "none"}, probe=dict.fromkeys(PROBES, False)
        ),
        **online,
    )


def _answer(answers: int, taken: Taken) -> None:
    # A learner that is gone hears nothing, but what it has sent is still taken.
    with contextlib.suppress(BrokenPipeError):
        os.write(answers, msgspec.json.encode(taken) + b"\n")


if __name__ == "__main__":
    main()
