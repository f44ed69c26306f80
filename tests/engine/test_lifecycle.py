"""One engine per run: who starts it, who keeps it, how it ends, and how its clients notice."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from core.config import EngineSettings
from core.errors import EngineDied, EngineError
from engine import launch, locks
from engine.connection import Connection, open_embedded
from tests.engine.support import PROJECT, end, finish, start_program, until

JOIN = """
import os, sys
from pathlib import Path
from engine import launch
joined = launch.join(Path(sys.argv[1]))
print(joined.address.pid, flush=True)
sys.stdin.readline()
"""

CONNECT = """
import sys
from pathlib import Path
from core.config import EngineSettings
from engine.connection import open_embedded
connection = open_embedded(EngineSettings(), Path(sys.argv[1]))
trainer = connection.service.create_lora_training_client(connection.model, rank=4, seed=1)
trainer.save_state("s").result()
print("ready", flush=True)
sys.stdin.readline()
print("end", flush=True)
"""


SERVE = """
import sys
from pathlib import Path
from engine import launch
launch.serve(Path(sys.argv[1]), port=int(sys.argv[2]))
"""


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> float:
    """Set a short patience of unused engines."""
    monkeypatch.setenv(launch.IDLE_VARIABLE, "0.5")
    return 0.5


@pytest.fixture
def connection(run_dir: Path) -> Iterator[Connection]:
    """Open a connection to an engine of the test's own."""
    opened = open_embedded(EngineSettings(), run_dir)
    assert opened.users is not None
    yield opened
    opened.watch.close()
    os.close(opened.users)


def holds_lock(run_dir: Path) -> bool:
    """Return whether an engine lives."""
    return locks.is_held(launch.engine_folder(run_dir) / locks.LOCK)


def test_commands_that_start_at_once_make_one_engine(run_dir: Path) -> None:
    """Four processes that join at the same moment get the same engine."""
    programs = [start_program(JOIN, str(run_dir)) for _ in range(4)]
    pids = {program.stdout.readline() for program in programs if program.stdout}
    assert len(pids) == 1
    pid = int(pids.pop())
    assert os.getsid(pid) == pid, "Ctrl-C in a terminal must not reach the engine"
    log = (launch.engine_folder(run_dir) / locks.LOG).read_text()
    assert log.count("listens at") == 1
    for program in programs:
        assert program.communicate("\n", timeout=20)
        assert program.returncode == 0


def test_an_unused_engine_ends_and_a_used_one_stays(run_dir: Path, idle: float) -> None:
    """The engine outlives its patience while one client is left, however that client ends."""
    joined = launch.join(run_dir)
    other = start_program(JOIN, str(run_dir))
    assert other.stdout
    assert int(other.stdout.readline()) == joined.address.pid
    os.close(joined.users)
    deadline = time.monotonic() + 3 * idle
    while time.monotonic() < deadline:
        assert holds_lock(run_dir)
        assert launch.status(run_dir).in_use
    end(other)
    until(lambda: not holds_lock(run_dir), "the end of an unused engine", 10)
    assert not launch.status(run_dir).running
    assert "nobody used it" in (launch.engine_folder(run_dir) / locks.LOG).read_text()
    assert not (launch.engine_folder(run_dir) / locks.ADDRESS).exists()
    until(lambda: launch.has_ended(joined.address.pid), "the end of its process")


def test_files_are_for_their_user_only(connection: Connection, run_dir: Path) -> None:
    """The token's file, and all others, can be read by nobody else; the client's home is in the run."""
    folder = launch.engine_folder(run_dir)
    connection.service.create_lora_training_client(connection.model, rank=4).save_state("s").result()
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in files} == {0}
    assert locks.ADDRESS in {path.name for path in files}


def test_stop_refuses_while_the_engine_is_used(run_dir: Path) -> None:
    """A used engine is stopped by force only; an unused one at once; none is no error."""
    assert launch.stop(run_dir) is False
    joined = launch.join(run_dir)
    with pytest.raises(EngineError, match="in use"):
        launch.stop(run_dir)
    os.close(joined.users)
    assert launch.stop(run_dir) is True
    assert not holds_lock(run_dir)
    again = launch.join(run_dir)
    assert again.address.instance != joined.address.instance
    assert launch.stop(run_dir, force=True) is True
    os.close(again.users)


