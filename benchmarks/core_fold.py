"""What it costs to turn recorded events into arrays and credit, beside a copy of the same bytes.

Times are the best of 15, in this process. The copy is measured into memory that is already mapped (warm),
and into fresh memory, which is what results that are kept must pay for too.
"""

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from core.advantage import ESTIMATORS, LeafTable, estimate
from core.arrays import pack_logprobs, pack_tokens
from core.batch import BatchSettings, build_step
from core.events import (
    Answered,
    ChosenLeaf,
    GroupAsked,
    GroupEvent,
    Observed,
    Outcome,
    Plan,
    Rewarded,
    SamplingParams,
    TurnSampled,
)
from core.ids import make_node, make_uid
from core.segments import segments
from core.tree import fold_group, members

Records = list[tuple[int, GroupEvent]]
T = TypeVar("T")

GROUPS, SIZE, LENGTH = 8, 8, 8192
PROMPT, TURN, TURNS = 192, 200, 5
OBSERVATION = (LENGTH - PROMPT - TURNS * TURN) // (TURNS - 1)
LEAVES = 100_000


def best(work: Callable[[], T]) -> tuple[float, T]:
    """Return the shortest of 15 runs in milliseconds, and the last result."""
    shortest = float("inf")
    for _ in range(15):
        start = time.perf_counter()
        result = work()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest * 1e3, result


def records_of(ticket: int, numbers: np.random.Generator) -> Records:
    """Return a group of SIZE trajectories of LENGTH tokens: five turns, four observations."""

    def tokens(count: int) -> bytes:
        return pack_tokens(numbers.integers(0, 150_000, count))

    asked = GroupAsked(
        uid=make_uid(ticket, 0),
        ticket=ticket,
        attempt=0,
        example_id="",
        question="",
        references=(),
        data_source="",
        prompt=tokens(PROMPT),
        plan=Plan(mode="chain", group_size=SIZE),
        policy_version=0,
        weights_uri="",
        params=SamplingParams(),
    )
    records: Records = [(0, asked)]
    for tree in range(1, SIZE + 1):
        parent = None
        for depth in range(TURNS):
            if parent is not None:
                records.append((tree, Observed(node=parent, content="", tokens=tokens(OBSERVATION))))
            node = make_node(0, 0, depth)
            turn = TurnSampled(
                node=node,
                parent=parent,
                turn=depth,
                tokens=tokens(TURN),
                sampled_logprobs=pack_logprobs(numbers.normal(-1, 0.3, TURN).astype(np.float32)),
                text="",
                stop_reason="stop",
                seed=0,
                sample_index=0,
                policy_version=0,
            )
            records.append((tree, turn))
            parent = node
        leaf = make_node(0, 0, TURNS - 1)
        records.append((tree, Answered(leaf=leaf, outcome=Outcome.ANSWERED, answer="", text="")))
        reward = Rewarded(node=leaf, value=tree % 2, scorer="", scorer_version="", source_digest="")
        records.append((tree, reward))
    return records


def fold_benchmark() -> None:
    numbers = np.random.default_rng(0)
    recorded = [records_of(ticket, numbers) for ticket in range(GROUPS)]
    folded, groups = best(lambda: [fold_group(records) for records in recorded])
    chosen = [ChosenLeaf(tree=tree, leaf=make_node(0, 0, TURNS - 1)) for tree in range(1, SIZE + 1)]
    everyone = [member for group in groups for member in members(group, chosen)]
    joined, parts = best(lambda: [segments(member) for member in everyone])
    built, batch = best(lambda: build_step([(group, chosen) for group in groups], BatchSettings()))
    hashed, _ = best(batch.digests)
    print(f"{GROUPS * SIZE} trajectories of {LENGTH} tokens, {sum(map(len, recorded))} records")
    segment_bytes = sum(s.tokens.nbytes + s.logprobs.nbytes for part in parts for s in part)
    datum_bytes = sum(array.nbytes for datum in batch.datums for array in datum)
    report("fold, events to groups", folded, segment_bytes)
    report("segments, groups to arrays", joined, segment_bytes)
    report("fold + segments", folded + joined, segment_bytes)
    report("build_step, groups to datums", built, datum_bytes)
    report("digests of the datums", hashed, datum_bytes)


def report(name: str, milliseconds: float, size: int) -> None:
    source = np.ones(size, dtype=np.uint8)
    target = np.empty_like(source)
    warm, _ = best(lambda: np.copyto(target, source))
    fresh, _ = best(source.copy)
    print(
        f"{name:30} {milliseconds:7.2f} ms for {size / 1e6:5.1f} MB: "
        f"{milliseconds / warm:5.1f} x a warm copy, {milliseconds / fresh:4.1f} x a fresh one"
    )


def trees_table() -> LeafTable:
    """Return 100,000 leaves: questions of 8, trees of 4 whose leaves share their first of 4 turns."""
    leaf = np.arange(LEAVES)
    tree = leaf // 4
    shared = int(tree[-1]) + 1
    own = shared + leaf[:, None] * 3 + np.arange(3)
    return LeafTable(
        rewards=np.random.default_rng(3).choice([1.0, 0.0, -0.1, 0.2], LEAVES),
        uid=leaf // 8,
        tree=tree,
        path_starts=np.arange(LEAVES + 1) * 4,
        path_nodes=np.column_stack([tree, own]).ravel(),
        node_parent=np.concatenate([np.full(shared, -1), np.column_stack([tree, own[:, :-1]]).ravel()]),
    )


def estimator_benchmark() -> None:
    table = trees_table()
    print(f"{LEAVES:,} leaves, {len(table.path_nodes):,} nodes on their paths")
    for name in ESTIMATORS:
        milliseconds, _ = best(lambda name=name: estimate(name, table))
        print(f"{name:30} {milliseconds:7.2f} ms")


if __name__ == "__main__":
    fold_benchmark()
    estimator_benchmark()
