"""Owns the question whether a file survives being read, answered by a child process that may die of it.

A file shorter than its header says is usually cut, but it may also merely lack pages at its end that nothing
uses; only reading it all tells, and that reading is a SIGBUS where it is cut.
"""

import subprocess
import sys
from pathlib import Path

import lmdb


def read_everything(path: str) -> int:
    """Touch every entry of every table of the LMDB directory `path`; return how many there were."""
    count = 0
    with lmdb.open(path, readonly=True, lock=False, max_dbs=64) as env, env.begin() as transaction:
        names = [name for name, _ in transaction.cursor()]
        for name in names:
            table = env.open_db(name, transaction, create=False)
            for _key, _value in transaction.cursor(table):
                count += 1
    return count


def survives_reading(path: Path) -> bool:
    """Return whether a child process could read every entry."""
    command = [sys.executable, "-I", __file__, str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603 our own file


if __name__ == "__main__":
    read_everything(sys.argv[1])
