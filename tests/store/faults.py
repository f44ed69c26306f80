"""Owns the faults that tests bring about: a death inside a transaction, a full disk, entries changed by hand."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from store.keys import Table
from store.snapshot import Snapshot
from store.writer import Job, Plan
from tests.store.children import ROOT, die


def half_done(job: Job[Any]) -> Job[Any]:
    """Return the job that writes half of what `job` would, and dies inside the transaction."""

    def dying(snapshot: Snapshot) -> Plan[Any]:
        changes = list(job(snapshot).changes)
        snapshot.put(changes[: len(changes) // 2 + 1])
        die()
        raise AssertionError

    return dying


def on_a_small_disk(folder: Path, script: str, size: str) -> str:
    """Run a Python script with `folder` as a real file system of `size`; return what it printed.

    In a mount namespace of its own. Skips the test where there can be none.
    """
    mounting = f'mount -t tmpfs -o size={size} none "{folder}" && exec "{sys.executable}" -c "$1" "{folder}"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounting, "sh"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*command, ""], check=False, capture_output=True).returncode
    ):
        pytest.skip("needs `unshare` with user and mount namespaces to mount a small file system")
    done = subprocess.run(
        [*command, script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def change(data: Path, table: Table, edit: "dict[bytes, bytes | None]") -> None:
    """Write raw entries into a log's file behind its back."""
    with (
        lmdb.open(str(data.parent), map_size=1 << 28, max_dbs=8) as env,
        env.begin(write=True) as transaction,
    ):
        handle = env.open_db(table.value, transaction)
        for key, value in edit.items():
            if value is None:
                transaction.delete(key, db=handle)
            else:
                transaction.put(key, value, db=handle)


def entries(data: Path, table: Table) -> Iterator[tuple[bytes, bytes]]:
    """Yield the raw entries of a table."""
    with lmdb.open(str(data.parent), readonly=True, max_dbs=8) as env, env.begin() as transaction:
        found = list(transaction.cursor(env.open_db(table.value, transaction)))
    yield from found
