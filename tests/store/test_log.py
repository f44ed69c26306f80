"""The log as rollout and learner use it: records, books, owners, admission."""

import asyncio
import stat
from pathlib import Path

import pytest

from core.errors import ConfigError, Conflict, GroupClosed, LogBusy, OwnerLost, StoreError
from core.events import GoalSet, GroupAborted, GroupDropped, PolicyPublished, RunOpened, StepCommitted
from store import codec, keys
from store.keys import Table
from store.log import open_log
from store.ports import Admission, GroupFate, JournalRecord, NoClaim, StreamWrite
from store.snapshot import Change
from tests.store.making import CHOSEN, asked, chain, claim, closed, fill, open_run, plan, run_event, sampled


def test_a_group_is_read_back_as_it_was_written_before_and_after_closing(tmp_path: Path) -> None:
    """Records, order, bytes and digest survive sealing and reopening."""
    with open_run(tmp_path / "run") as log:
        group = claim(log)
        fill(log, group)
        before = log.groups.fetch(group.uid)
        digest = log.groups.close_sync(group, CHOSEN, 2.0)
        assert log.groups.fetch(group.uid) == before
        assert [record.event for record in before.records] == [asked(group.uid), *chain(1), *chain(2)]
        assert digest == before.digest == log.group(group.uid).digest
    with open_log(tmp_path / "run", readonly=True) as log:
        assert log.groups.fetch(group.uid) == before
        assert log.group(group.uid).chosen == CHOSEN


def test_a_run_is_opened_once(tmp_path: Path) -> None:
    """The first writer wins, a repeat is a no-op, another configuration is refused with both digests."""
    with open_run(tmp_path / "run") as log:
        log.open_run(run_event())
        assert log.state().journal_length == 1
        assert log.run_event() == run_event()
        with pytest.raises(ConfigError, match=r"'ddd.*'eee"):
            log.open_run(run_event("e" * 64))
        with pytest.raises(Conflict, match="only at 0"):
            log.journal.append_sync([run_event()])


def test_nothing_comes_before_the_run(tmp_path: Path) -> None:
    """A journal starts with `run`."""
    with open_log(tmp_path / "run", create=True, role="rollout") as log:
        assert log.run_event() is None
        with pytest.raises(StoreError, match="has not been opened"):
            log.journal.append_sync([GoalSet(max_steps=1)])


def test_a_write_may_be_repeated_inside_a_request(tmp_path: Path) -> None:
    """The same records at the same place, twice in one request, are there once; others are a Conflict."""
    with open_run(tmp_path / "run") as log:
        group = claim(log)
        write, other = (StreamWrite(1, 0, chain(seed)) for seed in (1, 2))
        with pytest.raises(Conflict):
            log.groups.append_sync(group, [write, other])
        assert log.groups.fetch(group.uid).records == ()
        log.groups.append_sync(group, [write, write, StreamWrite(1, None, chain(3))])
        events = [record.event for record in log.groups.fetch(group.uid).records]
        assert events == [*chain(1), *chain(3)]


def test_append_with_expect_is_safe_to_repeat(tmp_path: Path) -> None:
    """The same bytes at the same place succeed without effect; anything else is a Conflict."""
    with open_run(tmp_path / "run") as log:
        assert log.journal.append_sync([GoalSet(max_steps=5)], expect=1) == 1
        assert log.journal.append_sync([GoalSet(max_steps=5)], expect=1) == 1
        assert log.state().journal_length == 2
        with pytest.raises(Conflict, match="another record"):
            log.journal.append_sync([GoalSet(max_steps=6)], expect=1)
        with pytest.raises(Conflict, match="beyond the end"):
            log.journal.append_sync([GoalSet(max_steps=6)], expect=3)
        group = claim(log)
        write = StreamWrite(1, 0, chain(1))
        log.groups.append_sync(group, [write])
        log.groups.append_sync(group, [write])
        assert len(log.groups.fetch(group.uid).records) == len(chain(1))
        with pytest.raises(Conflict, match="another record"):
            log.groups.append_sync(group, [StreamWrite(1, 0, chain(2))])
        with pytest.raises(Conflict, match="beyond the end"):
            log.groups.append_sync(group, [StreamWrite(1, 9, chain(2))])


