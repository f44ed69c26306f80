"""Every kind of finding of `verify`, on logs that were made to contradict themselves with right checksums."""

import io
from collections.abc import Sequence
from pathlib import Path

import lmdb
import msgspec
import pytest

from core.errors import RolltapeError, StoreError
from core.events import (
    CheckpointSaved,
    ChosenLeaf,
    GoalSet,
    GroupEvent,
    JournalEvent,
    Outcome,
    PolicyPublished,
    StepCommitted,
    TurnSampled,
)
from core.events import GroupClosed as GroupClosedEvent
from store import codec, keys
from store.bundle import seal
from store.check_journal import _check_books
from store.findings import Finding, Report
from store.journal import pack_view
from store.keys import Table
from store.log import open_log
from store.ports import GroupFate, StreamWrite
from store.projections import apply
from store.rows import FATES, Counters, GroupEntry
from store.verify import verify
from store.verifying import check_log
from store.versions import VERSIONS_KEY
from store.views import Views
from tests.building import Script
from tests.store.faults import change, entries
from tests.store.making import CHOSEN, asked, chain, claim, closed, fill, open_run, plan, run_event

FIRST, OPEN = "000000.0", "000001.0"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return the file of a log with one closed and one open group."""
    with open_run(tmp_path / "run") as log:
        closed(log, 1)
        fill(log, claim(log))
    return tmp_path / "run" / "log" / "data.mdb"


def found(data: Path) -> list[Finding]:
    """Return what `verify` finds; the same is found without a child process."""
    run_dir = data.parent.parent
    there = verify(run_dir)
    stream = io.StringIO()
    check_log(data.parent, None, Report(stream))
    lines = [msgspec.json.decode(line) for line in stream.getvalue().splitlines()]
    here = [msgspec.convert(line["finding"], Finding) for line in lines if "finding" in line]
    assert here == there
    return there


def journal_of(data: Path) -> list[JournalEvent]:
    """Return the journal's events."""
    with open_log(data.parent.parent, readonly=True) as log:
        return [record.event for record in log.journal.read()]


def forge(data: Path, events: Sequence[JournalEvent], views: bool = True) -> None:
    """Write another journal with a right chain, and the views that follow from what can be folded of it."""
    rows: dict[bytes, bytes] = {}
    records: dict[bytes, bytes | None] = dict.fromkeys(key for key, _ in entries(data, Table.JOURNAL))
    link = codec.CHAIN_START
    for index, event in enumerate(events):
        key = keys.journal_key(index)
        value = codec.pack(Table.JOURNAL, key, link + codec.encode(event))
        records[key], link = value, codec.chain(key, value)
        fold(rows, index, event)
    change(data, Table.JOURNAL, records)
    if views:
        stored: dict[bytes, bytes | None] = dict.fromkeys(key for key, _ in entries(data, Table.VIEWS))
        change(data, Table.VIEWS, stored | {key: pack_view(key, body) for key, body in rows.items()})


def fold(rows: dict[bytes, bytes], index: int, event: JournalEvent) -> None:
    """Fold an event into rows, if it can be."""
    changed = Views(rows.get)
    try:
        apply(changed, index, event)
    except RolltapeError:
        return
    for key, body in changed.changes.items():
        rows.pop(key, None)
        if body is not None:
            rows[key] = body


def replaced(data: Path, table: Table, key: bytes, event: GroupEvent) -> None:
    """Put another event in a record's place, with a right checksum."""
    change(data, table, {key: codec.pack(table, key, codec.encode(event))})


def key_of(uid: str, tree: int, position: int) -> bytes:
    """Return a record's key."""
    return keys.group_key(keys.group_prefix(uid), tree, position)


def test_nothing_is_wrong_before(data: Path) -> None:
    """The log that the tests below change is good; a forged journal of the same events is good too."""
    assert found(data) == []
    forge(data, journal_of(data))
    assert found(data) == []


