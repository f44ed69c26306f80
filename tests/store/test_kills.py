"""kill -9 anywhere: nothing acknowledged is lost, nothing half-written is visible, nobody is blocked."""

import random
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from core.errors import RolltapeError
from core.events import CheckpointSaved, GoalSet, GroupDropped, PlannedGroup, PolicyPublished, StepCommitted
from store import codec
from store.claims import Claimant, claim_job
from store.copying import TEMPORARY, compact
from store.groups import _append_job, _encode, _end_job
from store.journal import _append_job as _journal_job
from store.journal import encode_all
from store.log import Log, open_log
from store.ports import Claim, GroupFate, NoClaim, RunState, StreamWrite
from store.verify import verify
from tests.store.children import Child, LogChild, die, until
from tests.store.faults import half_done
from tests.store.making import CHOSEN, OPEN_ADMISSION, asked, chain, claim, closed, fill, open_run, plan

Ack = tuple[str, str, int, int, bytes]
"""What a child says once something is acknowledged: kind, uid, tree, position, event bytes."""


def group_steps(log: Log) -> Iterator[Callable[[], object]]:
    """Yield, one request at a time, what makes one group and one step; each is safe to repeat."""
    held: list[Claim] = []
    uid = "000000.0"

    def is_open() -> bool:
        return not any(row.uid == uid and row.fate is not GroupFate.OPEN for row in log.group_rows())

    yield lambda: is_open() and held.append(claim(log))
    for tree, events in enumerate([[asked(uid)], chain(1), chain(2)]):
        for position, event in enumerate(events):
            yield (
                lambda tree=tree, position=position, event=event: (
                    is_open() and log.groups.append_sync(held[0], [StreamWrite(tree, position, [event])])
                )
            )
    yield lambda: is_open() and log.groups.close_sync(held[0], CHOSEN, 1.0)

    def append_at(index: int, *events: Any) -> object:
        return log.state().journal_length <= base() + index and log.journal.append_sync(list(events))

    def base() -> int:
        return next(
            record.index + 1 for record in log.journal.read() if type(record.event).__name__ == "GroupClosed"
        )

    committed = StepCommitted(step=0, skipped=False, policy_version=1)
    published = PolicyPublished(policy_version=1, weights_uri="w1", step=1)
    yield lambda: append_at(0, plan(0, [PlannedGroup(uid=uid, digest=log.group(uid).digest)]))
    yield lambda: append_at(1, committed, published)
    yield lambda: append_at(3, CheckpointSaved(step=1, state_uri="s1", weights_uri="w1"))


def some_steps(_: Connection, run_dir: Path, count: int) -> None:
    """Make the first `count` requests and die."""
    with open_run(run_dir) as log:
        for number, step in enumerate(group_steps(log)):
            if number == count:
                die()
            step()


def all_steps(run_dir: Path) -> tuple[RunState, str]:
    """Make all requests; return what the log holds then."""
    with open_run(run_dir) as log:
        for step in group_steps(log):
            step()
        return log.state(), log.groups.fetch("000000.0").digest


def test_a_kill_after_any_request_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    """Whoever comes after a death at any boundary ends with the same records and books."""
    state, digest = all_steps(tmp_path / "whole")
    for count in range(18):
        run_dir = tmp_path / str(count)
        with Child(some_steps, run_dir, count) as child, pytest.raises(EOFError):
            child.hear()
        after, same = all_steps(run_dir)
        assert same == digest
        assert after.fates == state.fates
        adopted = after.journal_length - state.journal_length
        assert (adopted, after.committed_steps, after.live_tickets) == (int(0 < count < 15), 1, 1), count


def die_inside(connection: Connection, run_dir: Path, what: str) -> None:
    """Die in the middle of a transaction of the named kind."""
    with open_run(run_dir) as log:
        group = claim(log)
        claimant = Claimant(log.worker_id, lambda _: False, set())
        ending = log.groups._closing(group, CHOSEN, 1.0)
        streams, _ = _encode(group.uid, [StreamWrite(3, 0, chain(3))])
        rows = [row for row in log.group_rows() if row.fate is GroupFate.CLOSED]
        planned = plan(0, [PlannedGroup(uid=row.uid, digest=row.digest) for row in rows])
        jobs = {
            "claim": claim_job(claimant, OPEN_ADMISSION, 1.0),
            "append": _append_job(group, streams),
            "close": _end_job(group, ending),
            "journal": _journal_job(encode_all([planned]), None),
        }
        connection.send("ready")
        log.write_sync(half_done(jobs[what]), 1)


