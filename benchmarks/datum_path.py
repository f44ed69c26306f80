"""Our share of a step of 64 trajectories of 8,192 tokens, beside the SDK's own planning and encoding of it.

CPU seconds of one thread, so that a busy machine shows the same.

Ours: fetch, fold, advantages, datums, the SDK's objects, their digests, evidence, metrics, plan.
The SDK's: what forward_backward does with these objects before anything is sent.

python -m benchmarks.datum_path      (the target is <= 25 %)
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import msgpack
import numpy as np
from pytrio import Datum
from pytrio.client.builders.training import build_trainer_forward_payload
from pytrio.client.training_batch import plan_training_batch
from pytrio.model.limits import TrainingLimits

from benchmarks.recorded_steps import Shape, make_group, record_steps
from core.config import LearnerSettings
from learner.ahead import make_draft
from learner.batch import PlanContext, fetch, group_facts, plan_event, recipe_from_learner
from learner.metrics import step_metrics
from store.log import Log

GROUPS, SIZE, ROUNDS = 8, 8, 5
LONG = Shape(prompt=192, turns=4, sampled=500, observed=2000)
LIMITS = TrainingLimits(max_batch_size=None, max_tokens_per_request=None, max_seq_len=None)


def ours(log: Log) -> tuple[float, float, list[list[Datum]]]:
    """Return the seconds of the whole path, those of drafting alone, and the datums per micro-batch."""
    recipe = recipe_from_learner(LearnerSettings(), 1e-4)
    started = time.process_time()
    taken = fetch(log.groups, log.next_step_groups(GROUPS))
    folded = time.process_time()
    _, rebuilt, prepared = make_draft(taken, recipe)
    drafted = time.process_time()
    plan_event(taken, rebuilt.batch, prepared.digests, recipe, PlanContext(1, 0, {}, 0.0))
    step_metrics(group_facts(taken, rebuilt.batch, 1), rebuilt.batch)
    ended = time.process_time()
    return ended - started, drafted - folded, [one.datums for one in prepared.micro_batches]


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
            msgpack.packb(payload.to_wire_value(), use_bin_type=True)
    return time.process_time() - started


def main() -> None:
    """Measure side by side and print medians."""
    with tempfile.TemporaryDirectory() as folder:
        log = record_steps(Path(folder) / "run", 1, 1, 2, LONG)
        rng = np.random.default_rng(1)
        for _ in range(GROUPS):
            make_group(log, SIZE, LONG, rng)
        rows = []
        for _ in range(ROUNDS):
            whole, drafting, datums = ours(log)
            rows.append((whole, drafting, sdk(datums)))
            count = sum(map(len, datums))
            del datums
        log.close()
    whole, drafting, theirs = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        json.dumps(
            {
                "datums": count,
                "trajectory_tokens": LONG.trajectory,
                "ours_s": round(whole, 4),
                "of_which_drafting_s": round(drafting, 4),
                "sdk_plan_and_encode_s": round(theirs, 4),
                "ours_to_sdk": round(whole / theirs, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
