"""Owns making the views anew from the journal, byte for byte what they were."""

from collections.abc import Iterator
from pathlib import Path

from core.errors import StoreError
from store import codec, keys
from store.creating import LOG_DIR
from store.environment import Environment
from store.journal import pack_view, stored_event
from store.keys import Table
from store.locks import hold_open
from store.projections import apply
from store.snapshot import Change, Snapshot
from store.versions import VERSIONS_KEY, pack_versions
from store.views import Views


def fold_journal(snapshot: Snapshot) -> dict[bytes, bytes]:
    """Return the views' bodies by key, folded from the whole journal; raises LogDamaged or a rule's error."""
    rows: dict[bytes, bytes] = {}
    for key, value in snapshot.scan(Table.JOURNAL):
        schema, raw = stored_event(key, value)
        views = Views(rows.get)
        apply(views, keys.parse_journal_key(key), codec.decode_journal(raw, schema))
        for row, body in views.changes.items():
            if body is None:
                rows.pop(row, None)
            else:
                rows[row] = body
    return rows


def stored_views(rows: dict[bytes, bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the views as they are stored, in key order."""
    for key in sorted(rows):
        yield key, pack_view(key, rows[key])


def rebuild_views(environment: Environment) -> int:
    """Replace the views by what the journal says, in one transaction; return how many rows there are."""
    with environment.write() as snapshot:
        rows = fold_journal(snapshot)
        snapshot.clear(Table.VIEWS)
        snapshot.put(Change(Table.VIEWS, key, value) for key, value in stored_views(rows))
        snapshot.put([Change(Table.META, VERSIONS_KEY, pack_versions())])
    return len(rows)


def rebuild(run_dir: Path) -> int:
    """Make the views of the run's log anew from its journal; return how many rows there are.

    Raises LogDamaged when the journal is, StoreError when there is no log, and then has changed nothing.
    """
    folder = run_dir / LOG_DIR
    if not folder.is_dir():
        raise StoreError(f"no log in {str(run_dir)!r}")
    locks = hold_open(run_dir, readonly=False)
    try:
        environment = Environment(folder, readonly=False, map_size=None, sync=True)
        try:
            return rebuild_views(environment)
        finally:
            environment.close()
    finally:
        locks.release_all()
