"""Owns `verify`: the whole log is read and checked in a child process, which a damaged page may kill.

Found are flipped bits that change what can be read, missing records, broken chains and digests, impossible
states, and with `head` a lost tail. Not found is the work of somebody who rewrites all digests.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from core.errors import LogDamaged, LogForeign, LogTooNew, StoreError
from store import creating, disk
from store.findings import Finding, Line

_ERRORS = {error.__name__: error for error in (LogForeign, LogTooNew, StoreError)}


def verify(run_dir: Path, head: str | None = None) -> list[Finding]:
    """Return everything that is wrong with the log in `run_dir`, an empty list for a good one.

    `head` is a hash that `Log.journal.head()` once gave: it must still be in the chain. Raises StoreError
    when there is no log, LogForeign or LogTooNew when the file is not for this release to judge.
    """
    folder = run_dir / creating.LOG_DIR
    data = folder / creating.DATA_FILE
    if not data.is_file():
        raise StoreError(f"no log in {str(run_dir)!r}: expected {str(data)!r}")
    disk.check_filesystem(folder)
    try:
        disk.read_meta(data)
    except LogDamaged as exc:
        return [Finding("file", str(data), str(exc))]
    return _run_child(folder, head)


def _run_child(folder: Path, head: str | None) -> list[Finding]:
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, "-m", "store.verifying", str(folder), *([head] if head else [])]
    found: list[Finding] = []
    line = Line()
    where = "opening the log"
    # A file, for a second pipe that nobody reads meanwhile would stop a child with much to say.
    with tempfile.TemporaryFile() as complaints:
        with subprocess.Popen(  # noqa: S603 our own module
            command, stdout=subprocess.PIPE, stderr=complaints, env={**os.environ, "PYTHONPATH": path}
        ) as child:
            assert child.stdout is not None
            for text in child.stdout:
                line = msgspec.json.decode(text, type=Line)
                where = line.at or where
                if line.finding is not None:
                    found.append(line.finding)
        complaints.seek(0)
        complaint = complaints.read().decode("utf-8", "replace").strip()
    if line.error:
        raise _ERRORS.get(line.error_class, StoreError)(line.error)
    if not line.done:
        how = f"died of {_name_of(child.returncode)}"
        last = complaint.splitlines()[-1] if complaint else ""
        found.append(
            Finding("file", where, f"reading the log {how} at {where}: a page is damaged. {last}".strip())
        )
    return found


def _name_of(returncode: int) -> str:
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"exit status {returncode}"
