"""Steps against a real engine: what is sent, committed, skipped, replaced, dropped, and how a run ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.config import BudgetSettings, Config, PackingSettings, RolloutSettings
from core.datum import DatumArrays
from core.errors import ConfigError
from core.events import CheckpointSaved, GroupDropped, PolicyPublished, StepCommitted, StepPlanned
from core.ids import make_node
from engine.client import Session
from learner.fingerprints import code_fingerprints
from learner.loop import Ending, Options, run_learner
from learner.replay import Auditor, committed_steps, replay_steps
from learner.step import _Gaps
from learner.work import Hooks, Policy
from store.log import Log, open_log
from store.ports import Admission, Claim, GroupFate
from store.verify import verify
from tests.learner.support import (
    CHAINS,
    TREES,
    Worker,
    chain_group,
    logprobs,
    make_config,
    open_event,
    working,
    writes,
)


def events(log: Log, kind: type) -> list[Any]:
    """Return the journal's events of one kind."""
    return [record.event for record in log.journal.read() if isinstance(record.event, kind)]


@contextmanager
def new_run(run_dir: Path, config: Config) -> Iterator[Log]:
    """Open a new run in the learner's role."""
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        yield log


def learn(
    log: Log,
    session: Session,
    config: Config,
    steps: int,
    hooks: Hooks | None = None,
    **worker: Any,
) -> Ending:
    """Train with a worker beside."""
    with working(Worker(log, config, **({"plan": CHAINS} | worker))):
        return run_learner(log, session, config, steps, hooks)


def check(log: Log) -> None:
    """Every step is re-derived, and the books are in order."""
    reports = list(replay_steps(Auditor(log, code_fingerprints()), committed_steps(log, None, None)))
    assert all(report.match for report in reports), [report.differences for report in reports]
    told = [note for report in reports for note in report.notes if note.startswith("metric")]
    assert told == []
    assert verify(log.run_dir) == []


@pytest.mark.parametrize(
    ("plan", "learner"),
    [
        (CHAINS, {}),
        (CHAINS, {"loss": "ppo", "loss_config": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}}),
        (CHAINS, {"loss": "cispo", "estimator": "rloo"}),
        (TREES, {"loss": "dro", "estimator": "node", "loss_config": {"beta": 0.05}}),
        (TREES, {"estimator": "tree", "shaping": "tree_diff", "prefix_weight": "once_sum"}),
        (CHAINS, {"reduction": "sum", "schedule": "cosine", "warmup_steps": 1}),
        (CHAINS, {"loss": "gspo", "loss_config": {"clip_low_threshold": 0.0}}),
    ],
    ids=["plain", "ppo", "cispo", "dro-node", "tree", "sum-cosine", "gspo"],
)
def test_steps_are_committed_published_and_rederived(
    run_dir: Path, session: Session, plan: Any, learner: dict[str, Any]
) -> None:
    """Every loss, shape and setting that reaches the trainer; the engine received what was planned."""
    config = make_config(packing=PackingSettings(max_datums=2), **learner)
    with new_run(run_dir, config) as log:
        assert learn(log, session, config, 3, plan=plan) == Ending(3, "goal")
        check(log)
        commits = events(log, StepCommitted)
        trained = [commit for commit in commits if not commit.skipped]
        assert trained
        told = config.learner.loss != "gspo"
        assert all(bool(commit.engine_digest) == told for commit in trained)
        assert [event.policy_version for event in events(log, PolicyPublished)] == list(
            range(1, len(trained) + 1)
        )
        assert len({plan.batch_digest for plan in events(log, StepPlanned)}) == 3


def test_the_order_in_which_groups_are_closed_changes_nothing(tmp_path: Path, session: Session) -> None:
    """Groups are trained in ticket order, whoever finishes first."""
    digests = []
    for name, backwards in (("one", False), ("two", True)):
        config = make_config(groups_per_step=3)
        with new_run(tmp_path / name, config) as log:
            worker = Worker(log, config, CHAINS)
            claims = []
            while isinstance(claim := log.groups.claim_sync(log.worker_id, worker.admission, 0.0), Claim):
                claims.append(claim)
            for claim in reversed(claims) if backwards else claims:
                worker.make(claim)
            run_learner(log, session, config, 1)
            [plan] = events(log, StepPlanned)
            assert [group.uid for group in plan.groups] == sorted(group.uid for group in plan.groups)
            digests.append(plan.datum_digests)
    assert digests[0] == digests[1]


