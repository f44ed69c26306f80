"""Faults inside a running learner: never a retry in place, always from a checkpoint, with a person told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.config import EngineSettings, RecoverySettings
from core.errors import ConfigError, ReplayError, ServiceBusy, ServiceRefused, TrainerBroken
from core.events import CheckpointSaved, Recovered, Rewarded, StepCommitted, StepPlanned
from engine.client import Session
from learner.fingerprints import code_fingerprints
from learner.loop import Ending, run_learner
from learner.replay import Auditor, replay_steps
from learner.work import Hooks
from store.log import Log, open_log
from tests.learner.support import CHAINS, Worker, final_weights, make_config, open_event, working
from tests.learner.tampering import rewrite_group


def events(log: Log, kind: type) -> list[Any]:
    """Return the journal's events of one kind."""
    return [record.event for record in log.journal.read() if isinstance(record.event, kind)]


def failing_at(point: str, error: Exception) -> Callable[[str], None]:
    """Return a probe that raises once at a point."""
    errors = [error]

    def probe(at: str) -> None:
        if at == point and errors:
            raise errors.pop()

    return probe


@pytest.mark.parametrize(
    ("point", "error"),
    [("before_optim", ServiceBusy("no capacity.")), ("micro_batch:0", TrainerBroken("the run is broken."))],
)
def test_a_fault_inside_a_step_is_recovered_from_without_a_restart(
    tmp_path: Path, session: Session, engine_dir: Path, point: str, error: Exception
) -> None:
    """The trainer is given up, a checkpoint restored, the plan sent again; the weights are those of a quiet run."""
    weights = []
    for name, probe in (("quiet", None), ("faulty", failing_at(point, error))):
        config, said = make_config(), []
        with open_log(tmp_path / name, create=True, role="learner") as log:
            log.open_run(open_event(config))
            hooks = Hooks(notify=said.append, **({"probe": probe} if probe else {}))
            with working(Worker(log, config, CHAINS)):
                assert run_learner(log, session, config, 2, hooks) == Ending(2, "goal")
            assert len(events(log, StepPlanned)) == 2
            assert len(events(log, Recovered)) == (name == "faulty")
            weights.append(final_weights(engine_dir, log.state().weights_uri))
    assert any("from the last checkpoint" in line for line in said)
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][key] == weights[1][key]).all() for key in weights[0])


def test_a_refusal_for_good_ends_the_command_and_loses_nothing(run_dir: Path, session: Session) -> None:
    """Such as a balance that is used up: trying again would not help."""
    config = make_config()
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, CHAINS)):
            probe = failing_at("before_optim", ServiceRefused("the balance is used up"))
            with pytest.raises(ServiceRefused, match="balance"):
                run_learner(log, session, config, 2, Hooks(probe=probe))
            assert log.state().planned_step == 0
            assert run_learner(log, session, config, 2) == Ending(2, "goal")


def test_sending_many_steps_again_on_the_hosted_service_needs_a_yes(run_dir: Path, session: Session) -> None:
    """With an estimate of the tokens; declining sends nothing."""
    config = make_config(save_every=100, recovery=RecoverySettings(max_resend_steps=1))
    hosted = msgspec.structs.replace(config, engine=EngineSettings(kind="pytrio", base_model="some/model"))
    questions: list[str] = []
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, CHAINS)):
            stop = failing_at("committed", KeyboardInterrupt())  # type: ignore[arg-type]
            with pytest.raises(KeyboardInterrupt):
                run_learner(log, session, config, 3, Hooks(probe=stop))
            saved = events(log, CheckpointSaved)
            assert [checkpoint.step for checkpoint in saved] == [0, 1]
            run_learner(log, session, config, 3)
            for checkpoint in session.list_checkpoints():
                if checkpoint.uri in {event.state_uri for event in events(log, CheckpointSaved)[1:]}:
                    session.delete_checkpoint(checkpoint)
            before = log.state().journal_length
            with pytest.raises(ConfigError, match="--yes"):
                run_learner(log, session, hosted, 4)
            assert not [r for r in log.journal.read(before) if isinstance(r.event, Recovered | StepCommitted)]
            agreed = Hooks(confirm=lambda question: not questions.append(question))
            assert run_learner(log, session, hosted, 4, agreed) == Ending(4, "goal")
            tokens = sum(commit.tokens_trained for commit in events(log, StepCommitted)[:3])
    assert f"{tokens:,} training tokens" in questions[0]
    assert "3 committed steps" in questions[0]


def test_recovery_refuses_to_send_a_batch_that_is_not_the_planned_one(
    run_dir: Path, session: Session
) -> None:
    """An altered reward would train something else: the error names the step and how to look at it."""
    config = make_config(save_every=100)
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, CHAINS)):
            run_learner(log, session, config, 2)
        uid = log.plan(0).groups[0].uid
        [_, newest] = events(log, CheckpointSaved)
        for checkpoint in session.list_checkpoints():
            if checkpoint.uri == newest.state_uri:
                session.delete_checkpoint(checkpoint)

    def alter(_tree: int, event: Any) -> Any:
        return (
            msgspec.structs.replace(event, value=0.125)
            if isinstance(event, Rewarded) and _tree == 1
            else event
        )

    rewrite_group(run_dir, uid, alter)
    with open_log(run_dir, role="learner") as log:
        with pytest.raises(ReplayError, match="replay --step 0"):
            run_learner(log, session, config, 3)
        assert events(log, Recovered) == []


def test_a_learner_without_a_run_is_refused(run_dir: Path, session: Session) -> None:
    """An empty log has no configuration to train."""
    from core.errors import StoreError

    with (
        open_log(run_dir, create=True, role="learner") as log,
        pytest.raises(StoreError, match="has not been opened"),
    ):
        run_learner(log, session, make_config(), 1)


def test_steps_of_a_recovered_run_match(run_dir: Path, session: Session) -> None:
    """Replay looks at plans, not at how often they were sent."""
    config = make_config()
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        with working(Worker(log, config, CHAINS)):
            run_learner(log, session, config, 2, Hooks(probe=failing_at("after_optim", TrainerBroken("x."))))
        assert all(report.match for report in replay_steps(Auditor(log, code_fingerprints()), range(2)))
