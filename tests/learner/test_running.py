"""A run as it goes: budgets, drafts made ahead, evaluations, weights that are needed, long waits."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.config import BudgetSettings, Config
from core.errors import EngineError, FoldError
from core.events import Evaluated, GroupDropped, PolicyPublished, StepCommitted
from engine.client import Session
from learner.ahead import Ahead, make_draft
from learner.batch import fetch, recipe_from_learner
from learner.gather import Gatherer
from learner.history import History
from learner.loop import Ending, run_learner
from learner.stats import staleness_lines, staleness_report
from learner.work import Hooks, Policy, Work
from store.log import Log, open_log
from store.ports import Admission, Claim, GroupRow
from tests.learner.support import CHAINS, Worker, chain_group, make_config, open_event, working, writes


def events(log: Log, kind: type) -> list[Any]:
    """Return the journal's events of one kind."""
    return [record.event for record in log.journal.read() if isinstance(record.event, kind)]


@contextlib.contextmanager
def new_run(run_dir: Path, config: Config) -> Iterator[Log]:
    """Open a new run in the learner's role."""
    with open_log(run_dir, create=True, role="learner") as log:
        log.open_run(open_event(config))
        yield log


def two_kinds(uid: str, tree: int) -> float:
    """Return rewards that give every group a signal."""
    return float(tree % 2)


@pytest.mark.parametrize(
    "budget",
    [
        BudgetSettings(tokens_sampled=100),
        BudgetSettings(tokens_trained=200),
        BudgetSettings(search_calls=8),
        BudgetSettings(money=10.0, price_per_search=1.0),
        BudgetSettings(money=200.0, price_per_million_sampled=1e6, price_per_million_trained=1e6),
    ],
    ids=["tokens_sampled", "tokens_trained", "search_calls", "money-searches", "money-tokens"],
)
def test_every_budget_stops_the_learner_at_a_checkpoint_and_a_larger_one_goes_on(
    run_dir: Path, session: Session, budget: BudgetSettings
) -> None:
    """A step samples 60 tokens, trains 162 and searches 6 times, so two of these five steps are allowed."""
    config = make_config(save_every=100)
    small = Config(engine=config.engine, rollout=config.rollout, learner=config.learner, budget=budget)
    [name] = [
        name
        for name in ("tokens_sampled", "tokens_trained", "search_calls", "money")
        if getattr(budget, name)
    ]
    with new_run(run_dir, config) as log, working(Worker(log, config, CHAINS, two_kinds)):
        ending = run_learner(log, session, small, 5)
        assert ending.reason.startswith(f"budget.{name} is used up")
        assert 1 <= ending.committed_steps <= 2
        said: list[str] = []
        assert run_learner(log, session, config, 5, Hooks(notify=said.append)) == Ending(5, "goal")
        assert f"restored the checkpoint of step {ending.committed_steps}" in said
        assert {event.reason for event in events(log, GroupDropped)} <= {"run_ended"}


def test_staleness_is_told_with_what_tighter_bounds_would_have_kept_out(
    run_dir: Path, session: Session
) -> None:
    """Six groups of one moment, trained over three steps."""
    config = make_config(max_staleness=2)
    with new_run(run_dir, config) as log:
        Worker(log, config, CHAINS).fill()
        run_learner(log, session, config, 3)
        report = staleness_report(log)
        assert report.groups == {0: 2, 1: 2, 2: 2}
        assert report.tighter == {0: 4, 1: 2}
        assert staleness_lines(report) == [
            "staleness 0: 2 groups trained",
            "staleness 1: 2 groups trained",
            "staleness 2: 2 groups trained",
            "max_staleness 0 would have kept 4 of them out",
            "max_staleness 1 would have kept 2 of them out",
        ]


@contextlib.contextmanager
def making(log: Log, config: Config, *, ahead: bool) -> Iterator[None]:
    """Make groups beside the learner, or all that may be made before anything is trained."""
    worker = Worker(log, config, CHAINS, two_kinds)
    if ahead:
        worker.fill()
    with contextlib.nullcontext() if ahead else working(worker):
        yield


