"""The rules that the journal must keep: an event that contradicts them is refused and changes nothing."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from core.errors import ConfigError, Conflict, FoldError, GroupClosed, StoreError
from core.events import (
    CheckpointSaved,
    Evaluated,
    GroupAborted,
    GroupAdopted,
    GroupDropped,
    GroupOpened,
    JournalEvent,
    PlanEvidence,
    PlannedGroup,
    PolicyPublished,
    Recovered,
    StepCommitted,
)
from core.events import (
    GroupClosed as GroupClosedEvent,
)
from store import journal, keys
from store import log as log_module
from store.journal import pack_view
from store.keys import Table
from store.log import Log
from store.ports import GroupFate, StreamWrite
from store.snapshot import Change
from store.verify import verify
from tests.store.children import until
from tests.store.making import (
    CHOSEN,
    busy_writer,
    chain,
    claim,
    closed,
    fill,
    open_run,
    plan,
    run_event,
    trained,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """Return a log with a trained step, a closed, a given-up, an aborted and an open group."""
    with open_run(tmp_path) as opened:
        trained(opened, 0)
        closed(opened, 1)
        opened.groups.abort_sync(claim(opened), "hopeless", 1.0, final=True)
        opened.groups.abort_sync(claim(opened), "late", 1.0)
        aborted = claim(opened)
        assert aborted.uid == "000004.1"
        opened.groups.abort_sync(aborted, "late", 1.0)
        fill(opened, claim(opened))
        yield opened


def opened(uid: str, ticket: int, attempt: int) -> GroupOpened:
    """Return the opening of a group."""
    return GroupOpened(
        uid=uid,
        ticket=ticket,
        attempt=attempt,
        owner=1,
        worker="w",
        policy_version=1,
        weights_uri="w1",
        committed_steps=1,
    )


TRAINED, CLOSED, GIVEN_UP, OPEN = "000000.0", "000002.0", "000003.0", "000004.2"
BAD: list[tuple[JournalEvent, type[StoreError], str]] = [
    (run_event(), Conflict, "only at 0: a log holds one run"),
    (opened("000009.0", 5, 0), Conflict, "uid '000009.0' is not ticket 5 attempt 0"),
    (opened("000006.0", 6, 0), Conflict, "expected ticket 5 attempt 0"),
    (opened("000002.0", 2, 0), Conflict, "cannot be opened"),
    (opened("000003.1", 3, 1), Conflict, "not given up"),
    (opened("000004.3", 4, 3), Conflict, "cannot be opened"),
    (GroupAdopted(uid=OPEN, owner=5, worker="w"), Conflict, "owner 5 of group '000004.2', expected 2"),
    (GroupAdopted(uid=CLOSED, owner=2, worker="w"), GroupClosed, "it is closed, expected open"),
    (GroupAborted(uid="000008.0", reason="r"), StoreError, "no such group"),
    (GroupAborted(uid=GIVEN_UP, reason="r"), GroupClosed, r"it is aborted \(hopeless\), expected open"),
    (GroupClosedEvent(uid=TRAINED, chosen=(), records=0, digest=""), GroupClosed, "it is trained"),
    (GroupDropped(uid=OPEN, reason="r"), GroupClosed, "it is open, expected closed"),
    (plan(0, []), Conflict, "the next step is 1"),
    (plan(1, [PlannedGroup(uid=OPEN, digest="")]), GroupClosed, "cannot be planned: it is open"),
    (plan(1, [PlannedGroup(uid=TRAINED, digest="")]), GroupClosed, "it is trained, expected closed"),
    (plan(1, [PlannedGroup(uid=CLOSED, digest="0")]), Conflict, "planned with digest '0', but it was closed"),
    (StepCommitted(step=1, skipped=False, policy_version=1), Conflict, "the planned step is None"),
    (StepCommitted(step=0, skipped=False, policy_version=1), Conflict, "step 0 cannot be committed"),
    (
        PolicyPublished(policy_version=1, weights_uri="x", step=1),
        Conflict,
        "versions only rise, the newest is 1",
    ),
    (CheckpointSaved(step=2, state_uri="s", weights_uri="w"), Conflict, "of step 2, but 1 are committed"),
]


@pytest.mark.parametrize(("event", "error", "says"), BAD)
def test_an_event_against_the_rules_is_refused(
    log: Log, event: JournalEvent, error: type[StoreError], says: str
) -> None:
    """Alone or after a good one: nothing of the request is written, and the log goes on."""
    before, rows = log.state(), list(log.group_rows())
    evaluated = Evaluated(
        weights_uri="w", policy_version=1, set_digest="d", settings={}, results=(), summary={}
    )
    for events in ([event], [evaluated, event]):
        with pytest.raises(error, match=says) as refused:
            log.journal.append_sync(events)
        assert type(refused.value) is error
    assert (log.state(), list(log.group_rows())) == (before, rows)
    log.journal.append_sync([evaluated])
    recovered = Recovered(restored_uri="s", restored_step=0, resent_steps=(), training_run="t")
    log.journal.append_sync([recovered])
    assert log.state() == msgspec.structs.replace(before, journal_length=before.journal_length + 2)


def test_a_group_that_is_planned_twice_is_refused(log: Log) -> None:
    """Within one plan too."""
    digest = log.group(CLOSED).digest
    with pytest.raises(GroupClosed, match="it is planned, expected closed"):
        log.journal.append_sync([plan(1, [PlannedGroup(uid=CLOSED, digest=digest)] * 2)])
    assert log.state().planned_step is None


def test_a_group_that_was_never_opened_is_named(log: Log) -> None:
    """By every use of its uid."""
    stranger = claim(log)._replace(uid="000777.0")
    uses: list[Callable[[], object]] = [
        lambda: log.group("000777.0"),
        lambda: log.groups.fetch("000777.0"),
        lambda: log.groups.append_sync(stranger, [StreamWrite(1, 0, chain(1))]),
        lambda: log.groups.close_sync(stranger, CHOSEN, 1.0),
        lambda: log.groups.abort_sync(stranger, "reason", 1.0),
        lambda: log.groups.take_over_sync("000777.0", "learner", 1.0),
    ]
    for use in uses:
        with pytest.raises(StoreError, match=r"no group '000777\.0'"):
            use()
    with pytest.raises(FoldError, match="not a uid"):
        log.groups.fetch("777")


def test_two_that_open_a_run_at_once_open_one(tmp_path: Path) -> None:
    """The second finds the first's run; with another configuration it hears so."""

    async def scene() -> None:
        with log_module.open_log(tmp_path, create=True, role="rollout", map_size=1 << 28) as log:
            async with busy_writer(log):
                opening = [
                    asyncio.create_task(asyncio.to_thread(log.open_run, run_event(digest)))
                    for digest in ("d" * 64, "d" * 64, "e" * 64)
                ]
                await asyncio.to_thread(until, lambda: log._writer._queue.qsize() == 3)
            outcomes = await asyncio.gather(*opening, return_exceptions=True)
            refused = [outcome for outcome in outcomes if outcome is not None]
            assert log.journal.length() == 1
            stored = log.run_event()
            assert stored is not None
            assert [type(each) for each in refused] == [ConfigError] * (1 if stored == run_event() else 2)

    asyncio.run(scene())


