"""Owns the Parquet export: one trajectory a row, the run in the file's metadata. Needs pyarrow (an extra)."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import DataError
from core.events import RunOpened
from store import codec
from store.exchange import enter_groups
from store.jsonl import arrivals, run_of, trajectory_rows
from store.log import Log
from store.outfile import writing
from store.trajectories import TrajectoryRow

RUN_KEY = b"rolltape.run"
ROWS_PER_GROUP = 256
NESTED = ("plan", "params", "score")
"""Columns that hold JSON text: their fields may grow."""

_STRING_OR_NULL = pa.string()
_TURN = pa.struct(
    [
        pa.field("node", pa.string(), nullable=False),
        ("parent", _STRING_OR_NULL),
        pa.field("start", pa.int32(), nullable=False),
        pa.field("stop", pa.int32(), nullable=False),
        ("text", pa.string()),
        ("stop_reason", pa.string()),
        ("seed", pa.int64()),
        ("sample_index", pa.int32()),
        ("request", pa.int32()),
        ("observation", _STRING_OR_NULL),
        ("reference", pa.list_(pa.float32())),
        ("reference_model", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("tree", pa.int32()),
        ("leaf", pa.string()),
        ("member", pa.bool_()),
        ("example_id", pa.string()),
        ("data_source", pa.string()),
        ("question", pa.string()),
        ("references", pa.list_(pa.string())),
        ("policy_version", pa.int64()),
        ("weights_uri", pa.string()),
        ("opened_at_step", pa.int64()),
        ("dropped", pa.string()),
        ("plan", pa.string()),
        ("params", pa.string()),
        ("protocol", pa.string()),
        ("source", pa.string()),
        ("outcome", pa.string()),
        ("answer", _STRING_OR_NULL),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("score", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.int8())),
        ("segment_starts", pa.list_(pa.int32())),
        ("turns", pa.list_(_TURN)),
    ]
)


def export_parquet(log: Log, path: Path) -> int:
    """Write every ended trajectory of every complete group to `path`; return how many rows.

    Raises StoreError when the log holds no run.
    """
    schema = SCHEMA.with_metadata({RUN_KEY: msgspec.json.encode(run_of(log))})
    count = 0
    with writing(path) as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in _batches(log):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def import_parquet(log: Log, path: Path) -> int:
    """Enter what `export_parquet` wrote into a fresh log; return how many groups there were.

    Opens the run in the file's metadata when the log has none yet. Raises DataError on another file,
    StoreError when the log is not fresh.
    """
    try:
        with pq.ParquetFile(path) as file:
            metadata = file.schema_arrow.metadata or {}
            log.open_run(msgspec.json.decode(metadata.get(RUN_KEY, b""), type=RunOpened))
            return enter_groups(log, arrivals(_read(file)))
    except (pa.ArrowException, *codec.NOT_READABLE) as exc:
        raise DataError(f"{str(path)!r} is not a Parquet export of this format: {exc}") from exc


def _batches(log: Log) -> Iterator[list[dict[str, object]]]:
    rows = (_to_plain(row) for row in trajectory_rows(log))
    while batch := list(itertools.islice(rows, ROWS_PER_GROUP)):
        yield batch


def _to_plain(row: TrajectoryRow) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(row)
    for name in NESTED:
        plain[name] = msgspec.json.encode(plain[name]).decode()
    return plain


def _read(file: pq.ParquetFile) -> Iterator[TrajectoryRow]:
    for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
        for plain in batch.to_pylist():
            for name in NESTED:
                plain[name] = msgspec.json.decode(plain[name])
            yield msgspec.convert(plain, TrajectoryRow)