def test_the_next_step_is_drafted_while_the_trainer_works(run_dir: Path, session: Session) -> None:
    """Before the first micro-batch is sent, its thread is there; alone, on policy, there is nothing to draft."""
    found: dict[int, bool] = {}
    for staleness in (0, 2):
        seen: list[bool] = []

        def probe(point: str, seen: list[bool] = seen) -> None:
            if point == "micro_batch:0":
                seen.append(any(thread.name.startswith("next-step") for thread in threading.enumerate()))

        config = make_config(max_staleness=staleness)
        with new_run(run_dir / str(staleness), config) as log, making(log, config, ahead=staleness > 0):
            run_learner(log, session, config, 2, Hooks(probe=probe))
        found[staleness] = seen[0]
    assert found == {0: False, 2: True}


def test_a_draft_is_used_only_for_the_step_that_it_was_made_for(run_dir: Path) -> None:
    """The same groups and the same recipe; anything else is made anew, and nothing is drafted of half a step."""
    config = make_config(max_staleness=1)
    with new_run(run_dir, config) as log:
        Worker(log, config, CHAINS, two_kinds).fill()
        rows = log.next_step_groups(4)
        recipe, other = (recipe_from_learner(config.learner, rate) for rate in (1e-3, 2e-3))
        taken = fetch(log.groups, rows[:2])
        expected = make_draft(taken, recipe)
        ahead = Ahead(log.groups)

        def made_of(part: list[GroupRow]) -> Any:
            ahead.start(part, recipe, 2)
            pending = ahead._pending
            return pending and pending.result()

        try:
            assert made_of(rows[:1]) is None
            draft = made_of(rows[:2])
            assert ahead.take(taken, recipe) is draft
            assert draft.prepared.digests == expected.prepared.digests
            assert draft.rebuilt.batch_digest == expected.rebuilt.batch_digest
            draft = made_of(rows[:2])
            changed = ahead.take(taken, other)
            assert changed is not draft
            assert changed.rebuilt.recipe == other
            draft = made_of(rows[2:])
            assert ahead.take(taken, recipe).uids == expected.uids != draft.uids
            with pytest.raises(FoldError, match="chosen twice"):
                ahead.take([taken[0]._replace(chosen=taken[0].chosen * 2)], recipe)
        finally:
            ahead.close()


def evaluating(log: Log, seen: list[int]) -> Callable[[Policy], None]:
    """Return an evaluation that is recorded, as the command line's is."""

    def evaluate(policy: Policy) -> None:
        seen.append(policy.step)
        event = Evaluated(
            weights_uri=policy.weights_uri,
            policy_version=policy.policy_version,
            set_digest="dev",
            settings={},
            results=(),
            summary={"exact_match": 0.5},
            name=f"step-{policy.step}",
        )
        log.journal.append_sync([event])

    return evaluate


def test_an_evaluation_that_was_interrupted_is_made_at_the_next_start_and_none_twice(
    run_dir: Path, session: Session
) -> None:
    """Whether it was made stands in the journal."""
    config, seen = make_config(eval_every=2), []

    def interrupt(_planned: object, committed: StepCommitted) -> None:
        if committed.step == 1:
            raise KeyboardInterrupt

    with new_run(run_dir, config) as log, working(Worker(log, config, CHAINS, two_kinds)):
        evaluate = evaluating(log, seen)
        with pytest.raises(KeyboardInterrupt):
            run_learner(log, session, config, 4, Hooks(evaluate=evaluate, committed=interrupt))
        assert seen == []
        run_learner(log, session, config, 3, Hooks(evaluate=evaluate))
        assert seen == [2]
        run_learner(log, session, config, 4, Hooks(evaluate=evaluate))
        run_learner(log, session, config, 4, Hooks(evaluate=evaluate))
        assert seen == [2, 4]


