"""Owns the comparison of a group's records with those that a plan pinned, also where they fold no more."""

from collections.abc import Iterator, Sequence

import numpy as np

from core.events import GroupEvent, PlannedGroup
from learner.difference import Decode, Difference
from learner.evidence import MARK_BYTES, record_marks
from store.ports import Bundle, GroupRecord


def is_pinned(pinned: PlannedGroup, digest: str, marks: bytes) -> bool:
    """Tell whether a group's digest and marks are those of the plan; plans of old have no marks."""
    return pinned.digest == digest and pinned.marks in {b"", marks}


def altered_records(pinned: PlannedGroup, bundle: Bundle, decode: Decode | None) -> Iterator[Difference]:
    """Yield what is not as it was pinned: the records by place, or the pins themselves."""
    marks = record_marks(bundle.records)
    if is_pinned(pinned, bundle.digest, marks):
        return
    if pinned.digest == bundle.digest:
        yield _of_group(pinned.uid, "marks", "the marks in the plan were altered")
    elif not pinned.marks:
        yield _of_group(pinned.uid, "digest", "a record of this group was altered")
    elif pinned.marks == marks:
        yield _of_group(pinned.uid, "digest", "its records are the pinned ones, the plan was altered")
    elif len(pinned.marks) != len(marks):
        yield _number(pinned.uid, bundle.records, split(pinned.marks), split(marks))
    else:
        yield from _altered(bundle, split(pinned.marks), split(marks), decode)


def split(marks: bytes) -> list[bytes]:
    """Return a group's marks, one per record."""
    return [marks[start : start + MARK_BYTES] for start in range(0, len(marks), MARK_BYTES)]


def _of_group(uid: str, field: str, cause: str) -> Difference:
    return Difference(place=f"group {uid}", field=field, cause=cause)


def _number(uid: str, records: Sequence[GroupRecord], pinned: list[bytes], now: list[bytes]) -> Difference:
    """Say how many records there were, and the first that is not in its place."""
    first = next(
        (place for place, (old, new) in enumerate(zip(pinned, now, strict=False)) if old != new),
        min(len(pinned), len(now)),
    )
    where = f"from {_where(records[first])} on" if first < len(records) else "at the end"
    return Difference(
        place=f"group {uid}",
        field="number of records",
        recorded=str(len(pinned)),
        derived=str(len(now)),
        cause=f"records were added or removed after the step was planned, {where}",
    )


def _altered(
    bundle: Bundle, pinned: list[bytes], now: list[bytes], decode: Decode | None
) -> Iterator[Difference]:
    places = {mark: place for place, mark in enumerate(pinned) if mark != now[place]}
    for place, record in enumerate(bundle.records):
        if pinned[place] == now[place]:
            continue
        cause = "this record is not the one that the plan pinned: the event was altered after training"
        other = places.get(now[place])
        if other is not None:
            cause = f"the plan has this record as {_where(bundle.records[other])}: records changed places"
        yield Difference(
            place=f"group {bundle.uid} {_where(record)} ({describe(record.event)})",
            field=_suspect(record.event, decode),
            cause=cause,
        )


def _where(record: GroupRecord) -> str:
    return f"tree {record.tree} record {record.index}"


def describe(event: GroupEvent) -> str:
    """Return an event's tag and what it speaks of, for a message."""
    tag = event.__struct_config__.tag
    node = getattr(event, "node", None) or getattr(event, "leaf", None) or getattr(event, "uid", "")
    return f"{tag} {node}".strip()


def _suspect(event: GroupEvent, decode: Decode | None) -> str:
    """Return which field of an altered record contradicts its other fields, if one does."""
    text, tokens = getattr(event, "text", None), getattr(event, "tokens", None)
    if decode is not None and text is not None and tokens is not None:
        spelled = decode(np.frombuffer(tokens, dtype="<i4").tolist())
        if not spelled.startswith(text):
            return f"text {text!r} is not what its tokens spell, {spelled!r}"
    return "record"
