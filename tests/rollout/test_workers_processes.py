"""Several rollout processes on one log: nothing twice, and nothing lost when they are killed."""

import signal
import time
from pathlib import Path

import anyio

from core.tree import Group, fold_group
from rollout.progress import silence
from rollout.run import Options, run_rollouts
from store.log import Log, open_log
from store.ports import GroupFate
from tests.fakes import ScriptedSampler, ScriptedSearch, make_environment
from tests.rollout.child import EXAMPLES, make_child_config
from tests.rollout.logs import hear, open_run, program
from tests.rollout.support import timeless

CHILD = "from tests.rollout.child import main; main()"


def groups(log: Log) -> dict[str, Group]:
    """Return all closed groups, without what a clock said."""
    return {
        row.uid: timeless(
            fold_group((record.tree, record.event) for record in log.groups.fetch(row.uid).records)
        )
        for row in log.group_rows(GroupFate.CLOSED)
    }


def undisturbed(run_dir: Path, tickets: int) -> dict[str, Group]:
    """Return the groups that one worker in one go makes."""
    environment = make_environment(ScriptedSampler(), ScriptedSearch())
    with open_run(run_dir) as log:
        anyio.run(
            run_rollouts,
            log,
            make_child_config(),
            EXAMPLES,
            environment,
            silence(),
            Options(tickets),
        )
        return groups(log)


def wait_for_records(run_dir: Path, count: int) -> None:
    """Return once the groups of a run hold so many records."""
    deadline = time.monotonic() + 30
    with open_log(run_dir, readonly=True) as log:
        while sum(len(log.groups.fetch(row.uid).records) for row in log.group_rows()) < count:
            assert time.monotonic() < deadline, f"no {count} records in {run_dir}"
            time.sleep(0.002)


def test_killed_workers_leave_what_an_undisturbed_one_makes(tmp_path: Path) -> None:
    """SIGKILL at four moments; after each the next process adopts, and in the end every group is the same."""
    tickets = 6
    with open_run(tmp_path / "killed"):
        pass
    for kill in range(4):
        with program(CHILD, tmp_path / "killed", str(tickets)) as child:
            assert hear(child) == "ready"
            wait_for_records(tmp_path / "killed", 30 * (kill + 1))
            child.send_signal(signal.SIGKILL)
            child.wait(20)
    with program(CHILD, tmp_path / "killed", str(tickets)) as child:
        assert (hear(child), hear(child)) == ("ready", "done")
        assert child.wait(30) == 0
    with open_log(tmp_path / "killed", readonly=True) as log:
        rows = list(log.group_rows())
        assert [(row.ticket, row.attempt, row.fate) for row in rows] == [
            (ticket, 0, GroupFate.CLOSED) for ticket in range(tickets)
        ]
        assert groups(log) == undisturbed(tmp_path / "whole", tickets)


def test_processes_share_the_tickets(tmp_path: Path) -> None:
    """Three processes at once: every ticket is opened once, and together they make what one would."""
    tickets = 24
    with open_run(tmp_path / "shared"):
        pass
    run_dir = tmp_path / "shared"
    with (
        program(CHILD, run_dir, str(tickets)) as a,
        program(CHILD, run_dir, str(tickets)) as b,
        program(CHILD, run_dir, str(tickets)) as c,
    ):
        for child in (a, b, c):
            assert (hear(child), hear(child)) == ("ready", "done")
            assert child.wait(30) == 0
    with open_log(run_dir, readonly=True) as log:
        rows = list(log.group_rows())
        assert [(row.ticket, row.fate) for row in rows] == [(n, GroupFate.CLOSED) for n in range(tickets)]
        assert groups(log) == undisturbed(tmp_path / "whole", tickets)
