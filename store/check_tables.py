"""Owns the checks of single entries (counts, order, lookups, checksums) and of the views."""

from collections.abc import Collection, Mapping

from core.errors import LogDamaged
from store import codec
from store.findings import Report
from store.keys import Table
from store.rebuilding import stored_views
from store.snapshot import Snapshot
from store.versions import VERSIONS_KEY

KEY_SIZES: Mapping[Table, Collection[int]] = {
    Table.META: (len(VERSIONS_KEY),),
    Table.JOURNAL: (8,),
    Table.GROUPS: (16,),
    Table.BUNDLES: (12,),
    Table.VIEWS: (1, 9, 11),
    Table.CACHE: (32,),
}


def check_tables(snapshot: Snapshot, names: Collection[bytes], report: Report) -> None:
    """Check that each table holds what it says it holds, in order, findable, with right checksums."""
    expected = {table.value for table in Table}
    if set(names) != expected:
        report.add("file", "tables", f"the file has tables {sorted(names)}, expected {sorted(expected)}")
    for table in Table:
        report.at(f"table {table.value.decode()}")
        check_table(snapshot, table, report)


def check_table(snapshot: Snapshot, table: Table, report: Report) -> None:
    """Check one table's entries."""
    name, count = table.value.decode(), 0
    try:
        for key, value in snapshot.scan(table):
            count += 1
            _check_entry(snapshot, table, key, value, report)
    except LogDamaged as exc:
        report.add("table", name, str(exc))
    if count != snapshot.count(table):
        report.add(
            "table", name, f"the table says it has {snapshot.count(table)} entries, reading it gives {count}"
        )


def _check_entry(snapshot: Snapshot, table: Table, key: bytes, value: bytes, report: Report) -> None:
    where = f"{table.value.decode()} {key.hex()}"
    if len(key) not in KEY_SIZES[table]:
        report.add("table", where, f"a key of {len(key)} bytes, expected {KEY_SIZES[table]}")
    try:
        codec.unpack(table, key, value)
    except LogDamaged as exc:
        report.add("cache" if table is Table.CACHE else "record", where, str(exc))
    if snapshot.get(table, key) != value:
        report.add("table", where, "looking the key up does not find what reading in order finds")


def check_views(snapshot: Snapshot, rows: dict[bytes, bytes], report: Report) -> None:
    """Check that the stored views are what the journal says, byte for byte."""
    report.at("views against the journal")
    stored = dict(snapshot.scan(Table.VIEWS))
    for key, value in stored_views(rows):
        if stored.pop(key, None) != value:
            report.add(
                "view", f"views {key.hex()}", "the row is missing or not what the journal says: rebuild"
            )
    for key in stored:
        report.add("view", f"views {key.hex()}", "the row has no ground in the journal: rebuild")