COMMITTED = StepCommitted(step=0, skipped=False, policy_version=0)
WRONG_JOURNALS: list[tuple[list[JournalEvent], str, str]] = [
    ([COMMITTED], "journal 1", "an impossible state: step 0 cannot be committed"),
    ([GoalSet(max_steps=1), run_event()], "journal 2", "an impossible state: `run` at journal position 2"),
    (
        [plan(0, []), StepCommitted(step=0, skipped=True, policy_version=3)],
        "journal 2",
        "step 0 was skipped, yet it names policy version 3",
    ),
    (
        [PolicyPublished(policy_version=2, weights_uri="w", step=0), plan(0, []), COMMITTED],
        "journal 3",
        "step 0 leads to version 0 < 2",
    ),
    (
        [PolicyPublished(policy_version=1, weights_uri="w", step=5)],
        "journal 1",
        "policy 1 of step 5, only 0 are made",
    ),
    ([CheckpointSaved(step=0, state_uri="", weights_uri="w")], "journal 1", "a checkpoint without a state"),
]


@pytest.mark.parametrize(("events", "where", "says"), WRONG_JOURNALS)
def test_a_journal_that_cannot_be(tmp_path: Path, events: list[JournalEvent], where: str, says: str) -> None:
    """Its chain is right, but what it says is impossible, or makes no sense."""
    open_run(tmp_path).close()
    data = tmp_path / "log" / "data.mdb"
    forge(data, [run_event(), *events])
    ((kind, key, message),) = [(each.kind, each.key, each.message) for each in found(data)]
    assert (kind, key) == ("journal", where)
    assert says in message


def test_a_journal_with_a_gap(data: Path) -> None:
    """The numbers of the missing records are named, and what does not follow without them."""
    change(data, Table.JOURNAL, {keys.journal_key(1): None})
    messages = [finding.message for finding in found(data)]
    assert "records 1 to 1 are missing" in messages
    assert any("group '000000.0' cannot be closed: this log has no such group" in text for text in messages)


def test_a_journal_record_that_is_no_event(data: Path) -> None:
    """Right checksum, right chain, no event."""
    last, value = list(entries(data, Table.JOURNAL))[-1]
    link = codec.unpack(Table.JOURNAL, last, value).body[: codec.CHAIN_SIZE]
    change(data, Table.JOURNAL, {last: codec.pack(Table.JOURNAL, last, link + b"\x80")})
    assert "not a journal event" in found(data)[0].message


def test_views_that_the_journal_does_not_say(data: Path) -> None:
    """A row that is missing, one that is changed, one too many."""
    key = keys.view_key(keys.STEP_VIEW, 9)
    first, _ = next(entries(data, Table.VIEWS))
    change(data, Table.VIEWS, {key: pack_view(key, b"\x90"), first: None})
    assert [(each.kind, each.message.split(":")[0]) for each in found(data)] == [
        ("view", "the row is missing or not what the journal says"),
        ("view", "the row has no ground in the journal"),
    ]


def test_tables_that_are_not_ours(data: Path) -> None:
    """Another program's table in the log's file is a finding; the log is readable all the same."""
    with lmdb.open(str(data.parent), map_size=1 << 28, max_dbs=8) as env:
        env.open_db(b"other")
    assert [each.kind for each in found(data)] == ["file"]
    assert "b'other'" in found(data)[0].message


def test_a_key_of_another_length(data: Path) -> None:
    """In a table whose keys have one length."""
    change(data, Table.CACHE, {b"short": codec.pack(Table.CACHE, b"short", b"")})
    assert [each.message for each in found(data)] == ["a key of 5 bytes, expected (32,)"]


@pytest.mark.parametrize("table", [Table.JOURNAL, Table.GROUPS, Table.BUNDLES])
def test_a_key_of_another_length_in_a_table_that_is_read_further(data: Path, table: Table) -> None:
    """It is named, and ends neither the program nor the search for more without a word."""
    key = keys.group_prefix(OPEN)[:5] if table is Table.JOURNAL else keys.group_prefix(OPEN) + b"x"
    change(data, table, {key: codec.pack(table, key, b"")})
    assert any("a key of" in each.message for each in found(data))


