"""Recorded runs for the learner's tests, trained once per module on a real engine."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.events import Plan
from engine import launch
from engine.client import Session, connect
from learner.loop import run_learner
from store.log import Log, open_log
from tests.learner.support import CHAINS, TREES, Reward, Worker, any_reward, make_config, open_event, working

os.environ["OPENBLAS_NUM_THREADS"] = "1"
# A test that dies without its clean-up leaves an engine behind for so long only.
os.environ[launch.IDLE_VARIABLE] = "10"


@pytest.fixture(scope="session")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a directory whose engine serves all tests of this process."""
    folder = tmp_path_factory.mktemp("engine")
    yield folder
    launch.stop(folder, force=True)


@pytest.fixture(scope="session")
def session(engine_dir: Path) -> Iterator[Session]:
    """Give a session with a real engine."""
    with connect(make_config().engine, engine_dir) as opened:
        yield opened


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Give the place of one test's run."""
    return tmp_path / "run"


def train(
    log: Log,
    session: Session,
    steps: int,
    plan: Plan = CHAINS,
    reward: Reward = any_reward,
    **learner: object,
) -> Worker:
    """Train a new run for some steps, its rollouts made on another thread."""
    config = make_config(**learner)
    log.open_run(open_event(config))
    worker = Worker(log, config, plan, reward)
    with working(worker):
        run_learner(log, session, config, steps)
    return worker


@pytest.fixture(scope="session")
def recorded(session: Session, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Give one run of chains and one of trees, three steps each; copy them before changing anything."""
    runs = {}
    for name, plan in (("chains", CHAINS), ("trees", TREES)):
        runs[name] = tmp_path_factory.mktemp(name) / "run"
        with open_log(runs[name], create=True, role="learner") as log:
            estimator = "group_mean" if name == "chains" else "tree"
            train(log, session, 3, plan, estimator=estimator)
    return runs


@pytest.fixture
def copy_of(recorded: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Give a function that copies a recorded run for one test."""

    def copy(name: str) -> Path:
        shutil.copytree(recorded[name], tmp_path / name)
        return tmp_path / name

    return copy
