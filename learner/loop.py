"""Owns the learner's life: the goal, one step after another, checkpoints, faults, and a clean end.

Every decision is taken from the log, so that a learner killed at any moment continues where the log says.
"""

import time
from typing import NamedTuple

from core.budget import exceeded
from core.config import Config
from core.errors import EngineError, RolltapeError, ServiceBusy, StoreError, TrainerBroken
from core.events import JournalEvent, PolicyPublished, StepCommitted, StepPlanned
from engine.client import Session
from engine.trainer import Trainer
from learner.ahead import Ahead
from learner.batch import PlanContext, Recipe, Taken, group_facts, plan_event, recipe_from_learner
from learner.fingerprints import code_fingerprints
from learner.gather import LOOK_SECONDS, Gatherer
from learner.goal import record_goal
from learner.history import History
from learner.metrics import step_metrics
from learner.rebuild import Rebuilt, user_estimator
from learner.recovery import first_trainer, rebuild_planned, recover
from learner.schedule import learning_rate
from learner.selection import RUN_ENDED, SUPERSEDED
from learner.step import Prepared, Sent, prepare_batch, send
from learner.waiting import Waiting
from learner.warnings import fault_warning, gap_warning
from learner.weights import collect, lifetime, save_checkpoint, version_name
from learner.work import Hooks, Policy, Work, check_distribution
from store.log import Log
from store.ports import RunState


class Options(NamedTuple):
    """What one `learn` command may ask for beyond the run's configuration."""

    resume_from: str = ""
    """A state URI to start from, before the first step."""
    any_age: bool = False
    """Recorded groups are trained again (offline), however old they are."""


class Ending(NamedTuple):
    """Why the learner stopped."""

    committed_steps: int
    reason: str
    """"goal", or which budget is used up."""


def run_learner(
    log: Log,
    session: Session,
    config: Config,
    max_steps: int,
    hooks: Hooks | None = None,
    options: Options | None = None,
) -> Ending:
    """Train until `max_steps` steps are committed, or a budget is used up.

    `log` must be open in the learner's role. Raises EngineError (start again: it resumes), ConfigError,
    ReplayError, StoreError; on KeyboardInterrupt it saves a checkpoint if the trainer is at rest.
    """
    check_distribution(config)
    opened = log.run_event()
    if opened is None:
        raise StoreError("the run has not been opened: create it with `rollout` or `learn` and a preset")
    fingerprints = session.fingerprints() | code_fingerprints()
    work = Work(log, session, config, opened, fingerprints, hooks or Hooks())
    learner = Learner(work, max_steps, options or Options())
    learner.set_goal()
    try:
        return learner.run()
    except KeyboardInterrupt:
        learner.save_before_leaving()
        raise
    finally:
        learner.close()


