"""How close rollouts come to the longest chain of latencies, against a barrier after every round.

A scripted policy (three searches, then an answer) and a scripted search take exactly the time they are told,
as functions of seed and query, so that both ways wait for the same latencies. The rollouts are the real ones:
a real log with an fsync per commit. Usage: python -m benchmarks.rollout_concurrency [--json]
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec
import numpy as np

from core.config import Config
from core.events import SCHEMA_VERSION, RunOpened
from core.tree import Group, fold_group
from rollout.data import Example
from rollout.progress import silence
from rollout.run import Options, run_rollouts
from store.log import Log, open_log
from store.ports import GroupFate
from tests.fakes import (
    Latency,
    ScriptedSampler,
    ScriptedSearch,
    answer,
    call,
    chance,
    make_config,
    make_environment,
)

TURNS = 4
SAMPLING, SEARCHING = 1.0, 0.3
"""Seconds, the mean of both kinds of latency."""

Shape = Callable[[float], float]
"""A chance in [0, 1) -> a factor on the mean."""


def fixed(roll: float) -> float:
    """Every request takes the mean."""
    del roll
    return 1.0


def skewed(roll: float) -> float:
    """Most are fast, few are slow, as with a service that queues: half the mean, or (4 %) five times it."""
    return 0.5 if roll < 0.96 else 5.0


def searcher(prompt: str, seed: int, index: int) -> str:
    """Search three times, each time for something else, then answer."""
    told = prompt.count("All about")
    return answer("Ada") if told == TURNS - 1 else call(f"q{seed}-{index}")


def sampling_latency(shape: Shape) -> Latency:
    """Return the latency of a request, by its seed."""

    def latency(said: str, seed: int) -> float:
        del said
        return SAMPLING * shape(chance("sample", seed))

    return latency


def search_latency(shape: Shape) -> Latency:
    """Return the latency of a search, by its query."""

    def latency(query: str, seed: int) -> float:
        del seed
        return SEARCHING * shape(chance("search", query))

    return latency


def configure(groups: int, size: int) -> Config:
    """Return a configuration that admits all groups at once."""
    config = make_config(group_size=size, concurrency=groups * size)
    return msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, groups_per_step=groups)
    )


def roll(run_dir: Path, shape: Shape, groups: int, size: int) -> tuple[float, list[Group]]:
    """Return the seconds that the real rollouts take, and what they recorded."""
    sampler = ScriptedSampler(searcher, latency=sampling_latency(shape))
    environment = make_environment(sampler, ScriptedSearch(latency=search_latency(shape)))
    examples = [Example(f"q{index}", f"Who was number {index}?", ("Ada",)) for index in range(groups)]
    with open_log(run_dir, create=True, role="rollout") as log:
        log.open_run(opening())
        started = time.monotonic()
        anyio.run(
            run_rollouts, log, configure(groups, size), examples, environment, silence(), Options(groups)
        )
        seconds = time.monotonic() - started
        return seconds, recorded(log)


def opening() -> RunOpened:
    """Return the event that opens a run."""
    return RunOpened(
        schema=SCHEMA_VERSION, config={}, config_digest="", fingerprints={}, base_model="", seed=0, run_id="b"
    )


def recorded(log: Log) -> list[Group]:
    """Return all closed groups."""
    return [
        fold_group((record.tree, record.event) for record in log.groups.fetch(row.uid).records)
        for row in log.group_rows(GroupFate.CLOSED)
    ]


def chains(groups: Sequence[Group], shape: Shape) -> np.ndarray:
    """Return the latencies of each trajectory, in order: float64 [trajectories, 2 * TURNS - 1]."""
    sampling, searching = sampling_latency(shape), search_latency(shape)
    rows = []
    for group in groups:
        for tree in group.trees.values():
            row: list[float] = []
            for node in tree.nodes.values():
                row.append(sampling("", node.sample.seed))
                if node.tool_call is not None:
                    row.append(searching(str(node.tool_call.arguments["query"]), 0))
            rows.append(row)
    return np.asarray(rows)


async def barrier(latencies: np.ndarray) -> float:
    """Return the seconds that the same latencies take when every round waits for its slowest."""
    started = time.monotonic()
    for column in latencies.T:
        async with anyio.create_task_group() as tasks:
            for seconds in column:
                tasks.start_soon(anyio.sleep, float(seconds))
    return time.monotonic() - started


def compare(name: str, shape: Shape, groups: int = 8, size: int = 8) -> dict[str, float | str]:
    """Measure both ways for 64 trajectories of 4 turns."""
    with tempfile.TemporaryDirectory() as folder:
        seconds, found = roll(Path(folder), shape, groups, size)
    latencies = chains(found, shape)
    assert latencies.shape == (groups * size, 2 * TURNS - 1)
    longest = float(latencies.sum(axis=1).max())
    waited = anyio.run(barrier, latencies)
    return {
        "latencies": name,
        "trajectories": groups * size,
        "longest_chain_s": round(longest, 3),
        "rollouts_s": round(seconds, 3),
        "barrier_s": round(waited, 3),
        "rollouts_over_longest": round(seconds / longest, 3),
        "barrier_over_longest": round(waited / longest, 3),
    }


def memory(groups: int, size: int = 8) -> dict[str, float | str]:
    """Measure the peak resident memory of so many trajectories at once."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        seconds, found = roll(Path(folder), fixed, groups, size)
    cpu = time.process_time() - cpu
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    longest = float(chains(found, fixed).sum(axis=1).max())
    return {
        "latencies": "fixed",
        "trajectories": groups * size,
        "longest_chain_s": round(longest, 3),
        "rollouts_s": round(seconds, 3),
        "rollouts_over_longest": round(seconds / longest, 3),
        "cpu_ms_per_turn": round(1000 * cpu / (groups * size * TURNS), 2),
        "peak_rss_mb": round(after / 1024, 1),
        "grown_by_mb": round((after - before) / 1024, 1),
    }


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON lines")
    as_json = parser.parse_args().json
    for measured in (compare("fixed", fixed), compare("skewed", skewed), memory(32), memory(128)):
        text = json.dumps(measured) if as_json else "  ".join(f"{k}={v}" for k, v in measured.items())
        print(text, flush=True)


if __name__ == "__main__":
    main()
