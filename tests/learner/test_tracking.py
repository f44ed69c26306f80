"""Metrics go to SwanLab beside the training: all of them, once, and whatever SwanLab does.

A stand-in package with behaviour takes SwanLab's place in the process that talks to it; the tests of the
real package never reach beyond this machine.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.config import Config, TrackingSettings
from core.errors import ConfigError
from core.events import Evaluated, StepCommitted
from engine.client import Session
from learner.loop import run_learner
from learner.metrics import Metrics
from learner.points import Opening, Point, point_of, read_position
from learner.tracking import FOLDER, Patience, Tracking, check_installed
from store.log import Log, open_log
from store.ports import JournalRecord
from tests.learner.support import CHAINS, Worker, make_config, open_event, until, working

FAKE = Path(__file__).parent / "fake_swanlab"
QUICK = Patience(first_pause=0.05, longest_pause=0.1, flush=20.0)
HASTY = Patience(first_pause=0.05, longest_pause=0.1, flush=0.6)

has_swanlab = pytest.mark.skipif(
    importlib.util.find_spec("swanlab") is None, reason="the package swanlab is not installed"
)

Copy = Callable[[str], Path]


class Fake:
    """The stand-in: told how to behave, asked what it was given."""

    def __init__(self, folder: Path) -> None:
        self.behaviour, self.record = folder / "behaviour", folder / "record"
        self.behave("")

    def behave(self, words: str) -> None:
        """Tell it how to behave from now on."""
        self.behaviour.write_text(words)

    def calls(self, name: str) -> list[dict[str, Any]]:
        """Return what it was given under a name."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [call for call in map(json.loads, lines) if call["call"] == name]

    def steps(self) -> list[int]:
        """Return the steps that it was given, in order."""
        return [call["step"] for call in self.calls("log")]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put the stand-in in SwanLab's place."""
    made = Fake(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    monkeypatch.syspath_prepend(str(FAKE))  # found here too, where the real package is not installed
    monkeypatch.setenv("FAKE_SWANLAB", str(made.behaviour))
    monkeypatch.setenv("FAKE_SWANLAB_RECORD", str(made.record))
    return made


@pytest.fixture
def log(copy_of: Copy) -> Iterator[Log]:
    """Give a recorded run of three steps, open."""
    with open_log(copy_of("chains"), role="reader") as opened:
        yield opened


def tracked(mode: str) -> Config:
    """Return a configuration with tracking."""
    return msgspec.structs.replace(make_config(), tracking=TrackingSettings(swanlab=mode))


def tracking(log: Log, notices: list[str], patience: Patience = QUICK, mode: str = "online") -> Tracking:
    """Return the tracking of a recorded run."""
    opened = log.run_event()
    assert opened is not None
    return Tracking(log, tracked(mode), opened, notices.append, patience)


def recorded_metrics(log: Log) -> list[Metrics]:
    """Return what the log holds for each step, under the names that are tracked."""
    commits = [record.event for record in log.journal.read() if isinstance(record.event, StepCommitted)]
    return [
        commit.rollout_metrics
        | commit.trainer_metrics
        | {f"time/{name}": seconds for name, seconds in commit.seconds.items()}
        for commit in commits
    ]


def test_every_step_is_sent_once_with_the_names_of_the_metrics(log: Log, fake: Fake) -> None:
    """SwanLab gets the run's id, name and configuration, then each committed step, then the end."""
    notices: list[str] = []
    with tracking(log, notices):
        pass
    assert [call["metrics"] for call in fake.calls("log")] == recorded_metrics(log)
    assert fake.steps() == [0, 1, 2]
    [init] = fake.calls("init")
    assert (init["id"], init["resume"], init["name"]) == ("run-under-test", "allow", "chains")
    assert init["project"] == "rolltape"
    assert init["config"]["learner"]["groups_per_step"] == 2
    assert init["settings"]["interactive"] is False, "nobody is there to answer"
    assert not any(init["settings"]["probe"].values()), "nothing about the machine is sent"
    assert len(fake.calls("finish")) == 1
    assert notices == ["SwanLab: metrics go to https://fake.invalid/run"]
    names = fake.calls("log")[0]["metrics"]
    assert {"reward/mean", "search/429", "train/datums", "time/step"} <= names.keys()
    assert any(name.startswith("trainer/") for name in names)


def test_a_run_whose_steps_were_all_sent_starts_nothing(log: Log, fake: Fake) -> None:
    """The position is remembered in the run; without news SwanLab is not even started."""
    with tracking(log, []):
        pass
    with tracking(log, []):
        pass
    assert fake.steps() == [0, 1, 2]
    assert len(fake.calls("init")) == 1
    assert read_position(log.run_dir / FOLDER) > 0


def test_what_a_dead_process_did_not_take_is_sent_by_the_next(log: Log, fake: Fake) -> None:
    """It dies at its second point; afterwards each step was sent exactly once, in order."""
    fake.behave("die")
    notices: list[str] = []
    with tracking(log, notices, HASTY):
        pass
    assert fake.steps() == [0]
    assert notices[-1] == "SwanLab has not taken 2 steps; the next `learn` on this run sends them"
    fake.behave("")
    with tracking(log, notices):
        pass
    assert fake.steps() == [0, 1, 2]


def test_an_outage_is_told_once_and_ends_by_itself(log: Log, fake: Fake) -> None:
    """SwanLab cannot start at first; once it can, everything is sent without a restart."""
    fake.behave("no-start")
    notices: list[str] = []
    with tracking(log, notices):
        until(lambda: bool(notices), "the notice")
        assert "RuntimeError: no route to host" in notices[0]
        assert "training goes on" in notices[0]
        fake.behave("")
        until(lambda: fake.steps() == [0, 1, 2], "all steps")
    assert notices[1:] == ["SwanLab takes metrics again"]


def test_a_service_that_never_answers_is_left_at_the_deadline(log: Log, fake: Fake) -> None:
    """The end waits for the deadline only, says what is missing, and leaves no process behind."""
    fake.behave("hang")
    notices: list[str] = []
    started = time.monotonic()
    with tracking(log, notices, HASTY) as sending:
        until(lambda: sending._child is not None, "SwanLab's process")
    assert time.monotonic() - started < 10
    assert "has not taken 3 steps" in notices[-1]
    assert sending._child is not None
    assert sending._child._process.poll() == -signal.SIGKILL
    assert not sending._thread.is_alive()


def test_an_upload_that_never_ends_is_left_at_the_deadline(log: Log, fake: Fake) -> None:
    """Every step was taken, but SwanLab does not come to its end: that is said, with what to do."""
    fake.behave("never-finish")
    notices: list[str] = []
    with tracking(log, notices, Patience(flush=3.0)) as sending:
        until(lambda: fake.steps() == [0, 1, 2], "all steps")
    kept = str(log.run_dir / FOLDER / "log")
    assert notices[-2:] == [
        "waiting for SwanLab, 3 s at most",
        f"SwanLab did not finish within 3 s; what it has not uploaded is in {kept!r}, for `swanlab sync`",
    ]
    assert not sending._thread.is_alive()


@pytest.mark.parametrize("behaviour", ["hang", "no-start", "die"])
def test_training_goes_on_whatever_swanlab_does(
    session: Session, run_dir: Path, fake: Fake, behaviour: str
) -> None:
    """Two steps are trained to the end; the learner never waits for SwanLab within them."""
    fake.behave(behaviour)
    config = tracked("online")
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        opened = log.run_event()
        assert opened is not None
        with (
            Tracking(log, config, opened, lambda _line: None, HASTY),
            working(Worker(log, config, CHAINS)),
        ):
            ending = run_learner(log, session, config, 2)
            assert ending.committed_steps == 2


def test_steps_are_sent_while_training_and_slowness_delays_only_the_sending(
    session: Session, run_dir: Path, fake: Fake
) -> None:
    """A slow SwanLab still gets every step, in order, the last ones during the flush."""
    fake.behave("slow")
    config = tracked("online")
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        opened = log.run_event()
        assert opened is not None
        with (
            Tracking(log, config, opened, lambda _line: None, QUICK),
            working(Worker(log, config, CHAINS)),
        ):
            run_learner(log, session, config, 3)
        assert fake.steps() == [0, 1, 2]


KILLED = """
import os, signal, sys
from pathlib import Path
from core.config import from_plain
from learner.tracking import Tracking
from store.log import open_log
from tests.learner.test_tracking import tracking
from tests.learner.support import until
record = Path(os.environ["FAKE_SWANLAB_RECORD"])
with open_log(Path(sys.argv[1]), role="reader") as log, tracking(log, []):
    until(lambda: record.exists() and '"step": 2' in record.read_text(), "all steps")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_learner_leaves_its_swanlab_process_to_finish(copy_of: Copy, fake: Fake) -> None:
    """SIGKILL of the learner ends standard input, upon which SwanLab's process finishes the experiment."""
    run = copy_of("chains")
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FAKE), str(root)])}
    done = subprocess.run([sys.executable, "-c", KILLED, str(run)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: len(fake.calls("finish")) == 1, "the end of the experiment")
    assert fake.steps() == [0, 1, 2]


def test_points_are_taken_though_nobody_hears_the_answers(fake: Fake, tmp_path: Path) -> None:
    """A learner may be killed between a point and its answer."""
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-m", "learner.swanlab_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(FAKE), str(root)])},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdout.close()
    opening = Opening(folder=str(tmp_path), mode="online", run_id="r", name="n", config={})
    points = [Point(position=step + 1, step=step, metrics={"a": 1.0}) for step in range(3)]
    child.stdin.write(b"".join(msgspec.json.encode(line) + b"\n" for line in (opening, *points)))
    child.stdin.close()
    assert child.wait(30) == 0
    assert fake.steps() == [0, 1, 2]
    assert len(fake.calls("finish")) == 1


