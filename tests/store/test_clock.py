"""A clock that is set back: nothing depends on the times in the log, and nothing breaks by them."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core.events import (
    CheckpointSaved,
    GoalSet,
    GroupDropped,
    PlannedGroup,
    PolicyPublished,
    StepCommitted,
)
from store.copying import compact
from store.log import Log
from store.ports import Claim
from store.rebuilding import rebuild
from store.verify import verify
from tests.store.children import LogChild
from tests.store.making import CHOSEN, OPEN_ADMISSION, fill, open_run, plan
from tests.store.telling import told

Clock = Iterator[float]
CLOCKS: dict[str, Callable[[], Clock]] = {
    "forward": lambda: itertools.count(1.0e9),
    "backward": lambda: itertools.count(1.0e9, -3600.0),
    "standing": lambda: itertools.repeat(0.0),
    "before 1970": lambda: itertools.count(-5.0, -1.0),
    "jumping": lambda: itertools.cycle([4.0e9, 0.0, 1.0e308, -1.0e308, 12.5]),
}


def claimed(log: Log, worker: str, clock: Clock) -> Claim:
    """Return what a worker claims now."""
    found = log.groups.claim_sync(worker, OPEN_ADMISSION, next(clock))
    assert isinstance(found, Claim)
    return found


def live(log: Log, clock: Clock) -> None:
    """Claim, adopt, close, abort, drop, re-open, plan, commit, publish and save, each at the clock's next time."""
    log.journal.append_sync([GoalSet(max_steps=9, at=next(clock))])
    planned = []
    for number in range(4):
        group = claimed(log, f"worker-{number}", clock)
        fill(log, group)
        if number == 1:
            log._locks.release("worker-1")
            group = claimed(log, "worker-4", clock)
            assert group.adopted
        digest = log.groups.close_sync(group, CHOSEN, next(clock))
        planned.append(PlannedGroup(uid=group.uid, digest=digest))
    log.journal.append_sync([GroupDropped(uid=planned.pop().uid, reason="no_signal", at=next(clock))])
    for final in (False, False, True):
        log.groups.abort_sync(claimed(log, "worker-5", clock), "late", next(clock), final=final)
    late = claimed(log, "worker-5", clock)
    fill(log, late)
    taken = log.groups.take_over_sync(late.uid, "learner", next(clock))
    log.groups.close_sync(taken, CHOSEN, next(clock))
    for step in range(2):
        groups, planned = planned[:2], planned[2:]
        for _ in range(2):
            log.journal.append_sync([plan(step, groups, at=next(clock))])
        log.journal.append_sync(
            [
                StepCommitted(step=step, skipped=False, policy_version=step + 1, at=next(clock)),
                PolicyPublished(
                    policy_version=step + 1, weights_uri=f"w{step}", step=step + 1, at=next(clock)
                ),
                CheckpointSaved(step=step + 1, state_uri="s", weights_uri="w", at=next(clock)),
            ]
        )
    claimed(log, "worker-6", clock)


def history(run_dir: Path, clock: Clock) -> dict[str, Any]:
    """Return all that a log tells, times aside, after the same life by some clock."""
    with open_run(run_dir) as log:
        live(log, clock)
        digests = {row.uid: (row.digest, row.opened_at_step) for row in log.group_rows()}
        return told(log) | {"digests": digests, "state": log.state()}


@pytest.mark.parametrize("name", [name for name in CLOCKS if name != "forward"])
def test_the_log_is_the_same_whatever_the_clock_says(tmp_path: Path, name: str) -> None:
    """Owners, fates, steps, counters and digests do not follow from times; `verify` and `compact` ask for none."""
    wanted = history(tmp_path / "forward", CLOCKS["forward"]())
    assert history(tmp_path / name, CLOCKS[name]()) == wanted
    assert verify(tmp_path / name) == []
    assert rebuild(tmp_path / name) == rebuild(tmp_path / "forward")
    compact(tmp_path / name)
    assert verify(tmp_path / name) == []


def test_workers_whose_clocks_differ_share_a_log(tmp_path: Path) -> None:
    """A worker an hour behind adopts, continues and closes the group of one that died an hour ahead."""
    open_run(tmp_path).close()
    with LogChild(tmp_path) as ahead, LogChild(tmp_path) as behind:
        theirs = ahead.do("groups.claim_sync", ahead.worker_id, OPEN_ADMISSION, 1.0e9 + 3600)
        other = behind.do("groups.claim_sync", behind.worker_id, OPEN_ADMISSION, 1.0e9 - 3600)
        assert (theirs.uid, other.uid, other.adopted) == ("000000.0", "000001.0", False)
        ahead.kill()
        ours = behind.do("groups.claim_sync", behind.worker_id, OPEN_ADMISSION, 1.0e9 - 7200)
        assert (ours.uid, ours.owner, ours.adopted) == (theirs.uid, 2, True)
        behind.do("groups.abort_sync", ours, "late", -1.0)
        again = behind.do("groups.claim_sync", behind.worker_id, OPEN_ADMISSION, -2.0)
        assert (again.uid, again.adopted) == ("000000.1", False)
    assert verify(tmp_path) == []
