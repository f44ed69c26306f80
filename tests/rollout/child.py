"""One rollout process of the tests: scripted surroundings on a real log, until so many tickets are done."""

import sys
from pathlib import Path

import anyio
import msgspec

from core.config import Config
from rollout.data import Example
from rollout.progress import silence
from rollout.run import Options, run_rollouts
from store.log import open_log
from tests.fakes import ScriptedSampler, ScriptedSearch, chance, make_config, make_environment

EXAMPLES = [Example(f"q{index}", f"Who was number {index}?", ("Ada",), "nq") for index in range(50)]
SHAPE: dict[str, object] = {
    "mode": "tree",
    "tree": {"m": 2, "n": 2, "l": 1, "k": 3},
    "concurrency": 12,
}


def make_child_config() -> Config:
    """Return a configuration that never waits for a learner."""
    config = make_config(**SHAPE)
    return msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, groups_per_step=99)
    )


def latency(said: str, seed: int) -> float:
    """Take a few milliseconds, so that a kill finds work in flight."""
    return 0.01 * chance("late", said, seed)


def main() -> None:
    """Run as `child RUN_DIR TICKETS`; says "ready" once it works and "done" at the end."""
    run_dir, tickets = Path(sys.argv[1]), int(sys.argv[2])
    sampler, search = ScriptedSampler(latency=latency), ScriptedSearch(latency=latency)
    config = make_child_config()
    with open_log(run_dir, role="rollout") as log:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        environment = make_environment(sampler, search)
        anyio.run(run_rollouts, log, config, EXAMPLES, environment, silence(), Options(tickets, pause=0.01))
    sys.stdout.write("done\n")
    sys.stdout.flush()
