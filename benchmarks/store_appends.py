"""Durable appends side by side: Rolltape's log, SQLite (WAL, FULL), agent-lightning's memory store.

    python -m benchmarks.store_appends [--rounds 5] [--agentlightning PYTHON] [--flush-ms N] [--json FILE]

All contenders run in one process, on one disk, in interleaved rounds, so that ratios hold on any machine; the
medians are printed. SQLite stores the very bytes that Rolltape stores, one row per event.

- `turns`: 64 concurrent trajectories; each turn (a sample, a call, an observation) is acknowledged before the
  next. SQLite commits one transaction per turn, on one connection, which is its fastest way.
- `groups`: whole groups of 8 trajectories, one after another, each in one transaction in both.
- `lag`: how late a 1 ms ticker on the event loop is while `turns` runs.
- `stall`: four processes write turns to one log; the longest that any append took.
- `agentlightning`: spans per second into InMemoryLightningStore with 64 concurrent tasks (no disk at all),
  run by the interpreter PYTHON, which has agentlightning 0.3.0 installed.

`--flush-ms N` shows what a slower disk would: strace makes every fdatasync of all contenders N ms slower. The
second, smaller flush of an LMDB commit, a synced write, stays as fast as the disk is.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.made_log import Words, made_group
from core.events import GroupEvent, RunOpened
from store import codec
from store.log import Log, open_log
from store.ports import Admission, Claim, StreamWrite

TRAJECTORIES, TURNS = 64, 12
GROUPS, MEMBERS = 60, 8
STALL_SECONDS, WRITERS = 4.0, 4
ADMISSION = Admission(max_staleness=0, groups_per_step=1_000_000)
RUN = RunOpened(
    schema=1, config={}, config_digest="d", fingerprints={}, base_model="b", seed=0, run_id="benchmark"
)


def turns_of(number: int) -> list[list[GroupEvent]]:
    """Return the turns of one trajectory: a sample, a call and an observation each."""
    streams = made_group(Words(number), number, members=TURNS // 2)
    turns = [list(events[at : at + 3]) for _, events in streams[1:] for at in (0, 3)]
    return turns[:TURNS]


def claimed(log: Log) -> Claim:
    """Return a new group."""
    found = log.groups.claim_sync(log.worker_id, ADMISSION, 0.0)
    assert isinstance(found, Claim)
    return found


async def _rolltape_turns(
    log: Log, work: Sequence[list[list[GroupEvent]]], lags: list[float] | None
) -> float:
    claims = [claimed(log) for _ in range(len(work) // MEMBERS)]

    async def one(number: int) -> None:
        group = claims[number // MEMBERS]
        at = 0
        for turn in work[number]:
            await log.groups.append(group, [StreamWrite(1 + number % MEMBERS, at, turn)])
            at += len(turn)

    ticker = asyncio.create_task(_tick(lags)) if lags is not None else None
    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(len(work))))
    took = time.perf_counter() - begun
    if ticker is not None:
        ticker.cancel()
    return took


async def _tick(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.001
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - due)


class Sqlite:
    """Its fastest durable form: one connection, WAL, one prepared insert per row."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("pragma journal_mode=wal")
        self.connection.execute("pragma synchronous=full")
        self.connection.execute(
            "create table records (ticket int, tree int, position int, body blob, "
            "primary key (ticket, tree, position)) without rowid"
        )

    def turns(self, work: Sequence[list[list[GroupEvent]]], offset: int) -> float:
        """Write every turn in a transaction of its own."""
        begun = time.perf_counter()
        for turn in range(TURNS):
            for number, turns in enumerate(work):
                self.write(offset + number, [(1, turn * 3, turns[turn])])
        return time.perf_counter() - begun

    def write(self, ticket: int, streams: Sequence[tuple[int, int, Sequence[GroupEvent]]]) -> None:
        """Write records in one transaction."""
        self.connection.execute("begin immediate")
        self.connection.executemany(
            "insert into records values (?, ?, ?, ?)",
            [
                (ticket, tree, at + position, codec.encode(event))
                for tree, at, events in streams
                for position, event in enumerate(events)
            ],
        )
        self.connection.execute("commit")


def groups_with(
    write: Callable[[int, list[tuple[int, list[GroupEvent]]]], None],
    groups: Sequence[list[tuple[int, list[GroupEvent]]]],
) -> float:
    """Return the seconds that writing whole groups takes."""
    begun = time.perf_counter()
    for number, streams in enumerate(groups):
        write(number, streams)
    return time.perf_counter() - begun


def _stalling(connection: Connection, run_dir: Path, seed: int) -> None:
    longest, count = 0.0, 0
    with open_log(run_dir, role="rollout") as log:
        turns = turns_of(seed)
        connection.send("ready")
        connection.recv()
        end = time.perf_counter() + STALL_SECONDS
        while time.perf_counter() < end:
            group, at = claimed(log), 0
            for turn in turns:
                begun = time.perf_counter()
                log.groups.append_sync(group, [StreamWrite(1, at, turn)])
                longest = max(longest, time.perf_counter() - begun)
                at += len(turn)
                count += 1
        connection.send((longest, count))
        connection.recv()  # open until all are done, or the others would adopt this one's groups


