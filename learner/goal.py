"""Owns the aim of a run: recording it, and telling whether anything is left to do for it."""

from core.config import Config
from core.events import GoalSet
from learner.gather import EVERYTHING, UNSETTLED
from learner.history import History
from store.log import Log


def record_goal(log: Log, max_steps: int, now: float) -> None:
    """Append the aim unless it is the recorded one already; what is committed is the least that it can be."""
    state = log.state()
    aim = max(max_steps, state.committed_steps)
    if state.max_steps != aim:
        log.journal.append_sync([GoalSet(max_steps=aim, at=now)])


def is_settled(log: Log, config: Config, max_steps: int) -> bool:
    """Return whether a run has reached its goal and nothing is left that would need an engine.

    Left can be a plan, an evaluation that is due, or groups that have no fate yet.
    """
    state, every = log.state(), config.learner.eval_every
    if state.committed_steps < max_steps or state.planned_step is not None:
        return False
    if every and state.committed_steps and state.committed_steps % every == 0:
        history = History()
        history.catch_up(log.journal)
        if not history.is_evaluated(state.committed_steps):
            return False
    return not any(row.fate in UNSETTLED for row in log.next_step_groups(EVERYTHING))
