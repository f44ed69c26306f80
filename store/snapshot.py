"""Owns one transaction as the rest of the store sees it: looking up, reading in order, writing.

Values are as stored, not yet unpacked. Reading in order checks the order, so that a damaged page ends a scan
with LogDamaged instead of leading it in circles.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from core.errors import LogDamaged
from store.keys import Table

if TYPE_CHECKING:
    import lmdb
    from lmdb import _Database

Tables: TypeAlias = "dict[Table, _Database]"


class Change(NamedTuple):
    """One entry to be written, or deleted where the value is None."""

    table: Table
    key: bytes
    value: bytes | None


class Rows(NamedTuple):
    """Many entries to be written to one table; cheaper than as many changes."""

    table: Table
    items: list[tuple[bytes, bytes]]


class Snapshot:
    """One read or write transaction: the log as it was at one moment."""

    def __init__(self, transaction: "lmdb.Transaction", tables: Tables) -> None:
        self._transaction = transaction
        self._tables = tables
        self._cursors: dict[Table, lmdb.Cursor] = {}
        self.owners: set[tuple[str, int]] = set()
        """(uid, owner) pairs that were found to own their groups, while no view has changed since."""

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return the stored value under `key`."""
        return cast("bytes | None", self._transaction.get(key, db=self._tables[table]))

    def scan(
        self, table: Table, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, stored value) from `start` on, before `stop`, in key order; raises LogDamaged."""
        before = b""
        with self._transaction.cursor(self._tables[table]) as cursor:
            if not cursor.set_range(start):
                return
            for key, value in cast("Iterator[tuple[bytes, bytes]]", cursor):
                if stop is not None and key >= stop:
                    return
                if key <= before or key < start:
                    raise _disorder(table, key, before or start)
                yield key, value
                before = key

    def keys(self, table: Table, start: bytes, stop: bytes) -> list[bytes]:
        """Return the keys from `start` on, before `stop`, without touching values; raises LogDamaged."""
        found: list[bytes] = []
        with self._transaction.cursor(self._tables[table]) as cursor:
            if not cursor.set_range(start):
                return found
            before = b""
            for key in cast("Iterator[bytes]", cursor.iternext(keys=True, values=False)):
                if key >= stop:
                    break
                if key <= before or key < start:
                    raise _disorder(table, key, before or start)
                found.append(key)
                before = key
        return found

    def first(self, table: Table, start: bytes) -> tuple[bytes, bytes] | None:
        """Return the first entry whose key is not smaller than `start`."""
        return next(self.scan(table, start), None)

    def last(self, table: Table, below: bytes | None = None) -> tuple[bytes, bytes] | None:
        """Return the last entry, or the last whose key is smaller than `below`; raises LogDamaged."""
        key = self.last_key(table, below)
        return None if key is None else (key, cast("bytes", self._cursor(table).value()))

    def last_key(self, table: Table, below: bytes | None = None) -> bytes | None:
        """Return the key of what `last` returns."""
        cursor = self._cursor(table)
        found = cursor.set_range(below) if below is not None else False
        if not (cursor.prev() if found else cursor.last()):
            return None
        key = cast("bytes", cursor.key())
        if below is not None and key >= below:
            raise _disorder(table, key, below)
        return key

    def _cursor(self, table: Table) -> "lmdb.Cursor":
        """Return a cursor that lives as long as the transaction; making one costs as much as a look-up."""
        cursor = self._cursors.get(table)
        if cursor is None:
            cursor = self._cursors[table] = self._transaction.cursor(self._tables[table])
        return cursor

    def table_names(self) -> list[bytes]:
        """Return the names of every table in the file."""
        with self._transaction.cursor() as cursor:
            return list(cast("Iterator[bytes]", cursor.iternext(keys=True, values=False)))

    def count(self, table: Table) -> int:
        """Return how many entries the table says it has."""
        return int(self._transaction.stat(self._tables[table])["entries"])

    def put(self, changes: Iterable[Change | Rows]) -> None:
        """Write in order; only inside a write transaction."""
        for change in changes:
            if isinstance(change, Rows):
                self._cursor(change.table).putmulti(change.items)
                continue
            table, key, value = change
            if table is Table.VIEWS:
                self.owners.clear()
            if value is None:
                self._transaction.delete(key, db=self._tables[table])
            else:
                self._transaction.put(key, value, db=self._tables[table])

    def append(self, rows: Rows) -> None:
        """Write entries that stand, in key order, behind the table's last; pages come out full."""
        self._cursor(rows.table).putmulti(rows.items, append=True)

    def clear(self, table: Table) -> None:
        """Delete every entry of a table; only inside a write transaction."""
        self._transaction.drop(self._tables[table], delete=False)


def _disorder(table: Table, key: bytes, before: bytes) -> LogDamaged:
    return LogDamaged(
        f"a page of table {table.value.decode()!r} is damaged: key {key.hex()} stands after {before.hex()}. "
        "Run `verify`, and restore the log from a backup or an export"
    )
