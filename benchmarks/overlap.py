"""Steps per minute of the main job on policy and with staleness allowed: sampling and training overlap.

Two processes per run, as a user starts them. The first steps, in which processes start, are left out.

python -m benchmarks.overlap [STEPS]      (default 12)
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from core.events import StepCommitted
from engine import launch
from store.log import open_log

PROJECT = Path(__file__).resolve().parents[1]
WARM = 2
"""Steps that are not measured."""


def seconds_per_step(run_dir: Path, steps: int, max_staleness: int) -> tuple[float, float]:
    """Return seconds from commit to commit, and the mean staleness of what was trained."""
    command = [sys.executable, str(PROJECT / "cli.py")]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    run = ["--run", str(run_dir)]
    setting = ["--preset", "demo", "--set", f"learner.max_staleness={max_staleness}"]
    rollout = subprocess.Popen([*command, "rollout", *run, *setting, "--quiet"], env=environment)
    try:
        learn = [*command, "learn", *run, "--max-steps", str(steps), "--quiet"]
        subprocess.run(learn, env=environment, check=True)
        rollout.wait(timeout=120)
    finally:
        rollout.kill()
        rollout.wait()
        launch.stop(run_dir, force=True)
    with open_log(run_dir, readonly=True) as log:
        commits = [record.event for record in log.journal.read() if isinstance(record.event, StepCommitted)]
    ages = [commit.rollout_metrics["staleness/mean"] for commit in commits[WARM:]]
    return (commits[-1].at - commits[WARM - 1].at) / (steps - WARM), sum(ages) / len(ages)


def main() -> None:
    """Run once per bound and print both."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for bound in (0, 1, 2):
            found[bound] = seconds_per_step(Path(folder) / f"run-{bound}", steps, bound)
    slowest = found[0][0]
    print(
        json.dumps(
            {
                f"max_staleness_{bound}": {
                    "seconds_per_step": round(seconds, 3),
                    "mean_staleness": round(age, 2),
                    "speed_up": round(slowest / seconds, 2),
                }
                for bound, (seconds, age) in found.items()
            }
        )
    )


if __name__ == "__main__":
    main()