def test_the_books_of_a_step(tmp_path: Path) -> None:
    """Groups become planned and trained; the counters and rows say so."""
    with open_run(tmp_path / "run") as log:
        groups = closed(log, 2)
        assert [row.uid for row in log.next_step_groups(9)] == ["000000.0", "000001.0"]
        log.journal.append_sync([plan(0, groups)])
        assert log.state().planned_step == 0
        assert log.next_step_groups(9) == []
        assert {row.fate for row in log.group_rows()} == {GroupFate.PLANNED}
        log.journal.append_sync(
            [
                StepCommitted(step=0, skipped=False, policy_version=1),
                PolicyPublished(policy_version=1, weights_uri="w1", step=1),
            ]
        )
        state = log.state()
        assert (state.committed_steps, state.planned_step, state.policy_version) == (1, None, 1)
        assert state.fates["trained"] == 2
        assert log.group("000001.0").step == 0
        assert log.step(0).committed_index == log.step(0).planned_index + 1
        assert [row.weights_uri for row in log.policies()] == ["", "w1"]
        assert claim(log).weights_uri == "w1"
        assert log.pinned_weights() == {1: "w1"}
        assert log.plan(0) == plan(0, groups)


def test_admission_waits_and_ends(tmp_path: Path) -> None:
    """Live tickets stay below the bound, and no ticket is opened that the goal cannot need."""
    admission = Admission(max_staleness=0, groups_per_step=2)
    with open_run(tmp_path / "run") as log:
        log.journal.append_sync([GoalSet(max_steps=1)])
        groups = closed(log, 2)
        assert log.groups.claim_sync(log.worker_id, admission, 1.0) is NoClaim.WAIT
        log.journal.append_sync([plan(0, groups), StepCommitted(step=0, skipped=True, policy_version=0)])
        assert log.groups.claim_sync(log.worker_id, admission, 1.0) is NoClaim.GOAL
        log.journal.append_sync([GoalSet(max_steps=2)])
        assert claim(log, admission).uid == "000002.0"
        limited = Admission(max_staleness=9, groups_per_step=9, max_tickets=3)
        assert log.groups.claim_sync(log.worker_id, limited, 1.0) is NoClaim.GOAL


def test_a_dropped_group_gives_its_place_back(tmp_path: Path) -> None:
    """Live tickets do not count dropped and given-up ones."""
    admission = Admission(max_staleness=0, groups_per_step=1)
    with open_run(tmp_path / "run") as log:
        group = claim(log, admission)
        assert log.groups.claim_sync(log.worker_id, admission, 1.0) is NoClaim.WAIT
        fill(log, group)
        log.groups.close_sync(group, CHOSEN, 2.0)
        log.journal.append_sync([GroupDropped(uid=group.uid, reason="no_signal")])
        assert claim(log, admission).uid == "000001.0"


def test_an_aborted_ticket_is_opened_again(tmp_path: Path) -> None:
    """The same ticket comes back as the next attempt, unless it was given up for good."""
    with open_run(tmp_path / "run") as log:
        first = claim(log)
        fill(log, first)
        log.groups.abort_sync(first, "weights_expired", 2.0)
        log.groups.abort_sync(first, "weights_expired", 3.0)
        assert [row.fate for row in log.next_step_groups(9)] == [GroupFate.ABORTED]
        second = claim(log)
        assert (second.uid, second.adopted) == ("000000.1", False)
        assert [row.uid for row in log.next_step_groups(9)] == ["000000.1"]
        log.groups.abort_sync(second, "hopeless", 3.0, final=True)
        assert claim(log).uid == "000001.0"
        assert log.state().live_tickets == 1
        assert len(log.groups.fetch(first.uid).records) == 13


def test_an_ended_group_takes_nothing_more(tmp_path: Path) -> None:
    """After the learner aborts a group, its owner's append, close and abort say that it is closed."""
    with open_run(tmp_path / "run") as log:
        group = claim(log)
        log.journal.append_sync([GroupAborted(uid=group.uid, reason="run_ended", final=True)])
        with pytest.raises(GroupClosed, match="run_ended"):
            log.groups.append_sync(group, [StreamWrite(1, 0, chain(1))])
        with pytest.raises(GroupClosed):
            log.groups.close_sync(group, CHOSEN, 2.0)
        with pytest.raises(GroupClosed):
            log.groups.abort_sync(group, "other", 2.0)
        with pytest.raises(GroupClosed, match="expected open"):
            log.journal.append_sync([GroupAborted(uid=group.uid, reason="again")])


