"""SIGKILL at every point of a step, restart: the same history, the same batches, byte-identical weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.config import Config, PackingSettings
from core.errors import LogBusy
from core.events import CheckpointSaved, Plan, Recovered, StepPlanned
from engine import launch
from engine.client import connect
from learner.fingerprints import code_fingerprints
from learner.replay import Auditor, committed_steps, replay_steps
from store.log import Log, open_log
from tests.learner.process import Learner
from tests.learner.support import CHAINS, TREES, Worker, final_weights, make_config, open_event, working

FIRST_STEP = [
    "created",
    "state_saved",
    "checkpointed",
    "planning",
    "planned",
    "micro_batch:0",
    "micro_batch:1",
]
LATER = ["before_optim", "after_optim", "weights_saved", "committed", "state_saved", "checkpointed"]
RECOVERY = ["restored", "committed", "resent:{last}", "recovering", "recovered"]
EVERY_POINT = [*FIRST_STEP, *LATER, *RECOVERY]
SHORT = [
    "planned",
    "micro_batch:1",
    "after_optim",
    "committed",
    "resent:{last}",
    "recovering",
    "state_saved",
]
"""Enough to meet every kind of state; each start of a process costs two seconds."""


def settings() -> Config:
    """Return a run with two micro-batches a step and max_staleness 0."""
    return make_config(packing=PackingSettings(max_datums=3), save_every=3)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Give a run directory whose engine is stopped at the end."""
    yield tmp_path / "run"
    launch.stop(tmp_path / "run", force=True)


def history(log: Log) -> list[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Return what was planned: uids, datum digests, batch digest."""
    plans = [record.event for record in log.journal.read() if isinstance(record.event, StepPlanned)]
    assert [plan.step for plan in plans] == list(range(len(plans)))
    return [
        (tuple(group.uid for group in plan.groups), plan.datum_digests, plan.batch_digest) for plan in plans
    ]


def events(log: Log, kind: type) -> list[Any]:
    """Return the journal's events of one kind."""
    return [record.event for record in log.journal.read() if isinstance(record.event, kind)]


class Outcome(msgspec.Struct):
    """What a run left behind."""

    history: list[tuple[tuple[str, ...], tuple[str, ...], str]]
    weights: dict[str, Any]
    recoveries: int


def outcome(log: Log, run_dir: Path, worker: Worker) -> Outcome:
    """Check the books of a finished run and return what it left behind."""
    state = log.state()
    assert state.planned_step is None
    assert state.fates["open"] == state.fates["closed"] == state.fates["planned"] == 0
    trained = [uid for uids, _, _ in history(log) for uid in uids]
    assert len(set(trained)) == len(trained)
    assert set(trained) <= set(worker.made)
    assert len(set(worker.made)) == len(worker.made)
    reports = list(replay_steps(Auditor(log, code_fingerprints()), committed_steps(log, None, None)))
    assert [report.match for report in reports] == [True] * state.committed_steps
    weights = final_weights(run_dir, state.weights_uri)
    return Outcome(history(log), weights, len(events(log, Recovered)))


def undisturbed(place: Path, config: Config, plan: Plan, steps: int) -> Outcome:
    """Return what a run without faults leaves behind."""
    with open_log(place, create=True, role="rollout") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, plan)) as worker:
            Learner(place, config, steps).finish()
        return outcome(log, place, worker)


def same(left: Outcome, right: Outcome) -> None:
    """Assert that two runs trained the same batches to the same bytes."""
    assert left.history == right.history
    assert left.weights.keys() == right.weights.keys()
    for name, array in left.weights.items():
        assert np.array_equal(array, right.weights[name]), name


@pytest.mark.parametrize(
    "points", [SHORT, pytest.param(EVERY_POINT, marks=pytest.mark.soak)], ids=["short", "every"]
)
def test_killed_at_one_point_after_another_the_run_is_the_same(
    tmp_path: Path, place: Path, points: list[str]
) -> None:
    """One run of trees, killed at each point in turn: no batch, rollout or weight differs from a quiet run."""
    config, steps = settings(), 8
    quiet = tmp_path / "quiet"
    try:
        expected = undisturbed(quiet, config, TREES, steps)
    finally:
        launch.stop(quiet, force=True)
    with open_log(place, create=True, role="rollout") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, TREES)) as worker, connect(config.engine, place):
            for point in points:
                name = point.format(last=log.state().committed_steps - 1)
                Learner(place, config, steps, name).kill_at(name)
            Learner(place, config, steps).finish()
        result = outcome(log, place, worker)
    same(expected, result)
    assert result.recoveries >= 3


@pytest.mark.soak
@pytest.mark.parametrize("plan", [CHAINS, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("point", [*FIRST_STEP, *LATER])
def test_killed_once_at_one_point_the_run_is_the_same(
    tmp_path: Path, place: Path, plan: Plan, passes: int, point: str
) -> None:
    """Each point on its own, early and late, chains and trees."""
    config, steps = settings(), 5
    passes = min(passes, 1) if point in {"state_saved", "checkpointed"} else passes
    passes = 0 if point == "created" else passes
    quiet = tmp_path / "quiet"
    try:
        expected = undisturbed(quiet, config, plan, steps)
    finally:
        launch.stop(quiet, force=True)
    with open_log(place, create=True, role="rollout") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, plan)) as worker:
            Learner(place, config, steps, point, passes).kill_at(point)
            Learner(place, config, steps).finish()
        same(expected, outcome(log, place, worker))


def test_a_killed_engine_is_an_error_and_the_next_start_goes_on(place: Path) -> None:
    """The learner stops with a plain error, and a restart resumes from the checkpoints on disk."""
    config, steps = settings(), 4
    with open_log(place, create=True, role="rollout") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, CHAINS)) as worker:
            learner = Learner(place, config, steps, "before_optim", 1)
            learner.read_until("AT before_optim")
            learner.process.kill()
            learner.process.communicate()
            launch.stop(place, force=True)
            Learner(place, config, steps).finish()
        assert outcome(log, place, worker).recoveries == 1


def test_a_second_learner_is_refused_with_the_pid_of_the_first(place: Path) -> None:
    """Only one process may train a run."""
    with open_log(place, create=True, role="rollout") as log:
        log.open_run(open_event(settings()))
    first = Learner(place, settings(), 1, "created")
    first.read_until("AT created")
    try:
        with pytest.raises(LogBusy, match=str(first.process.pid)):
            open_log(place, role="learner")
    finally:
        first.process.kill()
        first.process.communicate()


def test_a_missing_checkpoint_falls_back_to_an_older_one(place: Path) -> None:
    """At last to the state saved before step 0; every later step is sent again from the log."""
    config = settings()
    with open_log(place, create=True, role="rollout") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, CHAINS)) as worker, connect(config.engine, place) as session:
            Learner(place, config, 4).finish()
            before = outcome(log, place, worker)
            saved = events(log, CheckpointSaved)
            assert [checkpoint.step for checkpoint in saved] == [0, 3, 4]
            for checkpoint in session.list_checkpoints():
                if checkpoint.uri in {saved[1].state_uri, saved[2].state_uri}:
                    session.delete_checkpoint(checkpoint)
            Learner(place, config, 5).finish()
        [recovered] = events(log, Recovered)
        assert recovered.restored_step == 0
        assert recovered.resent_steps == (0, 1, 2, 3)
        assert outcome(log, place, worker).history[:4] == before.history
