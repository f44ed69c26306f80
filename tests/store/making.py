"""Owns what the store's tests are made of: a run, group events with plain values, whole groups and steps."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from core.arrays import pack_logprobs, pack_tokens
from core.events import (
    AdamParams,
    Answered,
    ChosenLeaf,
    GroupAsked,
    GroupEvent,
    Observed,
    Outcome,
    Plan,
    PlannedGroup,
    PolicyPublished,
    Rewarded,
    RunOpened,
    SamplingParams,
    StepCommitted,
    StepPlanned,
    ToolCalled,
    TurnSampled,
)
from core.ids import parse_uid
from store.log import Log, Role, open_log
from store.ports import Admission, Claim, NoClaim, StreamWrite
from store.snapshot import Snapshot
from store.writer import Plan as Written

MAP_SIZE = 1 << 28
OPEN_ADMISSION = Admission(max_staleness=0, groups_per_step=1_000_000)
"""Never says wait."""


def run_event(digest: str = "d" * 64) -> RunOpened:
    """Return the event that opens a run."""
    return RunOpened(
        schema=1,
        config={"run": {"seed": 1}},
        config_digest=digest,
        fingerprints={"code": "x"},
        base_model="tiny",
        seed=1,
        run_id="run-1",
    )


def open_run(run_dir: Path, role: Role = "rollout", *, sync: bool = True) -> Log:
    """Return the log of a run, created when there is none."""
    log = open_log(run_dir, create=True, role=role, map_size=MAP_SIZE, sync=sync)
    log.open_run(run_event())
    return log


def asked(uid: str, version: int = 0) -> GroupAsked:
    """Return the first record of a group."""
    ticket, attempt = parse_uid(uid)
    return GroupAsked(
        uid=uid,
        ticket=ticket,
        attempt=attempt,
        example_id=f"example-{ticket}",
        question="Who wrote it?",
        references=("She",),
        data_source="made",
        prompt=pack_tokens(range(20)),
        plan=Plan(mode="chain", group_size=2),
        policy_version=version,
        weights_uri="",
        params=SamplingParams(),
    )


def sampled(depth: int, *, tokens: int = 12, seed: int = 0, version: int = 0) -> TurnSampled:
    """Return a turn at `depth` of a chain, with random tokens and logprobs."""
    rng = np.random.default_rng([seed, depth, tokens])
    return TurnSampled(
        node=f"0.0.{depth}",
        parent=f"0.0.{depth - 1}" if depth else None,
        turn=depth,
        tokens=pack_tokens(rng.integers(0, 151_000, tokens)),
        sampled_logprobs=pack_logprobs(-rng.random(tokens, dtype=np.float32)),
        text=f"I will look for it ({seed}).",
        stop_reason="stop",
        seed=seed,
        sample_index=0,
        policy_version=version,
    )


def chain(seed: int = 0, *, tokens: int = 12, version: int = 0) -> tuple[GroupEvent, ...]:
    """Return the records of a chain of two turns that ends with an answer and a reward."""
    return (
        sampled(0, seed=seed, tokens=tokens, version=version),
        ToolCalled(node="0.0.0", call_id="c", tool="search", arguments={"query": "it"}),
        Observed(
            node="0.0.0",
            content="[1] She wrote it.",
            tokens=pack_tokens(range(100, 100 + tokens)),
            status="success",
            backend="local",
            call_id="c",
        ),
        sampled(1, seed=seed, tokens=tokens, version=version),
        Answered(leaf="0.0.1", outcome=Outcome.ANSWERED, answer="She", text="Answer: She"),
        Rewarded(node="0.0.1", value=1.0, scorer="em_format", scorer_version="1", source_digest="s"),
    )


@contextlib.asynccontextmanager
async def busy_writer(log: Log) -> AsyncIterator[None]:
    """Hold the writer's thread inside a transaction, so that what is queued meanwhile becomes one batch."""
    loop, started, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hold(_: Snapshot) -> Written[None]:
        loop.call_soon_threadsafe(started.set)
        release.wait(60)
        return Written((), None)

    holding = asyncio.create_task(log._writer.run(hold, 1))
    await started.wait()
    yield
    release.set()
    await holding


CHOSEN = (ChosenLeaf(tree=1, leaf="0.0.1"), ChosenLeaf(tree=2, leaf="0.0.1"))


def claim(log: Log, admission: Admission = OPEN_ADMISSION, worker: str | None = None) -> Claim:
    """Return a claim; fails when there is none."""
    found = log.groups.claim_sync(worker or log.worker_id, admission, 1.0)
    assert not isinstance(found, NoClaim), found
    return found


def fill(log: Log, group: Claim, trees: int = 2) -> None:
    """Write whole chains into a group."""
    version = group.policy_version
    log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid, version)])])
    for tree in range(1, trees + 1):
        log.groups.append_sync(group, [StreamWrite(tree, 0, chain(group.ticket * 8 + tree, version=version))])


def closed(log: Log, count: int = 1) -> list[PlannedGroup]:
    """Claim, fill and close groups; return them as a plan names them."""
    made = []
    for _ in range(count):
        group = claim(log)
        fill(log, group)
        made.append(PlannedGroup(uid=group.uid, digest=log.groups.close_sync(group, CHOSEN, 2.0)))
    return made


def trained(log: Log, step: int, groups: int = 2) -> None:
    """Plan and commit a step of new groups, and publish a policy."""
    log.journal.append_sync([plan(step, closed(log, groups))])
    log.journal.append_sync(
        [
            StepCommitted(step=step, skipped=False, policy_version=step + 1),
            PolicyPublished(policy_version=step + 1, weights_uri=f"w{step + 1}", step=step + 1),
        ]
    )


def plan(
    step: int, groups: Sequence[PlannedGroup], *, estimator: str = "group_mean", at: float = 0.0
) -> StepPlanned:
    """Return a plan of `groups`."""
    return StepPlanned(
        step=step,
        groups=tuple(groups),
        estimator=estimator,
        estimator_params={},
        shaping="base",
        shaping_params={},
        prefix_weight="each",
        kl_beta=0.0,
        loss="importance_sampling",
        loss_config={},
        adam=AdamParams(learning_rate=1e-4),
        members=2 * len(groups),
        micro_batches=((0, 1),),
        datum_digests=("a", "b"),
        batch_digest="c",
        policy_version=step,
        fingerprints={},
        at=at,
    )