def test_the_highest_key_of_all(data: Path) -> None:
    """There is no group above it, and the check comes to an end all the same."""
    key = b"\xff" * 16
    replaced(data, Table.GROUPS, key, asked(OPEN))
    assert [each.key for each in found(data)] == [f"{2**64 - 1}.65535"]


def test_a_damaged_cache_entry(data: Path) -> None:
    """It is a finding of its own kind, and for the run as if it were not there."""
    with open_log(data.parent.parent, role="rollout") as log:
        log.cache_put(b"key", b"value")
    ((key, value),) = entries(data, Table.CACHE)
    change(data, Table.CACHE, {key: value[:-1] + bytes([value[-1] ^ 1])})
    assert [each.kind for each in found(data)] == ["cache"]
    with open_log(data.parent.parent) as log:
        assert log.cache_get(b"key") is None


def test_keys_out_of_order_in_a_page(data: Path) -> None:
    """Two keys of a page changed places: reading in order says so instead of skipping a record."""
    one, two = key_of(OPEN, 0, 0), key_of(OPEN, 2, 5)
    content = data.read_bytes()
    assert one in content
    assert two in content
    data.write_bytes(content.replace(one, b"?" * 16).replace(two, one).replace(b"?" * 16, two))
    messages = " ".join(each.message for each in found(data))
    assert "a page of table 'groups' is damaged" in messages
    assert "looking the key up does not find" in messages
    with open_log(data.parent.parent) as log, pytest.raises(RolltapeError, match="damaged"):
        log.groups.fetch(OPEN)


def test_a_count_that_is_wrong(data: Path) -> None:
    """A table's own count of its entries is compared with what reading gives."""
    content = bytearray(data.read_bytes())
    at = content.find(b"groups")
    while at >= 0:
        entries_at = at + len(b"groups") + 32
        if 0 < int.from_bytes(content[entries_at : entries_at + 8], "little") < 100:
            content[entries_at] ^= 1
        at = content.find(b"groups", at + 1)
    data.write_bytes(content)
    assert any("entries, reading it gives 13" in each.message for each in found(data))


def sealed_parts(data: Path) -> dict[bytes, bytes]:
    """Return the bodies of the closed group's bundle by key."""
    return {key: codec.unpack(Table.BUNDLES, key, value).body for key, value in entries(data, Table.BUNDLES)}


def test_a_bundle_in_parts_that_are_not_counted_through(data: Path) -> None:
    """The parts give the bundle, but one has another number."""
    (key, body), *_ = reversed(sealed_parts(data).items())
    moved = key[:-1] + b"\x09"
    change(data, Table.BUNDLES, {key: None, moved: codec.pack(Table.BUNDLES, moved, body)})
    parts = [*range(len(sealed_parts(data)) - 1), 9]
    assert [(each.key, each.message) for each in found(data)] == [(FIRST, f"its bundle has parts {parts}")]


def test_a_bundle_that_is_none(data: Path) -> None:
    """Right checksum, no bundle."""
    (key, _), *others = sealed_parts(data).items()
    change(data, Table.BUNDLES, dict.fromkeys(other for other, _ in others))
    change(data, Table.BUNDLES, {key: codec.pack(Table.BUNDLES, key, b"RTB1")})
    assert "not a bundle" in found(data)[0].message


def test_a_group_that_is_both_sealed_and_not(data: Path) -> None:
    """Its single records were to go when it was sealed."""
    replaced(data, Table.GROUPS, key_of(FIRST, 0, 0), asked(FIRST))
    assert [(each.key, each.message) for each in found(data)] == [
        (FIRST, "it has a bundle and single records too")
    ]


def test_an_open_group_that_is_sealed(data: Path) -> None:
    """Nothing could be appended to it any more."""
    with open_log(data.parent.parent) as log:
        blob = seal(log.groups.fetch_raw(OPEN))
    key = keys.bundle_key(keys.group_prefix(OPEN), 0)
    change(data, Table.BUNDLES, {key: codec.pack(Table.BUNDLES, key, blob)})
    change(data, Table.GROUPS, dict.fromkeys(key for key, _ in entries(data, Table.GROUPS)))
    assert [(each.key, each.message) for each in found(data)] == [(OPEN, "it is open, but sealed")]