@pytest.mark.parametrize("what", ["claim", "append", "close", "journal"])
def test_a_kill_inside_a_transaction_leaves_nothing_of_it(tmp_path: Path, what: str) -> None:
    """The next process finds the log as it was before, and goes on."""
    with open_run(tmp_path) as log:
        closed(log, 2)
        fill(log, claim(log))
    with Child(die_inside, tmp_path, what) as child:
        assert child.hear() == "ready"
        with pytest.raises(EOFError):
            child.hear()
    assert verify(tmp_path) == []
    with open_run(tmp_path) as log:
        assert log.state().fates["open"] == 1
        assert log.state().next_ticket == 3
        assert len(log.groups.fetch("000002.0").records) == 13
        group = claim(log)
        assert (group.uid, group.owner) == ("000002.0", 3)
        log.groups.close_sync(group, CHOSEN, 1.0)


def write_for_ever(connection: Connection, run_dir: Path, seed: int) -> None:
    """Make groups, record by record, and say after each acknowledgement what was acknowledged."""
    draw = random.Random(seed)
    with open_log(run_dir, role="rollout") as log:
        while True:
            group = log.groups.claim_sync(log.worker_id, OPEN_ADMISSION, 1.0)
            assert not isinstance(group, NoClaim)
            there = {(record.tree, record.index) for record in log.groups.fetch(group.uid).records}
            version = group.policy_version
            streams = [[asked(group.uid, version)], chain(1, version=version), chain(2, version=version)]
            for tree, events in enumerate(streams):
                for position, event in enumerate(events):
                    if (tree, position) in there:
                        continue
                    log.groups.append_sync(group, [StreamWrite(tree, position, [event])])
                    connection.send(("record", group.uid, tree, position, codec.encode(event)))
            if draw.random() < 0.2:
                log.groups.abort_sync(group, "weights_expired", 1.0)
                connection.send(("aborted", group.uid, 0, 0, b""))
            else:
                digest = log.groups.close_sync(group, CHOSEN, 1.0)
                connection.send(("closed", group.uid, 0, 0, digest.encode()))


def learn_for_ever(connection: Connection, run_dir: Path, seed: int) -> None:
    """Plan, commit and publish steps of two groups, drop some, and say what was acknowledged."""
    draw = random.Random(seed)
    with open_log(run_dir, role="learner") as log:
        while True:
            state = log.state()
            rows = log.next_step_groups(2)
            if state.planned_step is None:
                if len(rows) < 2 or any(row.fate is not GroupFate.CLOSED for row in rows):
                    log.journal.wait_sync(state.journal_length, 0.05)
                    continue
                if draw.random() < 0.1:
                    log.journal.append_sync([GroupDropped(uid=rows[0].uid, reason="no_signal")])
                    connection.send(("dropped", rows[0].uid, 0, 0, b""))
                    continue
                groups = [PlannedGroup(uid=row.uid, digest=row.digest) for row in rows]
                log.journal.append_sync([plan(state.committed_steps, groups)])
                connection.send(("planned", "", state.committed_steps, 0, b""))
            step = log.state().committed_steps
            version = log.state().policy_version + 1
            log.journal.append_sync(
                [
                    StepCommitted(step=step, skipped=False, policy_version=version),
                    PolicyPublished(policy_version=version, weights_uri=f"w{version}", step=step + 1),
                ]
            )
            connection.send(("committed", "", step, 0, b""))


def hear_all(child: Child, acks: list[Ack]) -> None:
    """Collect what a child has said so far, and what a dead one still said."""
    try:
        while child.waiting():
            acks.append(child.hear())
    except (EOFError, ConnectionResetError):
        return


def kill_and_check(run_dir: Path, kills: int, writers: int, seed: int) -> None:
    """Run writers and a learner, kill one of them again and again, and check every acknowledgement."""
    draw, acks = random.Random(seed), list[Ack]()
    open_run(run_dir).close()

    def start(number: int) -> Child:
        entry = learn_for_ever if number == 0 else write_for_ever
        return Child(entry, run_dir, draw.randrange(1 << 30))

    children = [start(number) for number in range(writers + 1)]
    for _ in range(kills):
        number = draw.randrange(len(children))
        for _ in range(draw.randrange(1, 12)):
            if number:
                acks.append(children[number].hear())
        for child in children:
            hear_all(child, acks)
        victim = children[number]
        victim.stop(acks)
        children[number] = start(number)
    for child in children:
        child.stop(acks)
    check(run_dir, acks)