def test_a_step_without_signal_is_skipped_and_publishes_nothing(run_dir: Path, session: Session) -> None:
    """No trainer call, no new version; its groups are trained with zero datums."""
    config = make_config()
    with new_run(run_dir, config) as log:
        learn(log, session, config, 2, reward=lambda uid, tree: 1.0)
        assert [commit.skipped for commit in events(log, StepCommitted)] == [True, True]
        assert events(log, PolicyPublished) == []
        assert log.state().fates["trained"] == 4
        assert events(log, StepCommitted)[0].rollout_metrics["rollout/degenerate_group_rate"] == 1.0
        check(log)


def flat_half(uid: str, tree: int) -> float:
    """Return equal rewards for every other ticket."""
    return 1.0 if int(uid.split(".", maxsplit=1)[0]) % 2 else float(tree % 2)


def test_dynamic_sampling_replaces_groups_without_signal(run_dir: Path, session: Session) -> None:
    """Dropped as no_signal, their places given to later tickets, until the step is full of signal."""
    config = make_config(dynamic_sampling=True)
    with new_run(run_dir, config) as log:
        learn(log, session, config, 2, reward=flat_half)
        dropped = [event for event in events(log, GroupDropped) if event.reason == "no_signal"]
        assert [event.uid for event in dropped] == ["000001.0", "000003.0", "000005.0"]
        commits = events(log, StepCommitted)
        assert [commit.rollout_metrics["rollout/degenerate_group_rate"] for commit in commits] == [0.0, 0.0]
        check(log)


def test_dynamic_sampling_is_bounded(run_dir: Path, session: Session) -> None:
    """After max_replaced groups the step trains what there is."""
    config = make_config(dynamic_sampling=True, max_replaced=3)
    with new_run(run_dir, config) as log:
        learn(log, session, config, 1, reward=lambda uid, tree: 0.0)
        dropped = [event for event in events(log, GroupDropped) if event.reason == "no_signal"]
        assert len(dropped) == 3
        assert [commit.skipped for commit in events(log, StepCommitted)] == [True]


class ReferenceWorker(Worker):
    """Also records the base model's logprobs of every turn."""

    def make(self, claim: Claim) -> None:
        """Write a whole group with its references and close it."""
        script = chain_group(claim, self.plan)
        for tree in range(1, self.plan.group_size + 1):
            for node in (make_node(0, 0, 0), make_node(0, 0, 1)):
                script.refer(node, logprobs(claim.uid, tree, f"base-{node}", 5), tree=tree)
        self.log.groups.append_sync(claim, writes(script.records))
        self.log.groups.close_sync(claim, script.scored()[1], 0.0)


def test_a_kl_term_comes_from_recorded_reference_logprobs(run_dir: Path, session: Session) -> None:
    """It changes the advantages, and replay derives the same from the recorded events."""
    config = make_config(kl_beta=0.1)
    with new_run(run_dir, config) as log:
        with working(ReferenceWorker(log, config, CHAINS)):
            run_learner(log, session, config, 2)
        check(log)
        assert all(plan.kl_beta == 0.1 and len(plan.datum_digests) == 6 for plan in events(log, StepPlanned))


def test_a_budget_stops_the_learner_and_a_larger_one_lets_it_go_on(run_dir: Path, session: Session) -> None:
    """Resumable: nothing is dropped, the state is saved."""
    config = make_config()
    small = Config(
        engine=config.engine,
        rollout=config.rollout,
        learner=config.learner,
        budget=BudgetSettings(tokens_sampled=100),
    )
    with new_run(run_dir, config) as log:
        ending = learn(log, session, small, 5)
        assert ending.reason.startswith("budget.tokens_sampled is used up")
        assert 1 <= ending.committed_steps < 5
        assert events(log, CheckpointSaved)[-1].step == ending.committed_steps
        assert log.state().fates["dropped"] == 0
        assert learn(log, session, config, 5) == Ending(5, "goal")
        check(log)


def test_what_is_left_at_the_goal_is_dropped_and_the_goal_can_be_moved(
    run_dir: Path, session: Session
) -> None:
    """Every group has a fate at the end; a later start with a larger goal trains on."""
    config = make_config(max_staleness=2)
    with new_run(run_dir, config) as log:
        worker = Worker(log, config, CHAINS)
        worker.fill()
        run_learner(log, session, config, 1)
        state = log.state()
        assert state.fates["open"] == state.fates["closed"] == 0
        assert {event.reason for event in events(log, GroupDropped)} == {"run_ended"}
        assert state.fates["dropped"] == 4
        learn(log, session, config, 3)
        check(log)
        assert log.state().committed_steps == 3


