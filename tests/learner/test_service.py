"""A learner against a service with faults: each is told in plain words, nothing is lost, Ctrl-C always works."""

import signal
import threading
from pathlib import Path

import pytest

from core.errors import ServiceBusy
from core.events import StepPlanned
from learner.fingerprints import code_fingerprints
from learner.replay import Auditor, replay_steps
from learner.waiting import MAX_FAULTS, Waiting
from store.log import Log
from store.verify import verify
from tests.learner.gateway import HANG_UP, STALL, Fault, Said, failed_event, refusal
from tests.learner.hosted import place
from tests.learner.support import CHAINS, Worker, working

FORWARD, OPTIM = "trainer.forward_backward", "trainer.optimize_step"


def in_order(log: Log, steps: int) -> None:
    """Every step was planned once and is re-derived, and the books balance."""
    plans = [record.event for record in log.journal.read() if isinstance(record.event, StepPlanned)]
    assert [plan.step for plan in plans] == list(range(steps))
    assert all(report.match for report in replay_steps(Auditor(log, code_fingerprints()), range(steps)))
    assert verify(log.run_dir) == []


def only(event: str, said: Said) -> Fault:
    """Answer one type of event so."""
    return lambda asked: said if asked.event == event else None


def failing(event: str, code: str) -> Fault:
    """Accept an event and report that it failed."""
    return lambda asked: failed_event(asked, code) if asked.event == event else None


PASSING: dict[str, Fault] = {
    "too_many_requests": only(FORWARD, refusal(429, "too_many_requests")),
    "actor_capacity_exceeded": only(FORWARD, refusal(429, "actor_capacity_exceeded")),
    "internal_error": failing(FORWARD, "internal_error"),
    "run_not_found": only(OPTIM, refusal(404, "run_not_found")),
    "disconnected": lambda _asked: Said(HANG_UP),
}


@pytest.mark.usefixtures("session")
def test_faults_that_pass_are_told_and_recovered_from(tmp_path: Path, engine_dir: Path) -> None:
    """A rate limit, no capacity, a failed event, a run that is gone, no network: one line each, then it goes on."""
    goal = 2 + len(PASSING)
    with place(tmp_path, engine_dir, patience=0.5) as here:
        learner = here.learner(goal)
        for number, (name, fault) in enumerate(PASSING.items(), start=1):
            here.committed(number)
            here.gateway.set_fault(fault)
            learner.read_until("")
            while "Trying again in 2 s, from the last checkpoint (1 of 5)." not in learner.lines[-1]:
                learner.read_until("")
            assert name in learner.lines[-1]
            assert " failed: " in learner.lines[-1]
            here.gateway.heal()
        learner.finish()
        in_order(here.log, goal)


@pytest.mark.usefixtures("session")
def test_a_used_up_balance_ends_the_command_in_words_and_the_next_start_goes_on(
    tmp_path: Path, engine_dir: Path
) -> None:
    """Trying again would not help; the plan stays and is sent later."""
    with place(tmp_path, engine_dir, patience=30) as here:
        learner = here.learner(3)
        here.committed(1)
        here.gateway.set_fault(only(FORWARD, refusal(402, "billing_insufficient_balance")))
        said = learner.read_until("ERROR ServiceRefused")
        assert "balance is used up: add credit, then start again; nothing is lost" in said
        here.gateway.heal()
        here.learner(3).finish()
        in_order(here.log, 3)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    "fault",
    [
        only(FORWARD, refusal(429, "too_many_requests")),
        lambda _asked: Said(HANG_UP),
        lambda _asked: Said(STALL),
    ],
    ids=["busy", "unreachable", "silent"],
)
def test_ctrl_c_ends_a_wait_for_the_service(tmp_path: Path, engine_dir: Path, fault: Fault) -> None:
    """Within seconds, though the SDK would ask for minutes and then end its session; nothing is lost."""
    with place(tmp_path, engine_dir, patience=300) as here:
        learner = here.learner(3)
        here.committed(1)
        here.gateway.set_fault(fault)
        here.gateway.wait_for_fault()
        assert learner.interrupt() < 10
        here.gateway.heal()
        here.learner(3).finish()
        in_order(here.log, 3)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("patience", [0.5, 300])
def test_a_checkpoint_that_cannot_be_saved_does_not_hold_up_ctrl_c(
    tmp_path: Path, engine_dir: Path, patience: float
) -> None:
    """Between steps Ctrl-C saves. Without a network that fails in words, and a second Ctrl-C waits for nothing."""
    with place(tmp_path, engine_dir, patience, groups=2) as here:
        learner = here.learner(2)
        learner.read_until("warning: step 0")  # told when the step is committed and the trainer at rest
        here.gateway.set_fault(lambda _asked: Said(HANG_UP))
        learner.process.send_signal(signal.SIGINT)
        learner.read_until("saving a checkpoint; Ctrl-C once more ends without it")
        if patience > 1:
            assert learner.interrupt() < 10
        else:
            learner.read_until("no checkpoint was saved, the next start sends the steps again")
            learner.read_until("INTERRUPTED")
            learner.process.communicate()
        here.gateway.heal()
        with working(Worker(here.log, here.config, CHAINS)):
            again = here.learner(2)
            again.read_until("restored the checkpoint of step 0, 1 later steps sent again")
            again.finish()
        in_order(here.log, 2)


@pytest.mark.usefixtures("session")
def test_ctrl_c_ends_the_pause_after_a_fault(tmp_path: Path, engine_dir: Path) -> None:
    """Nothing is saved, for the trainer was given up; the next start restores and goes on."""
    with place(tmp_path, engine_dir, patience=0.5) as here:
        learner = here.learner(2)
        here.committed(1)
        here.gateway.set_fault(only(FORWARD, refusal(503, "service_unavailable")))
        learner.read_until("forward_backward failed: the service says service_unavailable")
        assert learner.interrupt() < 5
        here.gateway.heal()
        here.learner(2).finish()
        in_order(here.log, 2)


def test_a_fault_that_repeats_is_told_in_full_once() -> None:
    """Each pause is twice the last; the sixth in a row is handed on, and a success counts from the beginning."""
    said: list[str] = []
    pauses: list[float] = []
    waiting = Waiting(said.append, 120, sleep=pauses.append)
    fault = ServiceBusy("sampling failed: no capacity (x).", "Start again later.")
    waiting.wait_after(fault)
    waiting.renew()
    for _ in range(MAX_FAULTS - 1):
        waiting.wait_after(fault)
    with pytest.raises(ServiceBusy, match="Start again later"):
        waiting.wait_after(fault)
    assert pauses == [2, 2, 4, 8, 16, 32]
    first = "sampling failed: no capacity (x). Trying again in 2 s, from the last checkpoint (1 of 5)."
    assert said[:2] == [first, first]
    assert said[2] == "No better. Trying again in 4 s, from the last checkpoint (2 of 5)."


def test_a_slow_answer_is_spoken_of_once() -> None:
    """With what happens next; a quick one is not."""
    said: list[str] = []
    told = threading.Event()

    def notify(line: str) -> None:
        said.append(line)
        told.set()

    slow = Waiting(notify, 120, slow_seconds=0.01)
    with slow.told_when_slow("step 3"):
        assert told.wait(10)
    assert said[0].startswith("step 3 has waited 0 s for the service")
    assert "asked again for 120 s" in said[0]
    slow._tell_slow("step 4")
    assert len(said) == 1
    quick = Waiting(notify, 120, slow_seconds=1e6)
    with quick.told_when_slow("step 5"):
        pass
    assert len(said) == 1
