"""A command outlives its engine's death, not its being stopped."""

import os
import signal
from pathlib import Path

import pytest

from core.config import EngineSettings
from core.errors import EngineDied, EngineStopped
from engine import launch, outlive
from engine.client import connect
from tests.engine.support import until


def test_work_is_begun_again_after_a_death_and_not_after_a_stop() -> None:
    """A crash is told and outlived; a stop is what somebody wanted."""
    told: list[str] = []
    faults = [EngineDied("gone"), None]

    def work() -> str:
        fault = faults.pop(0)
        if fault is not None:
            raise fault
        return "done"

    assert outlive.outlive(work, told.append) == "done"
    assert ["died" in line for line in told] == [True]
    faults = [EngineStopped("stopped")]
    with pytest.raises(EngineStopped):
        outlive.outlive(work, told.append)
    assert len(told) == 1


def test_an_engine_that_keeps_dying_is_given_up() -> None:
    """Three deaths soon after each start end the command."""
    starts: list[int] = []

    def work() -> None:
        starts.append(1)
        raise EngineDied("gone")

    with pytest.raises(EngineDied):
        outlive.outlive(work, lambda _: None)
    assert len(starts) == outlive.DEATHS


@pytest.mark.parametrize("killed", [True, False])
def test_a_crash_and_a_stop_are_told_apart(tmp_path: Path, killed: bool) -> None:
    """Whoever waits without calling the engine hears of its end by check()."""
    with connect(EngineSettings(), tmp_path) as session:
        session.check()
        address = launch.status(tmp_path).address
        assert address is not None
        if killed:
            os.kill(address.pid, signal.SIGKILL)
        else:
            launch.stop(tmp_path, force=True)

        noticed: list[EngineDied] = []

        def is_noticed() -> bool:
            try:
                session.check()
            except EngineDied as died:
                noticed.append(died)
            return bool(noticed)

        until(is_noticed, "noticing the engine's end", seconds=4)
        assert isinstance(noticed[0], EngineStopped) is not killed
