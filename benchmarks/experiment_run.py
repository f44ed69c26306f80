"""Owns one run of the experiment: rollout and learner on one log until the tokens are spent, evaluated."""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from benchmarks.experiment_plan import COMMON, Cell
from core.config import Config, config_digest, to_plain
from core.events import SCHEMA_VERSION, Evaluated, RunOpened, StepCommitted, StepPlanned
from core.settings import build_config
from engine.client import Session, connect
from engine.launch import stop
from learner.fingerprints import code_fingerprints
from learner.loop import run_learner
from learner.stats import budget_report, groups_of
from learner.work import Hooks
from rollout.data import Example
from rollout.environment import build_environment, freeze, questions
from rollout.evaluate import EvalOptions, Exam, Weights, evaluate
from rollout.progress import silence
from rollout.run import Environment, run_rollouts
from store.log import Log, open_log
from store.ports import GroupFate

SAMPLES = 4
"""Per held-out question, at temperature 1."""
MANY_STEPS = 1_000_000


class Workshop(NamedTuple):
    """Where the questions are, the same for all runs."""

    folder: Path
    corpus: Path
    train: Path
    test: Path


class TokensSpentError(Exception):
    """Raised when the last mark is reached; ends the learner between two steps."""


class Run(NamedTuple):
    """One run, put together."""

    cell: Cell
    config: Config
    log: Log
    environment: Environment
    """The rollouts'."""
    learner: Session
    examiner: Environment
    """The evaluations': of the learner's session, because they run on its thread."""
    held_out: Sequence[Example]


class Meter:
    """Counts the tokens generated for trained groups; makes a row at the step nearest to each mark."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.steps: list[StepCommitted] = []
        self.generated = 0.0
        self.rows: list[dict[str, Any]] = []
        self.started = time.monotonic()
        self.evaluating = 0.0

    def committed(self, _planned: StepPlanned, event: StepCommitted) -> None:
        """Take one more step into account; raises TokensSpentError after the last mark's row."""
        self.steps.append(event)
        self.generated += event.rollout_metrics["budget/generated_tokens"]
        half_a_step = self.generated / len(self.steps) / 2
        mark = self.run.cell.marks[len(self.rows)]
        if self.generated + half_a_step >= mark:
            self.add_row(mark)
        if len(self.rows) == len(self.run.cell.marks):
            raise TokensSpentError

    def add_row(self, mark: int) -> None:
        """Evaluate the newest weights and note all that is known."""
        started = time.monotonic()
        cell, fingerprints = self.run.cell, code_fingerprints() | self.run.learner.fingerprints()
        row = {
            "cell": cell.name,
            "arm": cell.arm.name,
            "estimator": cell.arm.estimator,
            "tree": cell.arm.tree,
            "chains": cell.arm.chains,
            "seed": cell.seed,
            "mark": mark,
            **measured(ask(self.run)),
            **learned(self.steps),
            "generated": int(self.generated),
            **(costs(self.run.log) if self.steps else {}),
            "train_seconds": round(started - self.started - self.evaluating, 1),
            "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "git": fingerprints["git"],
            "base_model": fingerprints["base_model"],
        }
        self.evaluating += time.monotonic() - started
        self.rows.append(row | {"eval_seconds": round(time.monotonic() - started, 1)})


def run_cell(cell: Cell, shop: Workshop) -> list[dict[str, Any]]:
    """Train and evaluate one run; return its rows of the results file. Leaves nothing running."""
    run_dir = shop.folder / f"run-{os.getpid()}-{time.monotonic_ns()}"
    config = freeze(build_config("demo", {}, settings(cell, shop)))
    run_dir.mkdir()
    try:
        with (
            connect(config.engine, run_dir) as session,
            connect(config.engine, run_dir) as learner,
            open_log(run_dir, create=True, role="learner") as log,
        ):
            log.open_run(opened(config, session))
            run = Run(
                cell,
                config,
                log,
                build_environment(config, session, run_dir, cache=log),
                learner,
                build_environment(config, learner, run_dir, cache=log),
                questions(config, run_dir, str(shop.test)),
            )
            meter = Meter(run)
            if cell.marks:
                train(run, meter)
            else:
                meter.add_row(0)
    finally:
        stop(run_dir, force=True)
        shutil.rmtree(run_dir, ignore_errors=True)
    return meter.rows


