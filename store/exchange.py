"""Owns how groups leave a log and enter another one: what is exported of each, and the entering of it.

An imported group keeps its uid, so its digest stays what it was; tickets and attempts that were not exported
are entered as given up, which keeps the books complete. Whatever fate a group had, it enters as closed, or as
dropped where it was dropped.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from core.errors import StoreError
from core.events import (
    ChosenLeaf,
    GroupAborted,
    GroupClosed,
    GroupDropped,
    GroupOpened,
    JournalEvent,
)
from core.ids import make_uid, parse_uid
from store import codec, keys
from store.groups import spent
from store.journal import encode_all, journal_changes
from store.keys import Table
from store.log import Log
from store.ports import GroupFate, GroupRow
from store.records import RawRecord
from store.sealing import Sealed, decode_records, part_changes, seal_group
from store.snapshot import Change, Snapshot
from store.writer import Job, Plan

IMPORTER = "import"
"""Stands for the worker of an imported group."""
NOT_IMPORTED = "not_imported"
"""Reason of a ticket or attempt that the export did not hold."""
ENDED_WELL = frozenset({GroupFate.CLOSED, GroupFate.PLANNED, GroupFate.TRAINED, GroupFate.DROPPED})
"""Fates of groups that are exported: complete ones, whatever became of them."""
MAX_GAP = 1 << 20
"""Tickets or attempts that may be missing between two groups: each costs two journal records."""


class Passport(msgspec.Struct, frozen=True, kw_only=True):
    """What an exported group has besides its records."""

    uid: str
    policy_version: int
    weights_uri: str
    opened_at_step: int
    chosen: tuple[ChosenLeaf, ...]
    dropped: str = ""
    """Why it was dropped, "" when it was not."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is to be entered."""

    passport: Passport
    records: tuple[RawRecord, ...]
    digest: str = ""
    """What its digest must be; "" when it was made anew."""


def passport_of(row: GroupRow) -> Passport:
    """Return the passport of a complete group."""
    return Passport(
        uid=row.uid,
        policy_version=row.policy_version,
        weights_uri=row.weights_uri,
        opened_at_step=row.opened_at_step,
        chosen=row.chosen,
        dropped=row.reason if row.fate is GroupFate.DROPPED else "",
    )


def complete_groups(log: Log) -> Iterator[GroupRow]:
    """Yield the rows of the groups that an export holds."""
    return (row for row in log.group_rows() if row.fate in ENDED_WELL)


def enter_groups(log: Log, arrivals: Iterable[Arrival]) -> int:
    """Enter groups, in ascending order of uid, into a log that has a run and no tickets; return how many.

    Raises StoreError when the log is not fresh, a digest is not what it must be, or the order is broken.
    """
    if log.state().next_ticket:
        raise StoreError(f"{str(log.run_dir)!r} has tickets already: import into a fresh log")
    count = 0
    expected = (0, 0)
    for arrival in arrivals:
        ticket, attempt = parse_uid(arrival.passport.uid)
        fillers = list(_fillers(expected, (ticket, attempt)))
        sealed = seal_group(arrival.records)
        if arrival.digest and arrival.digest != sealed.digest:
            raise StoreError(
                f"group {arrival.passport.uid} arrived with digest {sealed.digest}, expected {arrival.digest}"
            )
        job = _enter_job(arrival, sealed, [*fillers, *_events(arrival, sealed)])
        log.write_sync(job, sealed.size)
        expected = (ticket + 1, 0)
        count += 1
    return count


def _fillers(expected: tuple[int, int], here: tuple[int, int]) -> Iterator[JournalEvent]:
    """Yield what accounts for the tickets and attempts between two groups."""
    if here < expected:
        raise StoreError(f"group {make_uid(*here)} is out of order or given twice")
    if max(here[0] - expected[0], here[1]) > MAX_GAP:
        raise StoreError(f"group {make_uid(*here)} stands more than {MAX_GAP} after the one before it")
    for ticket in range(expected[0], here[0]):
        yield _opened(ticket, 0)
        yield GroupAborted(uid=make_uid(ticket, 0), reason=NOT_IMPORTED, final=True)
    for attempt in range(here[1]):
        yield _opened(here[0], attempt)
        yield GroupAborted(uid=make_uid(here[0], attempt), reason=NOT_IMPORTED)


def _opened(ticket: int, attempt: int, version: int = 0, uri: str = "", step: int = 0) -> GroupOpened:
    return GroupOpened(
        uid=make_uid(ticket, attempt),
        ticket=ticket,
        attempt=attempt,
        owner=1,
        worker=IMPORTER,
        policy_version=version,
        weights_uri=uri,
        committed_steps=step,
    )


def _events(arrival: Arrival, sealed: Sealed) -> Iterator[JournalEvent]:
    passport = arrival.passport
    sampled, searches = spent(decode_records(arrival.records))
    yield _opened(
        *parse_uid(passport.uid), passport.policy_version, passport.weights_uri, passport.opened_at_step
    )
    yield GroupClosed(
        uid=passport.uid,
        chosen=passport.chosen,
        records=len(arrival.records),
        digest=sealed.digest,
        tokens_sampled=sampled,
        search_calls=searches,
    )
    if passport.dropped:
        yield GroupDropped(uid=passport.uid, reason=passport.dropped)


def _enter_job(arrival: Arrival, sealed: Sealed, events: Sequence[JournalEvent]) -> Job[None]:
    prefix = keys.group_prefix(arrival.passport.uid)
    encoded = encode_all(events)

    def job(snapshot: Snapshot) -> Plan[None]:
        records = part_changes(prefix, sealed) if sealed.parts else _single(prefix, arrival.records)
        return Plan([*records, *journal_changes(snapshot, encoded)], None)

    return job


def _single(prefix: bytes, records: Sequence[RawRecord]) -> list[Change]:
    changes = []
    for tree, position, schema, raw in records:
        key = keys.group_key(prefix, tree, position)
        changes.append(Change(Table.GROUPS, key, codec.pack(Table.GROUPS, key, raw, schema)))
    return changes