def test_a_stream_with_a_gap(data: Path) -> None:
    """The missing position is named."""
    change(data, Table.GROUPS, {key_of(OPEN, 1, 2): None})
    assert "tree 1 has record 3 where 2 is expected" in [each.message for each in found(data)]


def wrong_records() -> list[tuple[int, int, GroupEvent, str]]:
    """Return what stands in a group and must not: tree, position, event, and what is said of it."""
    turn = chain(9)[0]
    assert isinstance(turn, TurnSampled)
    return [
        (1, 0, msgspec.structs.replace(turn, sampled_logprobs=b""), "expected 48, one logprob per token"),
        (1, 0, msgspec.structs.replace(turn, policy_version=5), "policy version 5, the group is pinned to 0"),
        (0, 0, asked(OPEN, version=3), "policy version 3, the group is pinned to 0"),
        (1, 3, msgspec.structs.replace(turn, node="0.0.7", parent="0.0.6"), "0.0.7"),
    ]


@pytest.mark.parametrize(("tree", "position", "event", "says"), wrong_records())
def test_a_record_that_must_not_be(
    data: Path, tree: int, position: int, event: GroupEvent, says: str
) -> None:
    """Refused when it is appended, or by the fold; found where it was written all the same."""
    replaced(data, Table.GROUPS, key_of(OPEN, tree, position), event)
    messages = [each.message for each in found(data) if each.key == OPEN]
    assert any(says in message for message in messages), messages


def test_a_record_that_is_no_event_of_a_group(data: Path) -> None:
    """Right checksum, no event."""
    key = key_of(OPEN, 1, 0)
    change(data, Table.GROUPS, {key: codec.pack(Table.GROUPS, key, codec.encode(GoalSet(max_steps=1)))})
    assert "not a group's event" in found(data)[0].message or "not a group" in found(data)[0].message


def test_a_reward_on_a_trajectory_that_is_void(tmp_path: Path) -> None:
    """What was not the policy's doing is never scored."""
    script = Script(0).turn("0.0.0", None, [1, 2])
    script.end("0.0.0", 1.0, outcome=Outcome.VOID_TOOL)
    with open_run(tmp_path) as log:
        group = claim(log)
        for tree, event in script.records:
            log.groups.append_sync(group, [StreamWrite(tree, None, [event])])
    messages = [each.message for each in found(tmp_path / "log" / "data.mdb")]
    assert messages == ["tree 1 node '0.0.0': scored although it has not ended, or ended void"]


def test_a_closing_that_says_other_than_the_records(data: Path) -> None:
    """Number, digest, tokens, searches and members are each compared."""

    def closing_as(**changes: object) -> list[str]:
        events = [
            msgspec.structs.replace(event, **changes) if isinstance(event, GroupClosedEvent) else event
            for event in good
        ]
        forge(data, events)
        return [each.message for each in found(data)]

    good = journal_of(data)
    assert closing_as() == []
    assert closing_as(records=12) == ["it was closed with 12 records and has 13"]
    (message,) = closing_as(digest="0" * 64)
    assert message.endswith(f"it was closed with {'0' * 64}")
    (message,) = closing_as(tokens_sampled=1)
    assert message == "tokens sampled and searches are (48, 2), it was closed with (1, 2)"
    (message,) = closing_as(chosen=(*CHOSEN, ChosenLeaf(tree=7, leaf="0.0.0")))
    assert "7" in message


def test_a_closed_group_without_records(tmp_path: Path) -> None:
    """It has no `group` record, so it cannot be folded."""
    with open_run(tmp_path) as log:
        log.groups.close_sync(claim(log), (), 1.0)
    assert [each.kind for each in found(tmp_path / "log" / "data.mdb")] == ["group"]


def test_a_record_of_a_later_schema_is_not_judged(data: Path) -> None:
    """Whether it is right, only a later release can say: an error that asks for an upgrade, not a finding."""
    key = key_of(OPEN, 1, 0)
    change(data, Table.GROUPS, {key: codec.pack(Table.GROUPS, key, codec.encode(chain(1)[0]), 99)})
    with pytest.raises(StoreError, match="upgrade rolltape"):
        verify(data.parent.parent)