def stalls(run_dir: Path) -> tuple[float, float]:
    """Return the longest append in seconds and turns per second, over four writer processes."""
    with open_log(run_dir, create=True, role="rollout") as log:
        log.open_run(RUN)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(WRITERS)]
    children = [
        context.Process(target=_stalling, args=(theirs, run_dir, seed))
        for seed, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    for ours, _ in pipes:
        ours.recv()
    for ours, _ in pipes:
        ours.send("go")
    found = [ours.recv() for ours, _ in pipes]
    for ours, _ in pipes:
        ours.send("end")
    for child in children:
        child.join()
    return max(longest for longest, _ in found), sum(count for _, count in found) / STALL_SECONDS


AGENTLIGHTNING = """
import asyncio, json, sys, time
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.types import Span
async def main():
    turns, tasks = 6, 64
    store = InMemoryLightningStore()
    ids, logprobs, text = list(range(60)), [-0.5] * 60, "x" * 300
    async def one():
        rollout = await store.start_rollout(input={"question": "q"})
        for number in range(turns):
            await store.add_span(Span.from_attributes(rollout_id=rollout.rollout_id,
                attempt_id=rollout.attempt.attempt_id, sequence_id=number, name="turn",
                attributes={"token_ids": ids, "logprobs": logprobs, "text": text}))
    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(tasks)))
    print(json.dumps(turns * tasks / (time.perf_counter() - begun)))
asyncio.run(main())
"""


def agentlightning(python: str) -> float:
    """Return spans per second."""
    done = subprocess.run(
        [python, "-c", AGENTLIGHTNING],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    return float(done.stdout.splitlines()[-1])


def one_round(place: Path, peer: str | None) -> dict[str, float]:
    """Run every contender once; return rates per second and times in milliseconds."""
    work = [turns_of(number) for number in range(TRAJECTORIES)]
    groups = [made_group(Words(100 + number), number, members=MEMBERS) for number in range(GROUPS)]
    turns = TRAJECTORIES * TURNS
    lags: list[float] = []
    found: dict[str, float] = {}
    with open_log(place / "run", create=True, role="rollout") as log:
        log.open_run(RUN)
        found["rolltape turns/s"] = turns / asyncio.run(_rolltape_turns(log, work, None))
        sqlite = Sqlite(place / "peer.db")
        found["sqlite turns/s"] = turns / sqlite.turns(work, 0)
        asyncio.run(_rolltape_turns(log, work, lags))

        def ours(_: int, streams: list[tuple[int, list[GroupEvent]]]) -> None:
            log.groups.append_sync(claims.pop(), [StreamWrite(tree, 0, events) for tree, events in streams])

        claims = [claimed(log) for _ in groups]
        renamed = [made_group(Words(100 + c.ticket), c.ticket, members=MEMBERS) for c in reversed(claims)]
        found["rolltape groups/s"] = GROUPS / groups_with(ours, renamed)
    found["sqlite groups/s"] = GROUPS / groups_with(
        lambda number, streams: sqlite.write(
            10_000 + number, [(tree, 0, events) for tree, events in streams]
        ),
        groups,
    )
    found["loop lag p50 ms"], found["loop lag p99 ms"] = (
        float(np.percentile(lags, q)) * 1e3 for q in (50, 99)
    )
    longest, rate = stalls(place / "stalls")
    found["four writers: longest append ms"], found["four writers: turns/s"] = longest * 1e3, rate
    if peer:
        found["agentlightning spans/s"] = agentlightning(peer)
        found["rolltape events/s"] = 3 * found["rolltape turns/s"]
    return found


def run_slowed(milliseconds: float) -> None:
    """Start this program anew under strace, which makes each flush slower."""
    os.environ[SLOWED] = "1"
    slow = f"inject=fdatasync:delay_exit={round(milliseconds * 1000)}"
    only = ["-f", "-qq", "--seccomp-bpf", "-o", os.devnull, "-e", "trace=fdatasync", "-e", slow]
    os.execvp("strace", ["strace", *only, sys.executable, "-m", "benchmarks.store_appends", *sys.argv[1:]])


SLOWED = "ROLLTAPE_BENCHMARK_SLOWED"
RATIOS = {
    "turns: rolltape / sqlite (goal 20)": ("rolltape turns/s", "sqlite turns/s"),
    "groups: rolltape / sqlite (goal 1)": ("rolltape groups/s", "sqlite groups/s"),
    "events: rolltape / agentlightning (goal 50)": ("rolltape events/s", "agentlightning spans/s"),
}


def main() -> None:
    """Run the rounds and print medians and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agentlightning", help="interpreter that has agentlightning 0.3.0")
    parser.add_argument("--flush-ms", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.flush_ms and SLOWED not in os.environ:
        run_slowed(options.flush_ms)
    rounds = []
    for _ in range(options.rounds):
        place = Path(tempfile.mkdtemp(prefix="rolltape-bench-"))
        rounds.append(one_round(place, options.agentlightning))
        shutil.rmtree(place)
    result = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    for name, (ours, theirs) in RATIOS.items():
        if ours in result and theirs in result:
            result[name] = statistics.median(each[ours] / each[theirs] for each in rounds)
    for name, value in result.items():
        print(f"{name:45} {value:12,.2f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