class Learner:
    """The state that lives across steps: the trainer, what the journal told, and the groups waited for."""

    def __init__(self, work: Work, max_steps: int, options: Options) -> None:
        self._work = work
        self._max_steps = max_steps
        self._resume_from = options.resume_from
        self._history = History()
        self._gatherer = Gatherer(work, self._history, any_age=options.any_age)
        self._user = user_estimator(work.config.learner.estimator, work.hooks.load_code)
        self._ahead = Ahead(work.log.groups)
        self._waiting = Waiting(work.hooks.notify, work.config.engine.request_timeout)
        self._trainer: Trainer | None = None
        self._at_rest = False
        """The trainer holds exactly the committed steps, and no gradient."""

    def __repr__(self) -> str:
        return f"<Learner towards {self._max_steps} steps, {self._trainer!r}>"

    def set_goal(self) -> None:
        """Record the aim; rollout ends by itself when it is reached."""
        record_goal(self._work.log, self._max_steps, self._work.clock())

    def run(self) -> Ending:
        """Train step after step; see run_learner."""
        while True:
            before = self._work.log.state().committed_steps
            try:
                ending = self._advance()
            except (TrainerBroken, ServiceBusy) as exc:
                self._trainer, self._at_rest = None, False
                if self._work.log.state().committed_steps > before:
                    self._waiting.renew()
                self._waiting.wait_after(exc)
                continue
            if ending is not None:
                return ending
            self._waiting.renew()

    def _advance(self) -> Ending | None:
        """Do the next thing that the log asks for; the ending when there is none left."""
        work = self._work
        self._history.catch_up(work.log.journal)
        state = work.log.state()
        self._evaluate_if_due(state)
        if state.committed_steps >= self._max_steps and state.planned_step is None:
            return self._finish()
        if self._trainer is None:
            self._trainer = self._open_trainer()
        if state.planned_step is not None:
            planned = work.log.plan(state.planned_step)
            with self._waiting.told_when_slow(f"step {planned.step}"):
                self._train(planned, rebuild_planned(work, planned), {})
            return None
        if reason := exceeded(self._history.spent, work.config.budget):
            self._save(only_unsaved=True)
            return Ending(state.committed_steps, reason)
        started = time.perf_counter()
        taken = self._gatherer.poll(state.committed_steps)
        if taken is None:
            work.session.check()
            work.log.journal.wait_sync(state.journal_length, LOOK_SECONDS)
            return None
        self._plan_and_train(taken, state.committed_steps, {"fold": time.perf_counter() - started})
        return None

    def _open_trainer(self) -> Trainer:
        checkpoints = self._history.checkpoints
        with self._waiting.told_when_slow("opening the trainer"):
            if checkpoints:
                trainer = recover(self._work, checkpoints)
            else:
                trainer = first_trainer(self._work, self._resume_from)
        if self._resume_from and not checkpoints:
            version = self._work.log.state().policy_version
            self._gatherer.clear(SUPERSEDED, final=False, below=version)
        self._at_rest = True
        return trainer

    def _plan_and_train(self, taken: list[Taken], step: int, seconds: dict[str, float]) -> None:
        work = self._work
        work.hooks.probe("planning")
        started = time.perf_counter()
        recipe = self._recipe(step)
        _, rebuilt, prepared = self._ahead.take(taken, recipe)
        context = PlanContext(step, work.log.state().policy_version, work.fingerprints, work.clock())
        planned = plan_event(taken, rebuilt.batch, prepared.digests, recipe, context)
        seconds["prepare"] = time.perf_counter() - started
        work.log.journal.append_sync([planned])
        count = work.config.learner.groups_per_step
        if step + 1 < self._max_steps:
            self._ahead.start(work.log.next_step_groups(count), self._recipe(step + 1), count)
        with self._waiting.told_when_slow(f"step {step}"):
            self._train(planned, rebuilt, seconds, prepared)

    def _recipe(self, step: int) -> Recipe:
        learner = self._work.config.learner
        return recipe_from_learner(learner, learning_rate(learner, step, self._max_steps), self._user)

    def _train(
        self,
        planned: StepPlanned,
        rebuilt: Rebuilt,
        seconds: dict[str, float],
        prepared: Prepared | None = None,
    ) -> None:
        """Send a planned step and commit it; any failure before the commit leaves the trainer unusable."""
        work, trainer = self._work, self._trainer
        assert trainer is not None
        work.hooks.probe("planned")
        started = time.perf_counter()
        events: list[JournalEvent] = []
        sent, version = Sent({}, {}, ""), work.log.state().policy_version
        if rebuilt.digests:
            self._at_rest = False
            sent = send(
                trainer, rebuilt.batch, prepared or prepare_batch(rebuilt.batch), planned, work.hooks.probe
            )
            steps = planned.step + 1
            version += 1
            saving = time.perf_counter()
            weights_uri = trainer.save_weights(
                version_name(version), lifetime(work.config.learner, steps, self._max_steps)
            )
            sent.seconds["save_weights"] = time.perf_counter() - saving
            work.hooks.probe("weights_saved")
            events.append(
                PolicyPublished(policy_version=version, weights_uri=weights_uri, step=steps, at=work.clock())
            )
        seconds |= sent.seconds | {"step": time.perf_counter() - started}
        committed = self._commit_event(planned, rebuilt, sent, version, seconds)
        work.log.journal.append_sync([committed, *events])
        self._at_rest = True
        work.hooks.probe("committed")
        self._after_commit(planned, committed)

    def _commit_event(
        self,
        planned: StepPlanned,
        rebuilt: Rebuilt,
        sent: Sent,
        version: int,
        seconds: dict[str, float],
    ) -> StepCommitted:
        facts = group_facts(rebuilt.taken, rebuilt.batch, planned.step)
        return StepCommitted(
            step=planned.step,
            skipped=not rebuilt.digests,
            policy_version=version,
            trainer_metrics=sent.metrics,
            rollout_metrics=step_metrics(facts, rebuilt.batch),
            seconds=seconds,
            tokens_trained=rebuilt.batch.stats.datum_tokens,
            engine_digest=sent.engine_digest,
            at=self._work.clock(),
        )

    def _after_commit(self, planned: StepPlanned, committed: StepCommitted) -> None:
        steps = committed.step + 1
        self._work.hooks.committed(planned, committed)
        self._warn(committed)
        if steps % self._work.config.learner.save_every == 0 and steps < self._max_steps:
            self._save()

    def _evaluate_if_due(self, state: RunState) -> None:
        """Evaluate the current version if its turn has come; a failed evaluation does not stop training."""
        every, evaluate = self._work.config.learner.eval_every, self._work.hooks.evaluate
        steps = state.committed_steps
        due = every and steps and steps % every == 0 and state.planned_step is None
        if not due or evaluate is None or self._history.is_evaluated(steps):
            return
        self._history.evaluated.add(steps)
        try:
            evaluate(Policy(state.policy_version, state.weights_uri, steps))
        except RolltapeError as exc:
            self._work.hooks.notify(f"the evaluation after {steps} steps failed, training goes on: {exc}")

    def _warn(self, committed: StepCommitted) -> None:
        self._history.catch_up(self._work.log.journal)
        for warning in (gap_warning(committed), fault_warning(list(self._history.recent))):
            if warning:
                self._work.hooks.notify(warning)

    def _save(self, *, only_unsaved: bool = False) -> None:
        if only_unsaved and not self._unsaved():
            return
        assert self._trainer is not None
        self._history.catch_up(self._work.log.journal)
        self._at_rest = False
        saved = save_checkpoint(self._work, self._trainer)
        self._at_rest = True
        kept = [checkpoint.weights_uri for checkpoint in [*self._history.checkpoints, saved]]
        collect(self._work, self._work.session, kept)

    def _unsaved(self) -> bool:
        """Tell whether the trainer is at rest and holds steps that no checkpoint holds."""
        self._history.catch_up(self._work.log.journal)
        newest = self._history.checkpoints[-1].step if self._history.checkpoints else None
        at_rest = self._at_rest and self._trainer is not None
        return at_rest and newest != self._work.log.state().committed_steps

    def save_before_leaving(self) -> None:
        """Save a checkpoint if there is something to save; a service that cannot is no reason to stay."""
        if not self._unsaved():
            return
        self._work.hooks.notify("saving a checkpoint; Ctrl-C once more ends without it")
        try:
            self._save()
        except EngineError as exc:
            self._work.hooks.notify(f"no checkpoint was saved, the next start sends the steps again: {exc}")

    def close(self) -> None:
        """End what runs beside the loop."""
        self._ahead.close()

    def _finish(self) -> Ending:
        self._gatherer.clear(RUN_ENDED, final=True)
        self._save(only_unsaved=True)
        return Ending(self._work.log.state().committed_steps, "goal")