def open_only(log: Log, config: Config, ended: int) -> Claim:
    """Claim a ticket and leave its group open, with some of its trajectories ended."""
    admission = Admission(config.learner.max_staleness, config.learner.groups_per_step)
    claim = log.groups.claim_sync(log.worker_id, admission, 0.0)
    assert isinstance(claim, Claim)
    script = chain_group(claim, CHAINS)
    kept = [(tree, event) for tree, event in script.records if tree <= ended]
    log.groups.append_sync(claim, writes(kept))
    return claim


def test_a_late_group_is_closed_with_what_has_ended(run_dir: Path, session: Session) -> None:
    """At least min_group trajectories: it is trained; its worker finds that it has lost it."""
    config = make_config(group_deadline=0.2)
    with new_run(run_dir, config) as log:
        claim = open_only(log, config, ended=2)
        learn(log, session, config, 1)
        row = log.group(claim.uid)
        assert row.fate is GroupFate.TRAINED
        assert len(row.chosen) == 2
        assert row.worker == "learner"
        check(log)


def test_a_late_group_with_too_little_is_given_up_and_the_next_ticket_moves_up(
    run_dir: Path, session: Session
) -> None:
    """The ticket is given up too, and gives its place in admission back."""
    config = make_config(group_deadline=0.2)
    with new_run(run_dir, config) as log:
        claim = open_only(log, config, ended=1)
        learn(log, session, config, 1)
        row = log.group(claim.uid)
        assert (row.fate, row.final) == (GroupFate.ABORTED, True)
        assert row.reason.startswith("group_deadline")
        [plan] = events(log, StepPlanned)
        assert [group.uid for group in plan.groups] == ["000001.0", "000002.0"]
        check(log)


def interrupt(*_: object) -> None:
    """Press Ctrl-C."""
    raise KeyboardInterrupt


def test_groups_that_became_too_old_are_dropped_with_the_reason(run_dir: Path, session: Session) -> None:
    """A closed one is dropped, an open one is given up and its ticket opened again at the next attempt."""
    old, new = make_config(max_staleness=2), make_config(max_staleness=0)
    with new_run(run_dir, old) as log:
        worker = Worker(log, old, CHAINS)
        for _ in range(5):
            worker.step()
        left_open = open_only(log, old, ended=3)
        with pytest.raises(KeyboardInterrupt):
            run_learner(log, session, old, 3, Hooks(committed=interrupt))
        assert events(log, CheckpointSaved)[-1].step == 1, "Ctrl-C saves what the trainer holds"
        learn(log, session, new, 3)
        stale = [event.uid for event in events(log, GroupDropped) if event.reason == "stale"]
        assert stale == ["000002.0", "000003.0", "000004.0"]
        assert log.group(left_open.uid).reason == "stale"
        assert log.group("000005.1").fate is GroupFate.TRAINED
        check(log)


def test_ctrl_c_between_gradient_and_update_saves_nothing(run_dir: Path, session: Session) -> None:
    """The trainer may hold half a step: the next start restores an older state and sends the plan again."""
    config = make_config()

    def probe(point: str) -> None:
        if point == "before_optim":
            raise KeyboardInterrupt

    with new_run(run_dir, config) as log:
        Worker(log, config, CHAINS).fill()
        with pytest.raises(KeyboardInterrupt):
            run_learner(log, session, config, 2, Hooks(probe=probe))
        assert [event.step for event in events(log, CheckpointSaved)] == [0]
        assert log.state().planned_step == 0
        learn(log, session, config, 2)
        assert [plan.step for plan in events(log, StepPlanned)] == [0, 1]
        check(log)


def test_with_staleness_allowed_groups_wait_ahead_and_are_used(run_dir: Path, session: Session) -> None:
    """Nothing is discarded in normal running, and the age of what is trained is within the bound."""
    config = make_config(max_staleness=2)
    with new_run(run_dir, config) as log:
        learn(log, session, config, 5)
        ages = [commit.rollout_metrics["staleness/max"] for commit in events(log, StepCommitted)]
        assert max(ages) <= 2
        assert {event.reason for event in events(log, GroupDropped)} <= {"run_ended"}
        assert log.state().fates["trained"] == 10
        check(log)


