"""Reading, size and following of a log.

    python -m benchmarks.store_reading [--steps 1000] [--groups 100000] [--json FILE] [--tokenizer FOLDER]

- `step`: a random step of 64 trajectories (8 groups of 8), fetched and decoded, from a log of `--steps`
  steps; the same groups unsealed, for comparison.
- `size`: bytes per token of a log of 240 groups of HotpotQA questions with real passages, text included.
  Needs `--tokenizer`, a folder with a tokenizer.json; without it made-up text stands in.
- `follow`: from the commit of a journal record in another process to its arrival, and the CPU of an idle
  follower.
- `memory`: anonymous memory of a writer after a tenth of `--groups` small groups and after all of them.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from benchmarks.made_log import PASSAGES, QUESTIONS, Encoder, Material, Words, chosen, hotpot
from benchmarks.store_appends import RUN, claimed
from core.events import ChosenLeaf, GoalSet, GroupAsked, GroupEvent, Observed, TurnSampled
from store import codec
from store.bundlefile import export_bundles
from store.copying import compact
from store.exchange import Arrival, Passport, enter_groups
from store.log import open_log
from store.ports import StreamWrite
from store.records import RawRecord

MEMBERS, GROUPS_PER_STEP = 8, 8
FOLLOWED, IDLE_SECONDS, SIZED_GROUPS = 200, 10.0, 240


def arrival(material: Material, ticket: int) -> Arrival:
    """Return a complete group as it enters a log."""
    records = tuple(
        RawRecord(tree, position, 1, codec.encode(event))
        for tree, events in material.group(ticket, MEMBERS)
        for position, event in enumerate(events)
    )
    passport = Passport(
        uid=f"{ticket:06d}.0", policy_version=0, weights_uri="", opened_at_step=0, chosen=chosen(MEMBERS)
    )
    return Arrival(passport=passport, records=records)


def timed(work: Callable[[], object]) -> float:
    """Return milliseconds."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def steps(place: Path, count: int) -> dict[str, float]:
    """Return milliseconds per random step, sealed and unsealed."""
    material = made_material()
    with open_log(place / "steps", create=True, role="rollout", sync=False) as log:
        log.open_run(RUN)
        enter_groups(log, (arrival(material, ticket) for ticket in range(count * GROUPS_PER_STEP)))
        open_uids = []
        for _ in range(GROUPS_PER_STEP):
            group = claimed(log)
            log.groups.append_sync(
                group,
                [StreamWrite(tree, 0, events) for tree, events in material.group(group.ticket, MEMBERS)],
            )
            open_uids.append(group.uid)
        draw = random.Random(0)

        def one_step() -> None:
            first = draw.randrange(count) * GROUPS_PER_STEP
            for ticket in range(first, first + GROUPS_PER_STEP):
                log.groups.fetch(f"{ticket:06d}.0")

        def unsealed() -> None:
            for uid in open_uids:
                log.groups.fetch(uid)

        sealed = statistics.median(timed(one_step) for _ in range(300))
        return {
            "step of 64 trajectories ms (goal 2)": sealed,
            "the same unsealed ms": statistics.median(timed(unsealed) for _ in range(300)),
        }


def made_material() -> Material:
    """Return made-up text, short as the embedded model's."""
    return Material(Words(0), 0, QUESTIONS, PASSAGES)


