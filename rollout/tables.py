"""Owns reading rows from Parquet and JSONL files a batch at a time, whatever their size."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from core.errors import ConfigError, DataError
from rollout.rows import FIELDS

try:
    from pyarrow import ArrowException, RecordBatch, parquet
except ImportError:  # an optional dependency: only Parquet files need it
    parquet = RecordBatch = None
    ArrowException = OSError

ROWS_PER_BATCH = 4096


class Row(NamedTuple):
    """One row as the file has it."""

    number: int
    """Line or row, from 1."""
    value: object
    """None where it cannot be read."""
    problem: str = ""
    """Why it cannot."""


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a .parquet or .jsonl file; raises DataError when it cannot be read at all."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix in (".jsonl", ".json"):
            yield from _jsonl(path)
        else:
            raise ConfigError(f"{str(path)!r}: expected a file called *.parquet or *.jsonl")
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}; expected a {path.suffix[1:]} file") from error


def _parquet(path: Path) -> Iterator[Row]:
    if parquet is None:
        raise ConfigError("reading Parquet needs pyarrow: pip install 'rolltape[parquet]'")
    with parquet.ParquetFile(path) as file:
        columns = [name for name in file.schema_arrow.names if name in FIELDS]
        number = 0
        for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns):
            for row in _rows(batch):
                number += 1
                yield row._replace(number=number)


def _rows(batch: RecordBatch) -> Iterator[Row]:
    """Yield the rows of a batch; a text that is no UTF-8 costs its own row only."""
    try:
        yield from [Row(0, value) for value in batch.to_pylist()]
    except UnicodeDecodeError:
        for place in range(batch.num_rows):
            try:
                yield Row(0, batch.slice(place, 1).to_pylist()[0])
            except UnicodeDecodeError:
                yield Row(0, None, "not UTF-8")


def _jsonl(path: Path) -> Iterator[Row]:
    decoder = msgspec.json.Decoder()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = decoder.decode(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                yield Row(number, None, "not JSON")
            else:
                yield Row(number, value)
