"""Arrays to `pytrio.Datum`, against the SDK's plain constructors: 64 datums of 8,191 tokens.

python -m benchmarks.datums
"""

import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import pytrio

from core.datum import DatumArrays
from engine.datums import build_all, prepare

COUNT, LENGTH, ROUNDS = 64, 8191, 7


def example(rng: np.random.Generator) -> DatumArrays:
    """Return a datum of which a quarter was sampled, in stretches, with one advantage."""
    tokens = rng.integers(0, 150_000, LENGTH + 1)
    sampled = np.arange(LENGTH) % 700 >= 520
    logprobs = np.where(sampled, rng.normal(size=LENGTH), 0).astype(np.float32)
    advantages = np.where(sampled, 0.37, 0).astype(np.float32)
    return DatumArrays(tokens[:-1], tokens[1:], logprobs, advantages)


def plain(arrays: DatumArrays) -> pytrio.Datum:
    """Return what the constructors make."""
    return pytrio.Datum(
        model_input=pytrio.ModelInput.from_ints(arrays.inputs.tolist()),
        loss_fn_inputs={
            "target_tokens": arrays.targets,
            "logprobs": arrays.logprobs,
            "advantages": arrays.advantages,
        },
    )


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes; its result is kept until then."""
    started = time.perf_counter()
    result = work()
    elapsed = time.perf_counter() - started
    del result
    return elapsed


def main() -> None:
    """Measure side by side and print medians."""
    rng = np.random.default_rng(0)
    datums = [example(rng) for _ in range(COUNT)]
    assert build_all(datums[:4]) == [plain(datum) for datum in datums[:4]]
    rows = [
        (
            seconds(lambda: [plain(datum) for datum in datums]),
            seconds(lambda: build_all(datums)),
            seconds(lambda: prepare(datums)),
        )
        for _ in range(ROUNDS)
    ]
    slow, fast, digested = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        json.dumps(
            {
                "plain_s": round(slow, 4),
                "build_s": round(fast, 4),
                "prepare_with_digests_s": round(digested, 4),
                "build_to_plain": round(fast / slow, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
