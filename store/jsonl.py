"""Owns the JSON Lines export: one trajectory a line, and the run beside it in `<file>.run.json`."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from core.errors import DataError, StoreError
from core.events import RunOpened
from core.tree import fold_group
from store import codec
from store.exchange import Arrival, complete_groups, enter_groups, passport_of
from store.log import Log
from store.outfile import writing
from store.row_checks import checked_arrival
from store.trajectories import TrajectoryRow, to_rows

_decode = msgspec.json.Decoder(TrajectoryRow).decode
_encode = msgspec.json.Encoder().encode


def export_jsonl(log: Log, path: Path) -> int:
    """Write every ended trajectory of every complete group to `path`; return how many rows.

    Raises StoreError when the log holds no run.
    """
    run, count = run_of(log), 0
    with writing(run_path(path)) as file:
        file.write(_encode(run))
    with writing(path) as file:
        for row in trajectory_rows(log):
            file.write(_encode(row) + b"\n")
            count += 1
    return count


def import_jsonl(log: Log, path: Path) -> int:
    """Enter what `export_jsonl` wrote into a fresh log; return how many groups there were.

    Opens the run in `<file>.run.json` when the log has none yet. Raises DataError naming the line, StoreError
    when the log is not fresh.
    """
    try:
        run = msgspec.json.decode(run_path(path).read_bytes(), type=RunOpened)
    except (OSError, *codec.NOT_READABLE) as exc:
        raise DataError(
            f"cannot read the run that {str(path)!r} belongs to, {str(run_path(path))!r}: {exc}"
        ) from exc
    log.open_run(run)
    return enter_groups(log, arrivals(_read(path)))


def run_of(log: Log) -> RunOpened:
    """Return the log's run; raises StoreError when there is none."""
    run = log.run_event()
    if run is None:
        raise StoreError(f"{str(log.run_dir)!r} holds no run: nothing to export")
    return run


def run_path(path: Path) -> Path:
    """Return where the run stands that the rows in `path` belong to."""
    return path.with_name(path.name + ".run.json")


def trajectory_rows(log: Log) -> Iterator[TrajectoryRow]:
    """Yield the rows of every complete group, in order of uid."""
    for row in complete_groups(log):
        bundle = log.groups.fetch(row.uid)
        group = fold_group((record.tree, record.event) for record in bundle.records)
        yield from to_rows(group, passport_of(row))


def arrivals(rows: Iterable[TrajectoryRow]) -> Iterator[Arrival]:
    """Yield the groups that rows tell of; the rows of a group stand together."""
    for _, theirs in itertools.groupby(rows, key=lambda row: row.uid):
        yield checked_arrival(list(theirs))


def _read(path: Path) -> Iterator[TrajectoryRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield _decode(line)
            except codec.NOT_READABLE as exc:
                raise DataError(f"{str(path)!r} line {number}: not a trajectory row: {exc}") from exc
