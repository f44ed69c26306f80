"""Owns what verification says: findings with their keys, and their way from the child to its parent."""

import sys
from typing import Literal, TextIO

import msgspec

Kind = Literal["file", "table", "record", "journal", "view", "group", "books", "cache"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong with a log."""

    kind: Kind
    key: str
    """Where: a table and key, a journal position, or a uid."""
    message: str


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line from the child: where it is, a finding, an error that is no finding, or that it is done."""

    at: str = ""
    finding: Finding | None = None
    error: str = ""
    error_class: str = ""
    done: bool = False


class Report:
    """Collects findings and sends them on at once, so that a crash loses none."""

    def __init__(self, stream: TextIO = sys.stdout) -> None:
        self._stream = stream
        self.count = 0

    def at(self, where: str) -> None:
        """Say what is looked at next; named if it kills the process."""
        self._send(Line(at=where))

    def add(self, kind: Kind, key: str, message: str) -> None:
        """Report a finding."""
        self.count += 1
        self._send(Line(finding=Finding(kind, key, message)))

    def fail(self, error: Exception) -> None:
        """Report an error that makes verification impossible."""
        self._send(Line(error=str(error), error_class=type(error).__name__))

    def end(self) -> None:
        """Say that everything was looked at."""
        self._send(Line(done=True))

    def _send(self, line: Line) -> None:
        self._stream.write(msgspec.json.encode(line).decode() + "\n")
        self._stream.flush()
