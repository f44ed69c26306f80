"""Real engines for the tests: started through the same door as any command, never left behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import launch

os.environ["OPENBLAS_NUM_THREADS"] = "1"
# A test that dies without its clean-up leaves an engine behind for so long only.
os.environ[launch.IDLE_VARIABLE] = "10"


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a run directory whose engine, once started, serves all tests of a module."""
    run_dir = tmp_path_factory.mktemp("run")
    yield run_dir
    launch.stop(run_dir, force=True)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Give a run directory of one test's own, whose engine is stopped at its end."""
    yield tmp_path / "run"
    launch.stop(tmp_path / "run", force=True)
