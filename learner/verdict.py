"""Owns whether a rebuilt step is what was planned, as replay and the page both tell it.

Beside what the plan says of its datums, the two journal records of the step are held against the journal.
"""

import contextlib
from collections.abc import Iterator

from core.errors import LogDamaged
from core.events import StepCommitted, StepPlanned
from learner.diagnose import is_as_planned
from learner.difference import Difference, Scene
from learner.rebuild import Rebuilt
from store.log import Log


def is_match(
    log: Log, step: int, planned: StepPlanned, committed: StepCommitted | None, rebuilt: Rebuilt
) -> bool:
    """Tell whether a step that was rebuilt already is what was planned, as `replay_step` decides it."""
    scene = Scene(planned, committed, rebuilt, log.groups.fetch, None, version_before(log, step), ())
    wrong = (*misplaced(step, planned, committed), *broken_links(log, step))
    return not wrong and is_as_planned(scene)


def misplaced(step: int, planned: StepPlanned, committed: StepCommitted | None) -> Iterator[Difference]:
    """Yield the records of the step that speak of another one."""
    for name, event in (("step_planned", planned), ("step_committed", committed)):
        if event is not None and event.step != step:
            yield Difference(
                place=f"{name} of step {step}",
                field="step",
                recorded=str(event.step),
                derived=str(step),
                cause="it stands where the record of another step belongs",
            )


def broken_links(log: Log, step: int) -> Iterator[Difference]:
    """Yield what the journal's chain says against the step's own records, also where no datum changes."""
    row = log.step(step)
    for name, index in (("plan", row.planned_index), ("commit", row.committed_index)):
        # A damaged record after it says nothing about it; `verify` names that one.
        with contextlib.suppress(LogDamaged):
            if index is not None and log.journal.is_linked(index) is False:
                yield Difference(
                    place=f"step {step}",
                    field=f"journal record {index} (the {name})",
                    cause="the record after it holds another hash: it was altered after it was written. "
                    "`verify` checks the whole chain",
                )


def version_before(log: Log, step: int) -> int:
    """Return the newest policy version that was published before a step was planned."""
    index = log.step(step).planned_index
    return max(row.policy_version for row in log.policies() if row.index < index)
