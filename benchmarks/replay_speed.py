"""Audits per second: steps of 64 trajectories of about 1,250 tokens, re-derived and compared, on one core.

python -m benchmarks.replay_speed [STEPS]      (default 100; the target is >= 20 steps/s with flat memory)
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.recorded_steps import REALISTIC, record_steps
from learner.fingerprints import code_fingerprints
from learner.replay import Auditor, replay_steps

GROUPS, SIZE = 8, 8


def peak() -> float:
    """Return the most memory this process has used, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Record steps, audit them all, and print the rate."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder:
        log = record_steps(Path(folder) / "run", steps, GROUPS, SIZE, REALISTIC)
        auditor = Auditor(log, code_fingerprints())
        started, early, cpu = time.perf_counter(), 0.0, time.process_time()
        for report in replay_steps(auditor, range(steps)):
            assert report.match, report.differences
            if report.step == steps // 10:
                early = peak()
        seconds = time.perf_counter() - started
        cpu = time.process_time() - cpu
        log.close()
    print(
        json.dumps(
            {
                "steps": steps,
                "trajectory_tokens": REALISTIC.trajectory,
                "steps_per_second": round(steps / seconds, 1),
                "steps_per_cpu_second": round(steps / cpu, 1),
                "tokens_per_second": round(steps * GROUPS * SIZE * REALISTIC.trajectory / seconds),
                "peak_mb_after_a_tenth": round(early),
                "peak_mb_at_the_end": round(peak()),
            }
        )
    )


if __name__ == "__main__":
    main()
