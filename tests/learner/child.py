"""A learner in a process of its own, which stops at a named point of a step until it is killed there.

Arguments: run directory, configuration as JSON, steps, point ("" runs to the end), how often to let it pass.
"""

import sys
import threading
from pathlib import Path

import msgspec

from core.config import Config
from core.errors import RolltapeError
from engine.client import connect
from learner.loop import run_learner
from learner.work import Hooks
from store.log import open_log


class Stop:
    """Lets a point pass a number of times, then says so and waits to be killed."""

    def __init__(self, point: str, passes: int) -> None:
        self.point = point
        self.passes = passes

    def __call__(self, point: str) -> None:
        """Stop at the point."""
        if point != self.point:
            return
        if self.passes:
            self.passes -= 1
            return
        print(f"AT {point}", flush=True)
        threading.Event().wait()


def main() -> int:
    """Run the learner; returns 3 on one of our errors, 130 on Ctrl-C."""
    run_dir, config_text, steps, point, passes = sys.argv[1:]
    config = msgspec.json.decode(config_text, type=Config)
    hooks = Hooks(probe=Stop(point, int(passes)), notify=lambda text: print(text, flush=True))
    try:
        with (
            open_log(Path(run_dir), role="learner") as log,
            connect(config.engine, Path(run_dir)) as session,
        ):
            run_learner(log, session, config, int(steps), hooks)
    except RolltapeError as exc:
        print(f"ERROR {type(exc).__name__}: {exc}", flush=True)
        return 3
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
        return 130
    print("DONE", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
