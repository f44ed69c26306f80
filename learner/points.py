"""Owns what is tracked: points made from journal events, the lines that carry them, and how far they went.

A point's names are those of `learner/metrics.py`, with `trainer/*` as the trainer told them, `time/*`
in seconds, and `eval/*` for the evaluations made while training.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from core.events import Evaluated, StepCommitted
from store.ports import JournalRecord

SENT = "sent.json"


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: which experiment the points belong to."""

    folder: str
    """Where the tracker keeps its files; made already."""
    mode: str
    run_id: str
    name: str
    config: dict[str, object]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Every later line: one commit's numbers."""

    position: int
    """Of the journal record that the point was made from, plus one."""
    step: int
    metrics: dict[str, float]


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to each line."""

    position: int
    """Points below this journal position have been taken, by this process or an earlier one."""
    place: str = ""
    """Where a person finds the experiment; only in answer to the opening."""


def evaluation_name(steps: int) -> str:
    """Return the name under which the weights after `steps` steps are evaluated while training."""
    return f"step-{steps}"


def point_of(record: JournalRecord, steps_of: Mapping[int, int]) -> Point | None:
    """Return the point of a journal record, None when it holds nothing to track.

    `steps_of` maps policy versions to the committed steps that their weights hold.
    """
    match record.event:
        case StepCommitted() as event:
            times = {f"time/{name}": seconds for name, seconds in event.seconds.items()}
            step, metrics = event.step, event.rollout_metrics | event.trainer_metrics | times
        case Evaluated() as event:
            step = steps_of.get(event.policy_version, 0)
            if event.name != evaluation_name(step):
                return None
            metrics = {f"eval/{name}": value for name, value in event.summary.items()}
        case _:
            return None
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return Point(position=record.index + 1, step=step, metrics=finite)


def read_position(folder: Path) -> int:
    """Return the journal position below which everything was handed over; raises OSError or DecodeError."""
    try:
        return msgspec.json.decode((folder / SENT).read_bytes(), type=Taken).position
    except FileNotFoundError:
        return 0


def write_position(folder: Path, position: int) -> None:
    """Remember a position; the file is replaced as a whole, so that a kill leaves the old or the new one."""
    fresh = folder / f"{SENT}.new"
    fresh.write_bytes(msgspec.json.encode(Taken(position=position)))
    fresh.replace(folder / SENT)