def test_a_failed_evaluation_does_not_stop_training(run_dir: Path, session: Session) -> None:
    """It is told, and not tried again by the same command."""
    config, said = make_config(eval_every=1), []

    def evaluate(_policy: Policy) -> None:
        raise EngineError("sampling failed: no answer.")

    with new_run(run_dir, config) as log, working(Worker(log, config, CHAINS, two_kinds)):
        hooks = Hooks(evaluate=evaluate, notify=said.append)
        assert run_learner(log, session, config, 2, hooks) == Ending(2, "goal")
    told = [line for line in said if "evaluation" in line]
    assert told == [
        f"the evaluation after {steps} steps failed, training goes on: sampling failed: no answer."
        for steps in (1, 2)
    ]


def test_weights_live_as_long_as_an_open_group_samples_from_them(run_dir: Path, session: Session) -> None:
    """A group that was opened at version 1 keeps it over two collections; once it is gone, so are they."""
    config = make_config(max_staleness=4, save_every=2)
    open_groups: list[Claim] = []

    def published(log: Log) -> dict[int, str]:
        return {event.step: event.weights_uri for event in events(log, PolicyPublished)}

    def existing() -> set[str]:
        return {checkpoint.uri for checkpoint in session.list_checkpoints()}

    with new_run(run_dir, config) as log:
        worker = Worker(log, config, CHAINS, two_kinds)

        def hook(_planned: object, committed: StepCommitted) -> None:
            if committed.step == 0:
                for _ in range(6):
                    worker.step()
                admission = Admission(config.learner.max_staleness, config.learner.groups_per_step)
                claim = log.groups.claim_sync(log.worker_id, admission, 0.0)
                assert isinstance(claim, Claim)
                open_groups.append(claim)
            if committed.step == 3:
                raise KeyboardInterrupt

        worker.step()
        worker.step()
        with pytest.raises(KeyboardInterrupt):
            run_learner(log, session, config, 6, Hooks(committed=hook))
        [claim] = open_groups
        uris = published(log)
        assert claim.weights_uri == uris[1]
        assert {step for step, uri in uris.items() if uri in existing()} == {1, 2, 4}
        script = chain_group(claim, CHAINS, two_kinds)
        log.groups.append_sync(claim, writes(script.records))
        log.groups.close_sync(claim, script.scored()[1], 0.0)
        with working(worker):
            run_learner(log, session, config, 6)
        assert uris[1] not in existing()
        assert uris[2] in existing()


def test_replacements_are_bounded_over_a_restart(run_dir: Path, session: Session) -> None:
    """What was replaced before Ctrl-C counts for the same step."""
    config = make_config(dynamic_sampling=True, max_replaced=3)

    def notify(line: str) -> None:
        if "without signal are replaced" in line:
            raise KeyboardInterrupt

    with new_run(run_dir, config) as log, working(Worker(log, config, CHAINS, lambda uid, tree: 0.0)):
        with pytest.raises(KeyboardInterrupt):
            run_learner(log, session, config, 1, Hooks(notify=notify))
        assert log.state().committed_steps == 0
        assert run_learner(log, session, config, 1) == Ending(1, "goal")
        reasons = [event.reason for event in events(log, GroupDropped)]
        assert reasons.count("no_signal") == 3


def test_a_long_wait_is_told_once_with_what_is_waited_for(run_dir: Path, session: Session) -> None:
    """Whether a worker that is alive has the groups, too."""
    config, said = make_config(), []
    with new_run(run_dir, config) as log:
        opened = log.run_event()
        assert opened is not None
        work = Work(log, session, config, opened, {}, Hooks(notify=said.append))
        gatherer = Gatherer(work, History(), any_age=False)
        assert gatherer.poll(0) is None
        assert said == []
        gatherer._quiet_until = 0.0
        assert gatherer.poll(0) is None
        assert gatherer.poll(0) is None
        assert said == ["step 0 waits for rollouts; no worker that is alive has one, is `rollout` running?"]
        Worker(log, config, CHAINS).step()
        claim = log.groups.claim_sync(log.worker_id, Admission(0, 2), 0.0)
        assert isinstance(claim, Claim)
        gatherer._quiet_until = 0.0
        assert gatherer.poll(0) is None
        assert said[1:] == [f"step 0 waits for groups {claim.uid}"]