def test_a_stale_address_is_not_believed(run_dir: Path) -> None:
    """After a crash the address file is left; the next client starts a new engine all the same."""
    joined = launch.join(run_dir)
    os.close(joined.users)
    os.kill(joined.address.pid, signal.SIGKILL)
    until(lambda: not holds_lock(run_dir), "the end of a killed process")
    assert (launch.engine_folder(run_dir) / locks.ADDRESS).exists()
    assert launch.status(run_dir) == launch.Status(running=False)
    again = launch.join(run_dir)
    assert again.address.pid != joined.address.pid
    os.close(again.users)


def test_a_blocked_call_notices_the_death(connection: Connection) -> None:
    """A call that waits for the engine fails within 2 s of its end, not after the SDK's retries."""
    address = connection.watch.address
    assert address is not None
    client = connection.service.create_lora_training_client(connection.model, rank=4, seed=1)
    client.save_state("s").result()
    os.kill(address.pid, signal.SIGSTOP)
    killed: list[float] = []

    def call() -> object:
        os.kill(address.pid, signal.SIGKILL)
        killed.append(time.monotonic())
        return client.save_state("t").result()

    with pytest.raises(EngineDied, match=r"engine\.log"):
        connection.watch.run(call)
    assert time.monotonic() - killed[0] < 2
    with pytest.raises(EngineDied):
        connection.watch.run(lambda: None)


def test_an_awaited_call_notices_the_death(connection: Connection) -> None:
    """The same for asynchronous calls; many waits end at once, and the loop stays responsive."""
    address = connection.watch.address
    assert address is not None

    async def scenario() -> float:
        started = 0.0
        ended: list[bool] = []

        async def wait() -> None:
            with pytest.raises(EngineDied):
                await connection.watch.run_async(anyio.sleep_forever)
            ended.append(True)

        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            started = time.monotonic()
            os.kill(address.pid, signal.SIGKILL)
        assert len(ended) == 20
        return time.monotonic() - started

    assert anyio.run(scenario) < 2


def test_a_program_ends_though_its_engine_is_gone(run_dir: Path) -> None:
    """The SDK closes its session at exit; a dead engine holds that up for about a second."""
    program = start_program(CONNECT, str(run_dir))
    assert program.stdout
    assert program.stdout.readline() == "ready\n"
    address = launch.status(run_dir).address
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    started = time.monotonic()
    out, err = program.communicate("\n", timeout=30)
    assert out == "end\n", err
    assert time.monotonic() - started < 5


def test_nothing_is_written_at_home_and_proxies_are_not_used(run_dir: Path, tmp_path: Path) -> None:
    """With a home of its own and a proxy that refuses, a client works and leaves the home empty."""
    home = tmp_path / "home"
    home.mkdir()
    proxy = "http://127.0.0.1:9"
    program = start_program(
        CONNECT,
        str(run_dir),
        HOME=str(home),
        HTTP_PROXY=proxy,
        HTTPS_PROXY=proxy,
        ALL_PROXY=proxy,
        http_proxy=proxy,
        NO_PROXY="",
    )
    out, err = program.communicate("\n", timeout=60)
    assert out == "ready\nend\n", err
    assert list(home.iterdir()) == []


def test_an_engine_without_its_folder_ends(run_dir: Path) -> None:
    """Deleting the run directory ends its engine."""
    joined = launch.join(run_dir)
    run_dir.rename(run_dir.with_name("elsewhere"))
    until(lambda: launch.has_ended(joined.address.pid), "the end of a homeless engine", 10)
    os.close(joined.users)


