"""Owns the child of `verify`: one snapshot of the log, every table, every record, every rule."""

import sys
from pathlib import Path

from core.errors import LogDamaged, LogForeign, LogTooNew, RolltapeError
from store import disk
from store.check_groups import check_groups
from store.check_journal import check_journal
from store.check_tables import check_tables, check_views
from store.creating import DATA_FILE
from store.environment import Environment
from store.findings import Report
from store.locks import hold_open


def check_log(folder: Path, head: str | None, report: Report) -> None:
    """Report everything that is wrong with the log in `folder`."""
    report.at("header pages")
    for problem in disk.header_problems(folder / DATA_FILE):
        report.add("file", str(folder / DATA_FILE), problem)
    report.at("opening the log")
    locks = hold_open(folder.parent, readonly=True)
    environment = Environment(folder, readonly=True, map_size=None, sync=True)
    try:
        with environment.read() as snapshot:
            check_tables(snapshot, snapshot.table_names(), report)
            books = check_journal(snapshot, head, report)
            check_views(snapshot, books.rows, report)
            check_groups(snapshot, books, report)
    finally:
        environment.close()
        locks.release_all()


def main(arguments: list[str]) -> None:
    """Check the log directory named by the first argument, with the head named by the second."""
    report = Report()
    folder = Path(arguments[0])
    try:
        check_log(folder, arguments[1] if len(arguments) > 1 else None, report)
    except (LogForeign, LogTooNew) as exc:
        report.fail(exc)
        return
    except LogDamaged as exc:
        report.add("file", str(folder), str(exc))
    except RolltapeError as exc:
        report.fail(exc)
        return
    report.end()


if __name__ == "__main__":
    main(sys.argv[1:])
