"""Bugs on the way to the trainer are caught: by the engine's own digest, or by replay."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from core.batch import StepBatch
from core.config import AdamSettings, PackingSettings
from core.datum import DatumArrays, datum_digest
from core.errors import ReplayError, TrainerBroken
from core.events import StepPlanned
from engine.client import Session
from engine.datums import PreparedBatch, prepare
from engine.trainer import StepResult, Trainer
from learner.ahead import Draft, make_draft
from learner.batch import PlanContext, fetch, plan_event, recipe_from_learner
from learner.replay import Auditor, replay_step
from learner.step import Prepared, send
from store.log import Log, open_log
from tests.learner.support import CHAINS, Worker, make_config, open_event

CONFIG = make_config(packing=PackingSettings(max_datums=2))


class Bench(NamedTuple):
    """A run with closed groups, and its first step drafted."""

    log: Log
    draft: Draft

    def plan(self, digests: tuple[str, ...]) -> StepPlanned:
        """Return the step's plan with these datum digests."""
        _, rebuilt, _ = self.draft
        context = PlanContext(0, 0, {}, 0.0)
        return plan_event(rebuilt.taken, rebuilt.batch, digests, rebuilt.recipe, context)


@pytest.fixture
def bench(run_dir: Path) -> Bench:
    """Give a drafted step; its log is closed with the process's last reference."""
    log = open_log(run_dir, create=True, role="learner", map_size=1 << 26)
    log.open_run(open_event(CONFIG))
    Worker(log, CONFIG, CHAINS).fill()
    taken = fetch(log.groups, log.next_step_groups(2))
    return Bench(log, make_draft(taken, recipe_from_learner(CONFIG.learner, 1e-3)))


class Faulty:
    """A real trainer, with a bug on the way to it."""

    training_run = "faulty"

    def __init__(self, trainer: Trainer, drop: int | None = None, twice: int | None = None) -> None:
        self.trainer = trainer
        self.drop = drop
        self.twice = twice
        self.calls = 0

    def forward_backward(
        self, batch: PreparedBatch, loss: str, config: Mapping[str, float]
    ) -> list[NDArray[np.float32]]:
        """Pass a micro-batch on, or not, or twice."""
        number, self.calls = self.calls, self.calls + 1
        if number == self.drop:
            return [np.zeros(len(datum.model_input.to_ints()), np.float32) for datum in batch.datums]
        if number == self.twice:
            self.trainer.forward_backward(batch, loss, config)
        return self.trainer.forward_backward(batch, loss, config)

    def optim_step(self, learning_rate: float, adam: AdamSettings) -> StepResult:
        """Pass the update on."""
        return self.trainer.optim_step(learning_rate, adam)


def quiet(_point: str) -> None:
    """Watch nothing."""


@pytest.mark.parametrize("bug", [{"drop": 1}, {"twice": 0}], ids=["dropped", "sent twice"])
def test_a_dropped_or_repeated_micro_batch_is_caught_by_the_engine(
    bench: Bench, session: Session, bug: dict[str, int]
) -> None:
    """It digests what it received, with code of its own."""
    _, rebuilt, prepared = bench.draft
    assert len(prepared.micro_batches) > 1
    trainer = session.create_trainer(lora_rank=4, seed=0)
    with pytest.raises(TrainerBroken, match="received payloads"):
        send(Faulty(trainer, **bug), rebuilt.batch, prepared, bench.plan(prepared.digests), quiet)  # type: ignore[arg-type]
    bench.log.close()


def altered(batch: StepBatch, change: Callable[[DatumArrays], DatumArrays]) -> list[DatumArrays]:
    """Return the datums with a bug in each."""
    return [change(datum) for datum in batch.datums]


BUGS: dict[str, Callable[[DatumArrays], DatumArrays]] = {
    "logprobs shifted": lambda datum: datum._replace(logprobs=np.roll(datum.logprobs, 1)),
    "mask inverted": lambda datum: datum._replace(
        advantages=np.where(datum.advantages == 0, np.float32(0.5), np.float32(0))
    ),
    "scaled otherwise": lambda datum: datum._replace(advantages=datum.advantages * np.float32(2)),
    "targets not shifted": lambda datum: datum._replace(targets=datum.inputs),
}


@pytest.mark.parametrize("bug", BUGS)
def test_what_is_sent_instead_of_the_plan_is_caught_by_the_engine(
    bench: Bench, session: Session, bug: str
) -> None:
    """Even when our own books claim that the planned datums were handed over."""
    _, rebuilt, prepared = bench.draft
    wrong = altered(rebuilt.batch, BUGS[bug])
    micro_batches = tuple(
        PreparedBatch(prepare([wrong[index] for index in micro]).datums, one.digests)
        for micro, one in zip(rebuilt.batch.micro_batches, prepared.micro_batches, strict=True)
    )
    trainer = session.create_trainer(lora_rank=4, seed=0)
    claimed = Prepared(micro_batches, prepared.digests)
    with pytest.raises(TrainerBroken, match="received payloads"):
        send(trainer, rebuilt.batch, claimed, bench.plan(prepared.digests), quiet)
    bench.log.close()


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_that_plan_and_trainer_share_is_a_mismatch(bench: Bench, bug: str) -> None:
    """Replay derives the datums from events, by a way that never touches the SDK's objects."""
    _, rebuilt, _ = bench.draft
    digests = tuple(datum_digest(datum) for datum in altered(rebuilt.batch, BUGS[bug]))
    bench.log.journal.append_sync([bench.plan(digests)])
    report = replay_step(Auditor(bench.log, {}), 0)
    assert not report.match
    assert report.differences[0].place.startswith("datum 0 = 000000.0/t1")
    bench.log.close()


def test_nothing_is_sent_when_it_is_not_what_was_planned(bench: Bench, session: Session) -> None:
    """The comparison comes before the first gradient."""
    _, rebuilt, prepared = bench.draft
    trainer = Faulty(session.create_trainer(lora_rank=4, seed=0))
    other = bench.plan(tuple(reversed(prepared.digests)))
    with pytest.raises(ReplayError, match="nothing was sent"):
        send(trainer, rebuilt.batch, prepared, other, quiet)  # type: ignore[arg-type]
    assert trainer.calls == 0
    bench.log.close()
