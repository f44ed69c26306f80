"""Owns what a diagnosis looks at and what it finds."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from core.events import StepCommitted, StepPlanned
from learner.rebuild import Rebuilt
from store.ports import Bundle

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


class Difference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One place where a step is not what its plan recorded."""

    place: str
    field: str
    offset: int | None = None
    """Token position in the trajectory's segment."""
    recorded: str = ""
    derived: str = ""
    around: str = ""
    cause: str = ""
    proven: bool = False
    """Putting the recorded value back gives the recorded digest."""

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at token {self.offset}"
        values = f": recorded {self.recorded}, re-derived {self.derived}" if self.recorded else ""
        around = f", around {self.around!r}" if self.around else ""
        proof = " (proven)" if self.proven else ""
        return f"{self.place}: {self.field}{at}{values}{around}. {self.cause}{proof}"


class Scene(NamedTuple):
    """All that a diagnosis looks at."""

    planned: StepPlanned
    committed: StepCommitted | None
    rebuilt: Rebuilt
    fetch: Callable[[str], Bundle]
    decode: Decode | None
    policy_version: int
    """The newest that was published before the plan."""
    changes: Sequence[str]
    """Fingerprints that changed since, in words."""
