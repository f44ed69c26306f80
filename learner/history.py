"""Owns what the learner remembers of its run: a fold of the journal, caught up before each decision."""

from collections import deque

from core.budget import Spent, add
from core.events import (
    CheckpointSaved,
    Evaluated,
    GroupDropped,
    JournalEvent,
    PolicyPublished,
    StepCommitted,
)
from learner.points import evaluation_name
from learner.selection import NO_SIGNAL
from learner.warnings import WINDOW
from store.ports import Journal


class History:
    """The run's checkpoints, cost, evaluations, and replaced groups of the step to come."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointSaved] = []
        self.spent = Spent()
        self.replaced = 0
        """Groups dropped for want of signal since the last commit."""
        self.evaluated: set[int] = set()
        """Committed steps whose weights were evaluated while training."""
        self.recent: deque[dict[str, float]] = deque(maxlen=2 * WINDOW)
        """Rollout metrics of the last steps."""
        self._steps_of: dict[int, int] = {0: 0}
        """Policy version → committed steps."""
        self._position = 0

    def __repr__(self) -> str:
        return f"<History of {self._position} records, {len(self.checkpoints)} checkpoints>"

    def catch_up(self, journal: Journal) -> None:
        """Read what was appended since the last call."""
        for record in journal.read(self._position):
            self._add(record.event)
            self._position = record.index + 1

    def is_evaluated(self, steps: int) -> bool:
        """Tell whether the weights after `steps` committed steps were evaluated."""
        return steps in self.evaluated

    def _add(self, event: JournalEvent) -> None:
        self.spent = add(self.spent, event)
        match event:
            case CheckpointSaved():
                self.checkpoints.append(event)
            case Evaluated(policy_version=version, name=name):
                steps = self._steps_of.get(version, 0)
                if name == evaluation_name(steps):
                    self.evaluated.add(steps)
            case PolicyPublished(policy_version=version, step=step):
                self._steps_of[version] = step
            case GroupDropped(reason=reason) if reason == NO_SIGNAL:
                self.replaced += 1
            case StepCommitted():
                self.replaced = 0
                self.recent.append(event.rollout_metrics)
            case _:
                pass