def test_a_ticket_whose_attempts_are_used_up_is_left(log: Log) -> None:
    """The last attempt that a key can name is not followed by another; the next ticket is opened instead."""
    first = claim(log)
    log.groups.abort_sync(first, "late", 1.0)
    row = keys.view_key(keys.REOPEN_VIEW, first.ticket)
    with log._environment.write() as snapshot:
        snapshot.put([Change(Table.VIEWS, row, pack_view(row, keys.MAX_ATTEMPT.to_bytes(2, "big")))])
    assert claim(log).ticket == first.ticket + 1


def test_two_writes_to_one_stream_in_one_request_follow_each_other(log: Log) -> None:
    """The second starts where the first ended."""
    group = claim(log)
    events = chain(1)
    log.groups.append_sync(group, [StreamWrite(1, 0, events[:2]), StreamWrite(1, None, events[2:])])
    assert [record.event for record in log.groups.fetch(group.uid).records] == list(events)


def test_what_is_long_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and journal records are read a bounded piece per snapshot, none twice and none left out."""
    monkeypatch.setattr(log_module, "ROWS_PER_SNAPSHOT", 3)
    monkeypatch.setattr(journal, "READ_RECORDS", 4)
    monkeypatch.setattr(journal, "READ_BYTES", 10_000)
    with open_run(tmp_path) as log:
        for number in range(8):
            group = claim(log)
            if number % 2:
                log.groups.abort_sync(group, "hopeless", 1.0, final=True)
        evidence = PlanEvidence(tokens=bytes(8_000))
        for _ in range(3):
            log.journal.append_sync([msgspec.structs.replace(plan(0, []), evidence=evidence)])
        uids = [f"{ticket:06d}.0" for ticket in range(8)]
        assert [row.uid for row in log.group_rows()] == uids
        assert [row.uid for row in log.group_rows(start_ticket=5)] == uids[5:]
        assert [row.uid for row in log.group_rows(GroupFate.ABORTED)] == uids[1::2]
        assert [row.uid for row in log.next_step_groups(2)] == uids[:4:2]
        assert [record.index for record in log.journal.read()] == list(range(log.journal.length()))
        assert [record.index for record in log.journal.read(2, 11)] == list(range(2, 11))
        assert list(log.journal.read(5, 5)) == []
    assert verify(tmp_path) == []