def test_the_learner_takes_a_late_group_over(tmp_path: Path) -> None:
    """Who closes a late group becomes its owner; the old owner hears OwnerLost."""
    with open_run(tmp_path / "run") as log:
        group = claim(log)
        fill(log, group)
        late = log.groups.take_over_sync(group.uid, "learner", 3.0)
        assert (late.uid, late.owner, late.adopted) == (group.uid, 2, True)
        with pytest.raises(OwnerLost, match="'learner'"):
            log.groups.append_sync(group, [StreamWrite(1, None, [sampled(2)])])
        log.groups.close_sync(late, CHOSEN, 4.0)
        with pytest.raises(OwnerLost):
            log.groups.append_sync(group, [StreamWrite(1, None, [sampled(2)])])
        with pytest.raises(GroupClosed):
            log.groups.take_over_sync(group.uid, "learner", 3.0)


def test_an_uncommitted_plan_is_never_replaced(tmp_path: Path) -> None:
    """The same plan may be appended again (recovery), another one for the step is a Conflict."""
    with open_run(tmp_path / "run") as log:
        groups = closed(log, 2)
        log.journal.append_sync([plan(0, groups)])
        log.journal.append_sync([plan(0, groups, at=9.0)])
        assert log.step(0).planned_index == log.state().journal_length - 2
        with pytest.raises(Conflict, match="planned already"):
            log.journal.append_sync([plan(0, groups, estimator="grpo")])
        with pytest.raises(Conflict, match="the next step is 0"):
            log.journal.append_sync([plan(1, groups)])


def test_following_sees_later_records(tmp_path: Path) -> None:
    """`follow` yields what is there and what comes; `wait_sync` tells whether something came."""

    async def scene() -> list[JournalRecord]:
        with open_run(tmp_path / "run") as log:
            seen: list[JournalRecord] = []
            async for record in log.journal.follow():
                seen.append(record)
                if record.index < 3:
                    await log.journal.append([GoalSet(max_steps=record.index)])
                else:
                    assert log.journal.wait_sync(3, 1.0)
                    assert not log.journal.wait_sync(4, 0.01)
                    return seen
        raise AssertionError

    seen = asyncio.run(scene())
    assert [type(record.event) for record in seen] == [RunOpened, GoalSet, GoalSet, GoalSet]


def test_a_second_learner_hears_who_has_the_lock(tmp_path: Path) -> None:
    """Only one process may learn; who has the lock may ask for it again."""
    with open_run(tmp_path / "run", role="learner") as log:
        log._locks.take("learner")
        with pytest.raises(LogBusy, match="held by process"):
            type(log._locks)(log.run_dir / "locks").take("learner")


def test_modes_are_private(tmp_path: Path) -> None:
    """Directories 0700, files 0600."""
    with open_run(tmp_path / "run"):
        for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_the_cache_promises_nothing_and_keeps_what_it_got(tmp_path: Path) -> None:
    """A cached value is found again, another key is not."""
    with open_run(tmp_path / "run") as log:
        log.cache_put(b"key", b"value")
    with open_run(tmp_path / "run") as log:
        assert log.cache_get(b"key") == b"value"
        assert log.cache_get(b"other") is None


def test_a_journal_record_is_vouched_for_by_the_next(tmp_path: Path) -> None:
    """Its hash stands in the record after it; the newest has none yet, and a changed one is not vouched for."""
    with open_run(tmp_path / "run") as log:
        log.journal.append_sync([GoalSet(max_steps=1), GoalSet(max_steps=2)])
        assert [log.journal.is_linked(index) for index in range(3)] == [True, True, None]
        key = keys.journal_key(1)
        stored = log.journal._stored(1)
        link = codec.unpack(Table.JOURNAL, key, stored).body[: codec.CHAIN_SIZE]
        forged = codec.pack(Table.JOURNAL, key, link + codec.encode(GoalSet(max_steps=9)))
        with log._environment.write() as snapshot:
            snapshot.put([Change(Table.JOURNAL, key, forged)])
        assert [log.journal.is_linked(index) for index in range(3)] == [True, False, None]
        with pytest.raises(StoreError, match="no journal record at position 3"):
            log.journal.is_linked(3)