def test_disabled_starts_nothing(log: Log, fake: Fake) -> None:
    """The default sends nothing and makes no folder."""
    with tracking(log, [], mode="disabled"):
        pass
    assert not (log.run_dir / FOLDER).exists()
    assert not fake.record.exists()


def test_a_missing_package_is_one_line_that_says_what_to_install() -> None:
    """Each mode names the packages that it needs; nothing is imported to find out."""
    check_installed("disabled", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'rolltape\[swanlab\]'"):
        check_installed("online", lambda _name: None)
    with pytest.raises(ConfigError, match=r"'swanboard'.*pip install 'swanlab\[dashboard\]'"):
        check_installed("local", lambda name: None if name == "swanboard" else name)
    check_installed("offline", lambda name: None if name == "swanboard" else name)


def test_points_are_commits_and_the_evaluations_made_while_training() -> None:
    """An evaluation stands at the steps that its weights hold; others, and what is not finite, are left out."""
    commit = StepCommitted(
        step=4,
        skipped=False,
        policy_version=5,
        rollout_metrics={"reward/mean": 0.5, "reward/none": float("nan")},
        trainer_metrics={"trainer/loss": -0.1},
        seconds={"step": 2.0},
    )
    point = point_of(JournalRecord(17, commit, b""), {})
    assert point is not None
    assert (point.position, point.step) == (18, 4)
    assert point.metrics == {"reward/mean": 0.5, "trainer/loss": -0.1, "time/step": 2.0}

    def evaluated(name: str) -> JournalRecord:
        event = Evaluated(
            weights_uri="w", policy_version=5, set_digest="", settings={}, results=(),
            summary={"exact_match": 0.75}, name=name,
        )  # fmt: skip
        return JournalRecord(18, event, b"")

    point = point_of(evaluated("step-5"), {5: 5})
    assert point is not None
    assert (point.step, point.metrics) == (5, {"eval/exact_match": 0.75})
    assert point_of(evaluated("by-hand"), {5: 5}) is None


@has_swanlab
def test_the_real_package_keeps_every_step_offline(log: Log, tmp_path: Path, monkeypatch: Any) -> None:
    """Mode offline of the real SwanLab: its file holds the names, and nothing appears outside the run."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    notices: list[str] = []
    with tracking(log, notices, mode="offline"):
        pass
    assert notices[-1].startswith("SwanLab: metrics go to "), notices
    [kept] = (log.run_dir / FOLDER / "log").rglob("*.swanlab")
    content = kept.read_bytes()
    for name in recorded_metrics(log)[0]:
        assert name.encode() in content
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "home"}
    with tracking(log, [], mode="offline"):
        pass
    assert len(list((log.run_dir / FOLDER / "log").rglob("*.swanlab"))) == 1


@has_swanlab
def test_the_real_package_without_a_service_or_a_key_only_costs_a_notice(
    log: Log, tmp_path: Path, monkeypatch: Any
) -> None:
    """Mode online with nobody at the service's address, and without a key: told, then left alone."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("SWANLAB_API_HOST", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.delenv("SWANLAB_API_KEY", raising=False)
        notices: list[str] = []
        with tracking(log, notices, Patience(flush=30.0)):
            until(lambda: bool(notices), "the notice")
        assert "no API key" in notices[0]
        assert "has not taken 3 steps" in notices[1]
        monkeypatch.setenv("SWANLAB_API_KEY", "x" * 21)
        with tracking(log, notices, Patience(flush=1.0)):
            pass
        assert "has not taken 3 steps" in notices[-1]


@pytest.mark.skipif(
    importlib.util.find_spec("swanboard") is None, reason="swanlab's dashboard is not installed"
)
def test_the_real_package_keeps_every_step_for_its_local_dashboard(
    log: Log, tmp_path: Path, monkeypatch: Any
) -> None:
    """Mode local of the real SwanLab writes its dashboard's database inside the run."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    notices: list[str] = []
    with tracking(log, notices, mode="local"):
        pass
    assert notices[-1].startswith("SwanLab: metrics go to "), notices
    assert list((log.run_dir / FOLDER / "log").rglob("*.swanlab"))
