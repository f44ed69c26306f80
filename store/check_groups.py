"""Owns the checks of groups: streams, digests, bundles, events, the fold, members."""

from collections.abc import Iterator, Sequence

from core.errors import FoldError, LogDamaged
from core.events import GroupAsked, TurnSampled
from core.ids import make_uid
from core.tree import fold_group, members
from store import keys
from store.check_journal import Books
from store.checking import problem_of
from store.findings import Report
from store.groups import spent
from store.keys import Table
from store.ports import GroupFate, GroupRecord
from store.records import RawRecord, group_digest
from store.rows import FATES, GroupEntry
from store.sealing import decode_records, load
from store.snapshot import Snapshot

SEALED_FATES = frozenset({GroupFate.CLOSED, GroupFate.PLANNED, GroupFate.TRAINED, GroupFate.DROPPED})


def check_groups(snapshot: Snapshot, books: Books, report: Report) -> None:
    """Check every group that the journal knows, and that there are no records of others."""
    for (ticket, attempt), entry in sorted(books.groups.items()):
        uid = make_uid(ticket, attempt)
        report.at(f"group {uid}")
        for problem in _problems(snapshot, books, uid, entry):
            report.add("group", uid, problem)
    report.at("records of unknown groups")
    for table in (Table.GROUPS, Table.BUNDLES):
        for prefix in _prefixes(snapshot, table):
            ticket, attempt = int.from_bytes(prefix[:8], "big"), int.from_bytes(prefix[8:], "big")
            if (ticket, attempt) not in books.groups:
                report.add(
                    "group", make_uid(ticket, attempt), "it has records, but the journal never opened it"
                )


def _prefixes(snapshot: Snapshot, table: Table) -> Iterator[bytes]:
    """Yield the key prefixes of the groups that have entries in a table."""
    start = b""
    while (found := snapshot.first(table, start)) is not None:
        yield found[0][:10]
        start = keys.after(found[0][:10])


def _problems(snapshot: Snapshot, books: Books, uid: str, entry: GroupEntry) -> Iterator[str]:
    prefix = keys.group_prefix(uid)
    stop = keys.after(prefix)
    try:
        raw = load(snapshot, prefix).records()
        records = decode_records(raw)
        parts = [keys.parse_bundle_key(key)[2] for key in snapshot.keys(Table.BUNDLES, prefix, stop)]
    except LogDamaged as exc:
        yield str(exc)
        return
    if parts != list(range(len(parts))):
        yield f"its bundle has parts {parts}"
    if parts and snapshot.keys(Table.GROUPS, prefix, stop):
        yield "it has a bundle and single records too"
    fate = FATES[entry.fate]
    if parts and fate is GroupFate.OPEN:
        yield "it is open, but sealed"
    yield from _stream_problems(raw)
    yield from _event_problems(uid, entry, records)
    yield from _fold_problems(entry, fate, records)
    if fate in SEALED_FATES:
        yield from _closing_problems(books, uid, raw, records)


def _stream_problems(raw: Sequence[RawRecord]) -> Iterator[str]:
    expected: dict[int, int] = {}
    for tree, position, _, _ in raw:
        if position != expected.get(tree, 0):
            yield f"tree {tree} has record {position} where {expected.get(tree, 0)} is expected"
        expected[tree] = position + 1


def _event_problems(uid: str, entry: GroupEntry, records: Sequence[GroupRecord]) -> Iterator[str]:
    for tree, position, event, _ in records:
        problem = problem_of(uid, tree, event)
        if problem:
            yield f"tree {tree}, record {position}: {problem}"
        if isinstance(event, GroupAsked | TurnSampled) and event.policy_version != entry.policy_version:
            yield (
                f"tree {tree}, record {position}: policy version {event.policy_version}, "
                f"the group is pinned to {entry.policy_version}"
            )


def _fold_problems(entry: GroupEntry, fate: GroupFate, records: Sequence[GroupRecord]) -> Iterator[str]:
    if not records and fate not in SEALED_FATES:
        return
    try:
        group = fold_group((record.tree, record.event) for record in records)
        members(group, entry.leaves())
    except FoldError as exc:
        yield str(exc)


def _closing_problems(
    books: Books, uid: str, raw: Sequence[RawRecord], records: Sequence[GroupRecord]
) -> Iterator[str]:
    closing = books.closings[uid]
    if closing.records != len(raw):
        yield f"it was closed with {closing.records} records and has {len(raw)}"
    digest = group_digest(raw)
    if closing.digest != digest:
        yield f"its digest is {digest}, it was closed with {closing.digest}"
    sampled = spent(records)
    if (closing.tokens_sampled, closing.search_calls) != sampled:
        yield (
            f"tokens sampled and searches are {sampled}, "
            f"it was closed with {(closing.tokens_sampled, closing.search_calls)}"
        )
