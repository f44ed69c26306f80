"""Owns the records file of an evaluation: JSON lines, the first of which says what is evaluated.

A line is written when its question has ended. A file whose last line was torn is read up to there.
"""

import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from core.errors import ConfigError
from rollout.data import Example
from rollout.summary import QuestionRecord


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated: the first line of the file."""

    name: str
    weights_uri: str
    policy_version: int
    set_digest: str
    settings: dict[str, float | str | int | bool]


def set_digest(examples: Sequence[Example]) -> str:
    """Return SHA-256 hex over the questions, their answers and their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(msgspec.json.encode(example) + b"\n")
    return digest.hexdigest()


class RecordFile:
    """The records of one evaluation, in a file that is made or continued."""

    def __init__(self, path: Path, sheet: Sheet) -> None:
        self.path = path
        self.done: dict[str, QuestionRecord] = {}
        self._file = self._open(sheet)

    def __repr__(self) -> str:
        return f"<RecordFile {str(self.path)!r}, {len(self.done)} questions>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, record: QuestionRecord) -> None:
        """Write one question's record."""
        self._write(msgspec.json.encode(record))
        self.done[record.result.example_id] = record

    def _open(self, sheet: Sheet) -> BinaryIO:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot write {str(self.path)!r}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            self._read(file, sheet)
        except BlockingIOError as error:
            file.close()
            raise ConfigError(f"{str(self.path)!r} is being written by another evaluation") from error
        except BaseException:
            file.close()
            raise
        return file

    def _read(self, file: BinaryIO, sheet: Sheet) -> None:
        """Take in what the file holds; change nothing before it is known to be this evaluation's."""
        head = msgspec.json.encode(sheet) + b"\n"
        content = file.read()
        if head.startswith(content):  # empty, or torn in its first line
            file.truncate(0)
            file.write(head)
            file.flush()
            return
        whole = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
        try:
            found = msgspec.json.decode(whole[0] if whole else content, type=Sheet)
            records = [msgspec.json.decode(line, type=QuestionRecord) for line in whole[1:]]
        except msgspec.DecodeError as error:
            raise ConfigError(f"{str(self.path)!r} holds no evaluation records: {error}") from error
        if found != sheet:
            raise ConfigError(
                f"{str(self.path)!r} holds another evaluation: {_difference(found, sheet)}; "
                "give this one another --name"
            )
        file.truncate(sum(map(len, whole)))
        self.done = {record.result.example_id: record for record in records}

    def _write(self, line: bytes) -> None:
        self._file.seek(0, os.SEEK_END)
        self._file.write(line + b"\n")
        self._file.flush()


def _difference(found: Sheet, wanted: Sheet) -> str:
    """Return the first difference of two sheets, with both values."""
    left, right = msgspec.to_builtins(found), msgspec.to_builtins(wanted)
    left |= left.pop("settings")
    right |= right.pop("settings")
    key = next(key for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key))
    return f"its {key} is {left.get(key)!r}, this one's {right.get(key)!r}"