def check(run_dir: Path, acks: list[Ack]) -> None:
    """Every acknowledged record, closing and step is there, and the books are right."""
    assert verify(run_dir) == []
    with open_log(run_dir) as log:
        fates = {row.uid: row for row in log.group_rows()}
        stored = {
            (uid, record.tree, record.index): record.raw
            for uid in fates
            for record in log.groups.fetch(uid).records
        }
        for kind, uid, tree, position, raw in acks:
            match kind:
                case "record":
                    assert stored[uid, tree, position] == raw
                case "closed":
                    assert fates[uid].digest.encode() == raw
                case "aborted":
                    assert fates[uid].fate is GroupFate.ABORTED
                case "dropped":
                    assert fates[uid].fate is GroupFate.DROPPED
                case "planned":
                    assert log.plan(tree).step == tree
                case "committed":
                    assert log.step(tree).committed_index is not None
    assert len({kind for kind, *_ in acks}) > 2


def test_a_few_random_kills(tmp_path: Path) -> None:
    """Two writers and a learner, ten kills."""
    kill_and_check(tmp_path / "run", kills=10, writers=2, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_two_hundred_random_kills(tmp_path: Path) -> None:
    """Three writers and a learner, 220 kills."""
    kill_and_check(tmp_path / "run", kills=220, writers=3, seed=2)


def commit_and_die(connection: Connection, run_dir: Path) -> None:
    """Write a goal, and die inside the next transaction."""
    with open_log(run_dir, role="learner") as log:
        log.journal.append_sync([GoalSet(max_steps=7)])
        connection.send(log.journal.length())
        log.write_sync(half_done(_journal_job(encode_all([GoalSet(max_steps=8)]), None)), 1)


NEWEST_AT = 48
"""Where LMDB's lock file holds the number of the transaction that readers see."""


def test_a_commit_that_a_killed_writer_did_not_announce_is_found_by_whoever_opens_the_log(
    tmp_path: Path,
) -> None:
    """A learner that comes back reads what its predecessor wrote, before it writes anything itself.

    A writer that is killed while its last page is flushed has committed, but readers are not told so: a reader
    that has the log open sees it with the next write, of whomever. The state is brought about in the lock file.
    """
    open_run(tmp_path).close()
    lock = tmp_path / "log" / "lock.mdb"
    with LogChild(tmp_path, "reader") as reader:
        with Child(commit_and_die, tmp_path) as child:
            assert child.hear() == 2
            assert child.end() == -9
        assert reader.do("journal.length") == 2
        with lock.open("r+b") as file:
            file.seek(NEWEST_AT)
            newest = int.from_bytes(file.read(8), "little")
            file.seek(NEWEST_AT)
            file.write((newest - 1).to_bytes(8, "little"))
        assert reader.do("journal.length") == 1
        with open_log(tmp_path, role="learner") as log:
            assert log.state().max_steps == 7
            assert log.journal.length() == 2
        assert reader.do("journal.length") == 2
    assert verify(tmp_path) == []


def compact_for_ever(connection: Connection, run_dir: Path) -> None:
    """Compact a log again and again."""
    while True:
        compact(run_dir)
        connection.send("compacted")


def test_a_kill_during_a_compaction_leaves_the_log(tmp_path: Path) -> None:
    """The old file or the new one, whole; what the killed one left is cleared away by the next."""
    with open_run(tmp_path) as log:
        closed(log, 20)
        for _ in range(5):
            fill(log, claim(log))
        state, head = log.state(), log.journal.head()
    draw, left = random.Random(4), 0
    for _ in range(6):
        with Child(compact_for_ever, tmp_path) as child:
            assert child.hear() == "compacted"
            until(lambda: any(tmp_path.glob(f"{TEMPORARY}*/log")))
            for _ in range(draw.randrange(3_000)):
                pass
        left += any(tmp_path.glob(f"{TEMPORARY}*"))
        assert verify(tmp_path, head) == []
        with open_log(tmp_path, readonly=True) as log:
            assert log.state() == state
    compact(tmp_path)
    assert left > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["locks", "log"]


def test_the_errors_of_a_death_are_ours(tmp_path: Path) -> None:
    """A claim of a dead worker is refused in our words once another has the group."""
    with open_run(tmp_path) as log:
        group = claim(log)
        log.evict(log.worker_id)
        other = log.groups.take_over_sync(group.uid, "worker-2", 1.0)
        with pytest.raises(RolltapeError, match="worker-2"):
            log.groups.append_sync(group, [StreamWrite(1, 0, chain(1))])
        log.groups.append_sync(other, [StreamWrite(1, 0, chain(1))])