def size(place: Path, tokenizer: str | None) -> dict[str, float]:
    """Return bytes per token of a log, besides 4 bytes per sampled token."""
    material = hotpot(_encoder(tokenizer)) if tokenizer else made_material()
    with open_log(place / "size", create=True, role="rollout", sync=False) as log:
        log.open_run(RUN)
        enter_groups(log, (arrival(material, ticket) for ticket in range(SIZED_GROUPS)))
        tokens, sampled = 0, 0
        for row in log.group_rows():
            for record in log.groups.fetch(row.uid).records:
                event = record.event
                if isinstance(event, GroupAsked):
                    tokens += len(event.prompt) // 4
                elif isinstance(event, TurnSampled):
                    tokens += len(event.tokens) // 4
                    sampled += len(event.tokens) // 4
                elif isinstance(event, Observed):
                    tokens += len(event.tokens) // 4
    grown = (place / "size" / "log" / "data.mdb").stat().st_size
    compacted = compact(place / "size").after
    with open_log(place / "size", readonly=True) as log:
        export_bundles(log, place / "bundles")
    exported = (place / "bundles").stat().st_size
    return {
        "tokens per group": tokens / SIZED_GROUPS,
        "sampled share": sampled / tokens,
        "bytes per token beside 4 per sampled one: as grown": (grown - 4 * sampled) / tokens,
        "  compacted (goal 1.8)": (compacted - 4 * sampled) / tokens,
        "  exported": (exported - 4 * sampled) / tokens,
    }


def _encoder(folder: str) -> Encoder:
    tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

    class Ids:
        """The tokenizer's ids alone."""

        def encode(self, text: str) -> Sequence[int]:
            """Return token ids."""
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return ids

    return Ids()


def _follow(connection: Connection, run_dir: Path) -> None:
    async def seen() -> None:
        with open_log(run_dir, readonly=True) as log:
            connection.send("ready")
            async for record in log.journal.follow(1):
                connection.send(time.monotonic())
                if record.index == FOLLOWED:
                    break
            begun, used = time.monotonic(), time.process_time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SECONDS):
                    async for _ in log.journal.follow(FOLLOWED + 1):
                        pass
            connection.send((time.process_time() - used) / (time.monotonic() - begun))

    asyncio.run(seen())


def follow(place: Path) -> dict[str, float]:
    """Return how late a follower in another process sees a commit, and what it uses when idle."""
    late: list[float] = []
    with open_log(place / "follow", create=True, role="learner") as log:
        log.open_run(RUN)
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(target=_follow, args=(theirs, place / "follow"))
        child.start()
        ours.recv()
        for number in range(FOLLOWED):
            log.journal.append_sync([GoalSet(max_steps=number)])
            committed = time.monotonic()
            late.append(ours.recv() - committed)
            time.sleep(random.random() * 0.05)
        idle = ours.recv()
        child.join()
    return {
        "follow p50 ms (goal 30)": float(np.percentile(late, 50)) * 1e3,
        "follow p99 ms (goal 60)": float(np.percentile(late, 99)) * 1e3,
        "idle follower, % of a core (goal 0.5)": idle * 100,
    }


def memory(place: Path, groups: int) -> dict[str, float]:
    """Return megabytes resident before and after many small groups, in a process that does nothing else."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_write_many, args=(theirs, place, groups))
    child.start()
    early, late = ours.recv()
    child.join()
    return {
        "groups written": groups,
        "anonymous memory MB after a tenth of them": early,
        "  after all of them": late,
    }


def _write_many(connection: Connection, place: Path, groups: int) -> None:
    events: list[GroupEvent] = list(made_material().chain(1, 1, PASSAGES))
    with open_log(place / "memory", create=True, role="rollout", sync=False) as log:
        log.open_run(RUN)
        resident: list[float] = []
        for number in range(groups):
            group = claimed(log)
            log.groups.append_sync(group, [StreamWrite(1, 0, events)])
            log.groups.close_sync(group, (ChosenLeaf(tree=1, leaf="0.0.2"),), 0.0)
            if number in {groups // 10, groups - 1}:
                resident.append(_anonymous())
    connection.send(resident)


def _anonymous() -> float:
    """Return MB of memory that is this process's own; the map's pages belong to the page cache."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--tokenizer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="rolltape-bench-"))
    try:
        result = follow(place) | size(place, options.tokenizer) | steps(place, options.steps)
        if options.groups:
            result |= memory(place, options.groups)
    finally:
        shutil.rmtree(place)
    for name, value in result.items():
        print(f"{name:55} {value:12,.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