def test_an_engine_that_cannot_start_says_why(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the engine's log is in the error."""
    folder = launch.engine_folder(run_dir)
    folder.mkdir(parents=True)
    (folder / "runs").write_text("not a folder")
    with pytest.raises(EngineError, match="FileExistsError"):
        launch.join(run_dir)
    monkeypatch.setenv(launch.IDLE_VARIABLE, "soon")
    with pytest.raises(EngineError, match="'soon'"):
        launch.join(run_dir)


def test_serve_prints_what_a_program_needs(run_dir: Path, tmp_path: Path) -> None:
    """An engine served by hand prints two variables with which any SDK program works; Ctrl-C ends it."""
    served = start_program(SERVE, str(run_dir), "0")
    assert served.stdout
    lines = [served.stdout.readline() for _ in range(2)]
    variables = dict(re.findall(r"export (\w+)=(\S+)", "".join(lines)))
    assert set(variables) == {"PYTRIO_BASE_URL", "PYTRIO_API_KEY"}
    user = "import pytrio; print(pytrio.ServiceClient().get_supported_models())"
    home = {"HOME": str(tmp_path)}
    env = os.environ | variables | home | {"NO_PROXY": "127.0.0.1", "PYTHONPATH": str(PROJECT)}
    shown = subprocess.run(
        [sys.executable, "-c", user], env=env, text=True, capture_output=True, check=True, timeout=60
    )
    assert "base" in shown.stdout
    with pytest.raises(EngineError, match="running already"):
        launch.serve(run_dir)
    joined = launch.join(run_dir)
    os.close(joined.users)
    port = joined.address.url.rsplit(":", 1)[1]
    taken = start_program(SERVE, str(run_dir.with_name("other")), port)
    _, err = taken.communicate(timeout=30)
    assert taken.returncode == 2
    assert f"cannot listen on port {port}" in err
    served.send_signal(signal.SIGINT)
    served.communicate(timeout=20)
    assert not holds_lock(run_dir)


def test_a_restarted_engine_resumes_from_its_checkpoints(run_dir: Path) -> None:
    """After a crash the saved states can be restored; runs of the old process are gone."""
    program = start_program(CONNECT, str(run_dir))
    assert program.stdout
    assert program.stdout.readline() == "ready\n"
    address = launch.status(run_dir).address
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    end(program)
    source = """
import sys
from pathlib import Path
from core.config import EngineSettings
from engine.connection import open_embedded
connection = open_embedded(EngineSettings(), Path(sys.argv[1]))
rest = connection.service.create_rest_client()
(saved,) = rest.list_user_checkpoints().result().checkpoints
client = connection.service.create_training_client_from_state_with_optimizer(saved.path)
print(client.save_weights_for_sampler("w").result().path)
"""
    assert "trio://" in finish(start_program(source, str(run_dir)))


def test_an_engine_that_hangs_is_stopped_by_force(run_dir: Path) -> None:
    """An engine that no longer answers is not waited for."""
    joined = launch.join(run_dir)
    os.close(joined.users)
    os.kill(joined.address.pid, signal.SIGSTOP)
    assert launch.stop(run_dir, force=True) is True
    until(lambda: launch.has_ended(joined.address.pid), "the end of a hanging engine")


INTERRUPTED = """
import sys
from pathlib import Path
import numpy as np
from core.config import EngineSettings
from core.datum import DatumArrays
from engine.client import connect, prepare
ones = np.ones(600, np.float32)
batch = prepare([DatumArrays(np.full(600, 50), np.full(600, 51), -ones, ones)] * 4)
with connect(EngineSettings(), Path(sys.argv[1])) as session:
    trainer = session.create_trainer(lora_rank=4, seed=1)
    trainer.save_state("s")
    print("ready", flush=True)
    while True:
        trainer.forward_backward(batch, "importance_sampling", {})
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_busy_program_ends_soon(run_dir: Path, killed: bool) -> None:
    """In the middle of a long call, Ctrl-C and the death of the engine end the program in seconds."""
    program = start_program(INTERRUPTED, str(run_dir))
    assert program.stdout
    assert program.stdout.readline() == "ready\n"
    address = launch.status(run_dir).address
    assert address is not None
    until(lambda: launch.status(run_dir).busy_seconds > 0.05, "a long call")
    if killed:
        os.kill(address.pid, signal.SIGKILL)
    else:
        program.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = program.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert ("EngineDied" if killed else "KeyboardInterrupt") in err
