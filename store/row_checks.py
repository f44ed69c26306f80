"""Owns the comparison of imported rows with the group made of them: nothing of a row is passed over."""

from collections.abc import Sequence

import msgspec

from core.errors import DataError
from core.tree import fold_group
from store import codec
from store.checking import problem_of
from store.exchange import Arrival
from store.keys import MAX_TREE
from store.trajectories import TrajectoryRow, to_arrival, to_rows


def checked_arrival(rows: Sequence[TrajectoryRow]) -> Arrival:
    """Return the group that `rows`, all of one uid, tell of.

    Raises DataError naming the trajectory and the columns that contradict each other or what a log can hold,
    FoldError where the turns make no tree.
    """
    for row in rows:
        if not 0 < row.tree <= MAX_TREE:
            raise DataError(f"trajectory {_name(row)}: tree {row.tree}, expected 1 to {MAX_TREE}")
    try:
        arrival = to_arrival(rows)
    except OverflowError as exc:
        raise DataError(f"group {rows[0].uid!r} holds a number that no log can: {exc}") from exc
    events = [(record.tree, codec.decode_group(record.raw)) for record in arrival.records]
    for tree, event in events:
        problem = problem_of(arrival.passport.uid, tree, event)
        if problem:
            raise DataError(f"group {arrival.passport.uid!r}, tree {tree}: {problem}")
    told = {(row.tree, row.leaf): row for row in to_rows(fold_group(events), arrival.passport)}
    for row in rows:
        same = told.pop((row.tree, row.leaf), None)
        if same is None:
            raise DataError(f"trajectory {_name(row)}: given twice")
        if same != row:
            raise DataError(
                f"trajectory {_name(row)}: what stands in {_differing(row, same)} contradicts the rest of "
                "the row, or its group"
            )
    return arrival


def _differing(row: TrajectoryRow, other: TrajectoryRow) -> str:
    """Return the columns in which two rows differ."""
    fields = msgspec.structs.fields(TrajectoryRow)
    return ", ".join(field.name for field in fields if getattr(row, field.name) != getattr(other, field.name))


def _name(row: TrajectoryRow) -> str:
    return f"{row.uid}/t{row.tree}/{row.leaf}"
