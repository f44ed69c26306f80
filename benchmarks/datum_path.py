"""Our share of a step of 64 trajectories of 8,192 tokens, beside the SDK's own planning and encoding of it.

CPU seconds of one thread, so that a busy machine shows the same.

Ours: fetch, fold, advantages, datums, the SDK's objects, their digests, evidence, metrics, plan.
The SDK's: what forward_backward does with these objects until it has the bytes that it sends.
Beside them, the step's arrays made into the SDK's objects by us and by the SDK's plain constructors.

python -m benchmarks.datum_path      (the targets are <= 0.25 and <= 0.1)
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pytrio import Datum
from pytrio.client.builders.training import build_trainer_forward_payload
from pytrio.client.training_batch import plan_training_batch
from pytrio.model.limits import TrainingLimits
from pytrio.protocol.actor.events.codec import payload_to_wire_value
from pytrio.protocol.actor.events.event import (
    EventMetadata,
    EventType,
    build_event_envelope,
    pack_event_envelope,
)

from benchmarks.datums import plain
from benchmarks.recorded_steps import Shape, make_group, record_steps
from core.config import LearnerSettings
from core.datum import DatumArrays
from engine.datums import build_all
from learner.ahead import make_draft
from learner.batch import PlanContext, fetch, group_facts, plan_event, recipe_from_learner
from learner.metrics import step_metrics
from store.log import Log

GROUPS, SIZE, ROUNDS = 8, 8, 15
LONG = Shape(prompt=192, turns=4, sampled=500, observed=2000)
LIMITS = TrainingLimits(max_batch_size=None, max_tokens_per_request=None, max_seq_len=None)
METADATA = EventMetadata(index=1, step=0, timestamp=0, sdk="pytrio", sdk_version="", run_id="run")


class Ours(NamedTuple):
    """One passage along our path, in seconds, and what came of it."""

    whole: float
    drafting: float
    arrays: Sequence[DatumArrays]
    micro_batches: list[list[Datum]]


def ours(log: Log) -> Ours:
    """Time the whole path, and drafting alone."""
    recipe = recipe_from_learner(LearnerSettings(), 1e-4)
    started = time.process_time()
    taken = fetch(log.groups, log.next_step_groups(GROUPS))
    folded = time.process_time()
    _, rebuilt, prepared = make_draft(taken, recipe)
    drafted = time.process_time()
    plan_event(taken, rebuilt.batch, prepared.digests, recipe, PlanContext(1, 0, {}, 0.0))
    step_metrics(group_facts(taken, rebuilt.batch, 1), rebuilt.batch)
    ended = time.process_time()
    micro_batches = [one.datums for one in prepared.micro_batches]
    return Ours(ended - started, drafted - folded, rebuilt.batch.datums, micro_batches)


def sdk(micro_batches: list[list[Datum]]) -> float:
    """Return the seconds that the SDK plans and encodes."""
    started = time.process_time()
    for datums in micro_batches:
        plan = plan_training_batch(
            datums,
            loss_fn="importance_sampling",
            auto_shift=False,
            limits=LIMITS,
            tokenizer_vocab_size=150_000,
        )
        for chunk in plan.chunks:
            payload = build_trainer_forward_payload(
                chunk=chunk, loss_fn_config={}, auto_shift=False, gradient_accumulation=plan.totals
            )
            kind = EventType.TRAINER_FORWARD_BACKWARD
            pack_event_envelope(build_event_envelope(kind, payload_to_wire_value(kind, payload), METADATA))
    return time.process_time() - started


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes; its result is kept until then."""
    started = time.process_time()
    result = work()
    elapsed = time.process_time() - started
    del result
    return elapsed


def measure(log: Log) -> tuple[float, ...]:
    """Return one round's seconds: ours, drafting, the SDK's, our objects, the constructors' objects."""
    passage = ours(log)
    whole, drafting, arrays = passage[:3]
    theirs = sdk(passage.micro_batches)
    del passage
    built = seconds(lambda: build_all(arrays))
    return whole, drafting, theirs, built, seconds(lambda: [plain(datum) for datum in arrays])


def main() -> None:
    """Measure side by side and print medians."""
    with tempfile.TemporaryDirectory() as folder:
        log = record_steps(Path(folder) / "run", 1, 1, 2, LONG)
        rng = np.random.default_rng(1)
        for _ in range(GROUPS):
            make_group(log, SIZE, LONG, rng)
        count = len(ours(log).arrays)
        rows = [measure(log) for _ in range(ROUNDS)]
        log.close()
    whole, drafting, theirs, built, constructed = map(statistics.median, zip(*rows, strict=True))
    print(
        json.dumps(
            {
                "datums": count,
                "trajectory_tokens": LONG.trajectory,
                "ours_s": round(whole, 4),
                "of_which_drafting_s": round(drafting, 4),
                "sdk_plan_and_encode_s": round(theirs, 4),
                "ours_to_sdk": round(whole / theirs, 3),
                "our_objects_s": round(built, 4),
                "constructors_s": round(constructed, 4),
                "datums_to_constructors": round(built / constructed, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
