"""Owns the way back: the newest usable checkpoint, then every later committed step again, from the log.

Nothing is guessed and nothing relies on re-initialisation: each re-sent batch must have the digest that its
plan recorded. The weights are published under a new version, for a hosted trainer may round differently.
"""

from collections.abc import Sequence
from typing import NamedTuple

from core.errors import ConfigError, ReplayError, WeightsGone
from core.events import CheckpointSaved, JournalEvent, PolicyPublished, Recovered, StepPlanned
from engine.trainer import Trainer
from learner.rebuild import Rebuilt, committed_event, rebuild
from learner.step import prepare_batch, send
from learner.weights import save_checkpoint, state_name, version_name
from learner.work import Work


class Resend(NamedTuple):
    """A committed step that a restored checkpoint lacks."""

    planned: StepPlanned
    tokens: int


def first_trainer(work: Work, resume_from: str) -> Trainer:
    """Return the trainer of a run without checkpoints, its state saved before step 0.

    `resume_from` is a state URI to start from instead of a fresh adapter; its weights become version 1.
    """
    engine, state = work.config.engine, work.log.state()
    if resume_from:
        trainer = work.session.restore_trainer(resume_from)
    else:
        trainer = work.session.create_trainer(
            lora_rank=engine.lora_rank,
            seed=work.opened.seed,
            train_attn=engine.train_attn,
            train_mlp=engine.train_mlp,
            train_unembed=engine.train_unembed,
        )
    work.hooks.probe("created")
    weights_uri = state.weights_uri
    published: list[JournalEvent] = []
    if resume_from:
        version = state.policy_version + 1
        weights_uri = trainer.save_weights(version_name(version))
        published = [
            PolicyPublished(policy_version=version, weights_uri=weights_uri, step=0, at=work.clock())
        ]
    saved = CheckpointSaved(
        step=0,
        state_uri=trainer.save_state(state_name(0)),
        weights_uri=weights_uri,
        training_run=trainer.training_run,
        at=work.clock(),
    )
    work.hooks.probe("state_saved")
    work.log.journal.append_sync([saved, *published])
    work.hooks.probe("checkpointed")
    return trainer


def recover(work: Work, checkpoints: Sequence[CheckpointSaved]) -> Trainer:
    """Return a trainer that holds every committed step; raises an EngineError, ReplayError or ConfigError."""
    trainer, checkpoint = _restore_newest(work, checkpoints)
    work.hooks.probe("restored")
    state = work.log.state()
    missing = _missing(work, checkpoint.step, state.committed_steps)
    _ask(work, missing)
    for resend in missing:
        _send_again(work, trainer, resend.planned)
        work.hooks.probe(f"resent:{resend.planned.step}")
    events: list[JournalEvent] = [
        Recovered(
            restored_uri=checkpoint.state_uri,
            restored_step=checkpoint.step,
            resent_steps=tuple(resend.planned.step for resend in missing),
            training_run=trainer.training_run,
            tokens_trained=sum(resend.tokens for resend in missing),
            at=work.clock(),
        )
    ]
    if missing or not work.session.can_sample(state.weights_uri):
        version = state.policy_version + 1
        uri = trainer.save_weights(version_name(version))
        events.append(
            PolicyPublished(
                policy_version=version, weights_uri=uri, step=state.committed_steps, at=work.clock()
            )
        )
    work.hooks.probe("recovering")
    work.log.journal.append_sync(events)
    work.hooks.probe("recovered")
    if missing:
        save_checkpoint(work, trainer)
    _tell(work, checkpoint, missing)
    return trainer


def _restore_newest(work: Work, checkpoints: Sequence[CheckpointSaved]) -> tuple[Trainer, CheckpointSaved]:
    for checkpoint in reversed(checkpoints):
        try:
            return work.session.restore_trainer(checkpoint.state_uri), checkpoint
        except WeightsGone as exc:
            work.hooks.notify(
                f"checkpoint of step {checkpoint.step} cannot be used, trying an older one: {exc}"
            )
    raise WeightsGone(
        f"none of the run's {len(checkpoints)} checkpoints exists any more: its recorded rollouts can "
        "still be trained on by a new run, with `learn --from RUN --run NEW`"
    )


def _missing(work: Work, start: int, stop: int) -> list[Resend]:
    """Return the trained steps from `start` on, before `stop`; skipped ones changed nothing."""
    missing = []
    for step in range(start, stop):
        committed = committed_event(work.log, step)
        assert committed is not None  # the store keeps steps contiguous
        if not committed.skipped:
            missing.append(Resend(work.log.plan(step), committed.tokens_trained))
    return missing


def _ask(work: Work, missing: Sequence[Resend]) -> None:
    limit = work.config.learner.recovery.max_resend_steps
    if work.config.engine.kind == "embedded" or len(missing) <= limit:
        return
    question = (
        f"recovery must send {len(missing)} committed steps again, about "
        f"{sum(resend.tokens for resend in missing):,} training tokens, more than "
        f"learner.recovery.max_resend_steps = {limit} allows"
    )
    if not work.hooks.confirm(question):
        raise ConfigError(f"{question}: pass --yes to pay for it, nothing was sent")


def _send_again(work: Work, trainer: Trainer, planned: StepPlanned) -> None:
    rebuilt = rebuild_planned(work, planned)
    send(trainer, rebuilt.batch, prepare_batch(rebuilt.batch), planned, work.hooks.probe)


def rebuild_planned(work: Work, planned: StepPlanned) -> Rebuilt:
    """Return a recorded step, proved to be the one that was planned; raises ReplayError otherwise."""
    rebuilt = rebuild(work.log, planned, work.hooks.load_code)
    if rebuilt.batch_digest != planned.batch_digest:
        raise ReplayError(
            f"step {planned.step} cannot be sent again: its batch is {rebuilt.batch_digest!r}, planned was "
            f"{planned.batch_digest!r}; `replay --step {planned.step}` names the place"
        )
    return rebuilt


def _tell(work: Work, checkpoint: CheckpointSaved, missing: Sequence[Resend]) -> None:
    sent = f", {len(missing)} later steps sent again" if missing else ""
    work.hooks.notify(f"restored the checkpoint of step {checkpoint.step}{sent}")