def test_a_log_of_an_unknown_version_is_damaged_or_foreign(data: Path) -> None:
    """Without versions it is no log; with damaged ones it is a finding."""
    ((key, value),) = entries(data, Table.META)
    change(data, Table.META, {key: value[:-1] + bytes([value[-1] ^ 1])})
    assert [(each.kind, "checksum" in each.message) for each in verify(data.parent.parent)] == [
        ("file", True)
    ]
    change(data, Table.META, {key: codec.pack(Table.META, key, b"\x01")})
    assert [each.kind for each in verify(data.parent.parent)] == ["file"]
    assert key == VERSIONS_KEY


def entry(fate: GroupFate, *, final: bool = False) -> GroupEntry:
    """Return a group's row."""
    return GroupEntry(
        owner=1,
        worker="w",
        policy_version=0,
        weights_uri="",
        opened_at_step=0,
        opened_at=0.0,
        fate=FATES.index(fate),
        final=final,
    )


OPENED, ABORTED = entry(GroupFate.OPEN), entry(GroupFate.ABORTED)
ONE_OPEN = (1, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("counters", "groups", "says"),
    [
        (Counters(next_ticket=1, live_tickets=1, fates=ONE_OPEN), {(0, 0): OPENED}, None),
        (Counters(next_ticket=1, live_tickets=1), {(0, 0): OPENED}, "1 were opened, 0 have a fate"),
        (
            Counters(next_ticket=2, live_tickets=1, fates=ONE_OPEN),
            {(0, 0): OPENED},
            "1 of 2 tickets were opened",
        ),
        (
            Counters(next_ticket=1, live_tickets=1, fates=ONE_OPEN),
            {(0, 1): OPENED},
            "its attempts [1] do not follow each other",
        ),
        (
            Counters(next_ticket=1, live_tickets=1, fates=(2, 0, 0, 0, 0, 0)),
            {(0, 0): OPENED, (0, 1): OPENED},
            "its attempts [0, 1] do not follow each other",
        ),
        (
            Counters(next_ticket=1, live_tickets=0, fates=ONE_OPEN),
            {(0, 0): OPENED},
            "1 are live, the counters say 0",
        ),
        (
            Counters(next_ticket=1, live_tickets=0, fates=(0, 0, 0, 0, 0, 1)),
            {(0, 0): entry(GroupFate.ABORTED, final=True)},
            None,
        ),
        (Counters(next_ticket=1, live_tickets=1, fates=(0, 0, 0, 0, 0, 1)), {(0, 0): ABORTED}, None),
    ],
)
def test_books_that_do_not_balance(
    counters: Counters, groups: dict[tuple[int, int], GroupEntry], says: str | None
) -> None:
    """Nothing gets lost: fates, tickets, attempts and live tickets are each counted again.

    No journal gives such counters unless the fold itself is faulty, so the check is asked directly.
    """
    stream = io.StringIO()
    report = Report(stream)
    _check_books(counters, groups, report)
    assert report.count == (says is not None)
    assert (says or "") in stream.getvalue()


def test_what_kills_the_child_is_a_finding(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the child dies without a word, by a signal or by an error, the place that it looked at is named."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(site))
    for how, says in (
        ("os.kill(os.getpid(), 11)", "died of SIGSEGV"),
        ("os._exit(3)", "died of exit status 3"),
    ):
        at_start = f"import os, sys\nif sys.argv[0] == '-m':\n    {how}\n"
        (site / "sitecustomize.py").write_text(at_start)
        ((kind, key, message),) = [(each.kind, each.key, each.message) for each in verify(data.parent.parent)]
        assert (kind, key) == ("file", "opening the log")
        assert says in message


def test_a_child_with_much_to_say_is_heard_out(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much it writes to its standard error, `verify` comes to its end."""
    monkeypatch.setenv("PYTHONVERBOSE", "2")
    assert verify(data.parent.parent) == []