def settings(cell: Cell, shop: Workshop) -> list[str]:
    """Return the `--set` texts of a cell."""
    return [
        *COMMON,
        *cell.arm.settings(),
        f"run.seed={cell.seed}",
        f"data.train={shop.train}",
        f"data.eval={shop.test}",
        f"tools.search.corpus={shop.corpus}",
    ]


def opened(config: Config, session: Session) -> RunOpened:
    """Return the first record of the run."""
    return RunOpened(
        schema=SCHEMA_VERSION,
        config=to_plain(config),
        config_digest=config_digest(config),
        fingerprints=code_fingerprints() | session.fingerprints(),
        base_model=session.model_name,
        seed=config.run.seed,
        run_id=f"experiment-{time.time_ns()}",
        at=time.time(),
    )


def train(run: Run, meter: Meter) -> None:
    """Roll out and learn on one log, the learner on a thread of its own, until the last mark."""
    examples = questions(run.config, run.log.run_dir, "train")

    def learn() -> None:
        with contextlib.suppress(TokensSpentError):
            run_learner(run.log, run.learner, run.config, MANY_STEPS, Hooks(committed=meter.committed))

    async def both() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_rollouts, run.log, run.config, examples, run.environment, silence())
            await anyio.to_thread.run_sync(learn, abandon_on_cancel=True)
            tasks.cancel_scope.cancel()

    anyio.run(both)


def ask(run: Run) -> Evaluated:
    """Ask the held-out questions with the newest weights."""
    state = run.log.state()
    exam = Exam(
        run.config,
        run.examiner,
        Weights(state.weights_uri, state.policy_version),
        EvalOptions(samples=SAMPLES, temperature=1.0, batch_size=16, name="held-out"),
    )
    records = run.log.run_dir / f"eval-v{state.policy_version}.jsonl"
    return anyio.run(partial(evaluate, exam, run.held_out, records, silence()))


def measured(event: Evaluated) -> dict[str, Any]:
    """Return what the evaluation found."""
    summary = event.summary
    return {
        "exact_match": round(summary["exact_match"], 5),
        **{f"em_{hops}hop": round(summary[f"em/world_{hops}hop"], 5) for hops in (1, 2, 3)},
        "format": round(summary["format"], 5),
        "eval_questions": len(event.results),
        "eval_samples": SAMPLES,
        "eval_void": summary["rollout/void_rate"],
        "eval_tokens": int(summary["tokens_sampled"]),
    }


def learned(commits: Sequence[StepCommitted]) -> dict[str, Any]:
    """Return what the steps tell, summed or averaged over them."""
    steps = [commit.rollout_metrics for commit in commits]

    def over(name: str) -> float:
        values = [metrics[name] for metrics in steps if name in metrics]
        return round(math.fsum(values) / len(values), 5) if values else 0.0

    return {
        "steps": len(steps),
        "skipped": sum(commit.skipped for commit in commits),
        "tool_calls": int(sum(metrics["budget/tool_calls"] for metrics in steps)),
        "trained_tokens": sum(commit.tokens_trained for commit in commits),
        "members_per_step": over("train/members"),
        "no_signal": over("rollout/degenerate_group_rate"),
        "saved_by_sharing": over("budget/saved_by_sharing"),
        "tree_zero_std": over("tree/zero_std_rate"),
        "tree_singletons": over("tree/singleton_rate"),
    }


def costs(log: Log) -> dict[str, Any]:
    """Return what a trained group cost beside the formula, in generated tokens and in tool calls."""
    trained = {row.uid for row in log.group_rows() if row.fate is GroupFate.TRAINED}
    found = budget_report(group for group in groups_of(log) if group.asked.uid in trained)
    return {
        f"{unit}_{name}": round(value, 3)
        for unit, numbers in (("tokens", found.tokens), ("calls", found.calls))
        for name, value in numbers._asdict().items()
    }
