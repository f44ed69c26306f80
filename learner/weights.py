"""Owns the names and lifetimes of what the learner saves, and the collection of what nobody needs."""

from collections.abc import Iterable, Sequence

from core.config import LearnerSettings
from core.events import CheckpointSaved
from engine.client import Session
from engine.trainer import Trainer
from learner.work import Work
from store.ports import PolicyRow

DAY = 86_400
DEADLINES_KEPT = 4
"""Superseded weights outlive this many group deadlines, so that no open group loses them."""


def version_name(policy_version: int) -> str:
    """Return the name under which a version's weights are saved; unique within a training run."""
    return f"v{policy_version:06d}"


def state_name(step: int) -> str:
    """Return the name of the state saved when `step` steps were committed."""
    return f"s{step:06d}"


def keeps(learner: LearnerSettings, steps: int, max_steps: int) -> bool:
    """Tell whether the weights after `steps` steps are kept for good: saved, evaluated or last."""
    every = (learner.save_every, learner.eval_every)
    return steps >= max_steps or any(period and steps % period == 0 for period in every)


def lifetime(learner: LearnerSettings, steps: int, max_steps: int) -> int | None:
    """Return the seconds for which the weights after `steps` steps must live, None for ever."""
    if keeps(learner, steps, max_steps):
        return None
    return max(DAY, int(DEADLINES_KEPT * learner.group_deadline))


def save_checkpoint(work: Work, trainer: Trainer) -> CheckpointSaved:
    """Save the trainer's state after the committed steps, and record it. The trainer must be at rest."""
    state = work.log.state()
    uri = trainer.save_state(state_name(state.committed_steps))
    work.hooks.probe("state_saved")
    saved = CheckpointSaved(
        step=state.committed_steps,
        state_uri=uri,
        weights_uri=state.weights_uri,
        training_run=trainer.training_run,
        at=work.clock(),
    )
    work.log.journal.append_sync([saved])
    work.hooks.probe("checkpointed")
    return saved


def superseded(policies: Sequence[PolicyRow], pinned: Iterable[str], kept: Iterable[str]) -> set[str]:
    """Return the weights URIs that nobody needs: neither current, nor pinned by an open group, nor kept.

    `policies` ascend by version; the last is current. "" is the base model, which is never deleted.
    """
    return {row.weights_uri for row in policies[:-1]} - {policies[-1].weights_uri, ""} - {*pinned, *kept}


def collect(work: Work, session: Session, kept: Iterable[str]) -> int:
    """Delete superseded weights at the embedded engine; return how many.

    The hosted service forgets them by their lifetime: its list is of a whole workspace.
    """
    if work.config.engine.kind != "embedded":
        return 0
    gone = superseded(work.log.policies(), work.log.pinned_weights().values(), kept)
    found = [saved for saved in session.list_checkpoints() if saved.uri in gone]
    for saved in found:
        session.delete_checkpoint(saved)
    return len(found)