@pytest.mark.parametrize("rollout", [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}])
def test_rollouts_off_the_policys_distribution_are_refused(
    run_dir: Path, session: Session, rollout: dict[str, Any]
) -> None:
    """Their logprobs are not those of the policy that is trained; a setting allows it."""
    config = Config(rollout=RolloutSettings(**rollout))
    with new_run(run_dir, config) as log:
        with pytest.raises(ConfigError, match="allow_off_distribution"):
            run_learner(log, session, config, 1)
        assert log.state().max_steps is None


def test_a_just_published_version_is_evaluated_in_its_turn(run_dir: Path, session: Session) -> None:
    """Every eval_every steps, after the commit, with the published weights."""
    config = make_config(eval_every=2)
    seen: list[Policy] = []
    with new_run(run_dir, config) as log:
        learn(log, session, config, 4, Hooks(evaluate=seen.append))
        assert [policy.step for policy in seen] == [2, 4]
        published = {event.policy_version: event.weights_uri for event in events(log, PolicyPublished)}
        assert all(published[policy.policy_version] == policy.weights_uri for policy in seen)


def test_superseded_weights_are_collected_and_kept_ones_stay(run_dir: Path, session: Session) -> None:
    """Weights of checkpoints and the current ones can be sampled at the end, the others are gone."""
    config = make_config(save_every=2)
    with new_run(run_dir, config) as log:
        learn(log, session, config, 5)
        uris = {event.step: event.weights_uri for event in events(log, PolicyPublished)}
        kept = {event.weights_uri for event in events(log, CheckpointSaved)}
        existing = {checkpoint.uri for checkpoint in session.list_checkpoints()}
        assert {step for step, uri in uris.items() if uri in existing} == {
            step for step, uri in uris.items() if uri in kept
        }


def test_lost_weights_are_published_anew_at_the_start(run_dir: Path, session: Session) -> None:
    """A run resumed after its weights expired goes on from its checkpoint."""
    config = make_config()
    with new_run(run_dir, config) as log:
        learn(log, session, config, 2)
        state = log.state()
        for checkpoint in session.list_checkpoints():
            if checkpoint.uri == state.weights_uri:
                session.delete_checkpoint(checkpoint)
        assert not session.can_sample(state.weights_uri)
        learn(log, session, config, 3)
        versions = [(event.policy_version, event.step) for event in events(log, PolicyPublished)]
        assert versions == [(1, 1), (2, 2), (3, 2), (4, 3)]
        check(log)


def test_a_run_can_start_from_another_runs_state(tmp_path: Path, session: Session) -> None:
    """Its weights become version 1, and groups sampled before them leave."""
    config = make_config()
    with new_run(tmp_path / "one", config) as log:
        learn(log, session, config, 2)
        state_uri = events(log, CheckpointSaved)[-1].state_uri
    with new_run(tmp_path / "two", config) as log:
        worker = Worker(log, config, CHAINS)
        worker.fill()
        with working(worker):
            run_learner(log, session, config, 1, options=Options(resume_from=state_uri))
        assert {event.reason for event in events(log, GroupDropped)} == {"superseded"}
        [planned] = events(log, StepPlanned)
        assert planned.policy_version == 1
        assert all(log.group(group.uid).policy_version == 1 for group in planned.groups)
        check(log)


def test_the_gap_between_sampler_and_trainer_is_warned_of_on_fresh_groups(
    run_dir: Path, session: Session
) -> None:
    """Made-up logprobs are far from the model's, so the first step says so."""
    config = make_config()
    said: list[str] = []
    with new_run(run_dir, config) as log:
        learn(log, session, config, 1, Hooks(notify=said.append))
        [commit] = events(log, StepCommitted)
        assert commit.trainer_metrics["trainer/logprob_gap"] > 1
    assert any("sampled and trainer's logprobs differ" in line for line in said)


def test_ratio_and_gap_are_measured_on_trained_tokens_only() -> None:
    """Given tokens have no logprob to compare."""
    datum = DatumArrays(
        np.zeros(3, np.int64),
        np.zeros(3, np.int64),
        np.array([0, -1.0, 0], np.float32),
        np.array([0, 0.5, 0], np.float32),
    )
    gaps = _Gaps()
    gaps.add([datum], [np.array([-9.0, -1.5, -9.0], np.float32)])
    assert gaps.metrics() == pytest.approx(
        {
            "trainer/logprob_gap": 0.5,
            "trainer/logprob_gap_max": 0.5,
            "trainer/ratio_mean": float(np.exp(-0.5)),
            "trainer/kl_sampled": 0.5,
        }
    )
