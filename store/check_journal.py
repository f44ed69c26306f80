"""Owns the checks of the journal: positions, chain, rules, steps, policies, the books per ticket."""

from collections import defaultdict
from typing import NamedTuple

from core.errors import LogDamaged, RolltapeError
from core.events import CheckpointSaved, JournalEvent, PolicyPublished, StepCommitted
from core.events import GroupClosed as GroupClosedEvent
from store import codec, keys
from store.findings import Report
from store.journal import stored_event
from store.keys import Table
from store.ports import GroupFate
from store.projections import apply
from store.rows import FATES, Counters, GroupEntry
from store.snapshot import Snapshot
from store.views import Views, decode_group

KEY_SIZE = len(keys.journal_key(0))


class Books(NamedTuple):
    """What the journal says, for the checks that follow."""

    rows: dict[bytes, bytes]
    """The views' bodies."""
    groups: dict[tuple[int, int], GroupEntry]
    closings: dict[str, GroupClosedEvent]


def check_journal(snapshot: Snapshot, head: str | None, report: Report) -> Books:
    """Check the journal and return what it says."""
    rows: dict[bytes, bytes] = {}
    closings: dict[str, GroupClosedEvent] = {}
    expected, link, heads = 0, codec.CHAIN_START, {codec.CHAIN_START.hex()}
    report.at("journal")
    for key, value in snapshot.scan(Table.JOURNAL):
        if len(key) != KEY_SIZE:  # named with the other entries of its table
            continue
        index = keys.parse_journal_key(key)
        where = f"journal {index}"
        if index != expected:
            report.add("journal", where, f"records {expected} to {index - 1} are missing")
        try:
            schema, raw = stored_event(key, value)
            event = codec.decode_journal(raw, schema)
        except LogDamaged as exc:
            report.add("journal", where, str(exc))
        else:
            if index == expected and value[codec.HEAD_SIZE :][: codec.CHAIN_SIZE] != link:
                report.add("journal", where, "the chain is broken: it does not name the record before it")
            _check_event(rows, index, event, report)
            if isinstance(event, GroupClosedEvent):
                closings[event.uid] = event
        link, expected = codec.chain(key, value), index + 1
        heads.add(link.hex())
    if head is not None and head not in heads:
        report.add(
            "journal", f"head {head}", f"no record has this hash: the tail is lost, {expected} are left"
        )
    groups = {
        keys.parse_group_view(key): decode_group(body)
        for key, body in rows.items()
        if key.startswith(keys.GROUP_VIEW)
    }
    _check_books(Views(rows.get).counters(), groups, report)
    return Books(rows, groups, closings)


def _check_event(rows: dict[bytes, bytes], index: int, event: JournalEvent, report: Report) -> None:
    views = Views(rows.get)
    before = views.counters()
    try:
        apply(views, index, event)
    except RolltapeError as exc:
        report.add("journal", f"journal {index}", f"an impossible state: {exc}")
        return
    for row, body in views.changes.items():
        if body is None:
            rows.pop(row, None)
        else:
            rows[row] = body
    problem = _problem(before, event)
    if problem:
        report.add("journal", f"journal {index}", problem)


def _problem(before: Counters, event: JournalEvent) -> str:
    """Return what is wrong with an event that the fold accepts, or ""."""
    match event:
        case StepCommitted() if event.skipped and event.policy_version != before.policy_version:
            return f"step {event.step} was skipped, yet it names policy version {event.policy_version}"
        case StepCommitted() if event.policy_version < before.policy_version:
            return f"step {event.step} leads to version {event.policy_version} < {before.policy_version}"
        case PolicyPublished() if event.step > before.committed_steps + (before.planned_step is not None):
            return (
                f"policy {event.policy_version} of step {event.step}, only {before.committed_steps} are made"
            )
        case CheckpointSaved() if not event.state_uri:
            return "a checkpoint without a state"
        case _:
            return ""


def _check_books(counters: Counters, groups: dict[tuple[int, int], GroupEntry], report: Report) -> None:
    """Every group has one fate, every ticket at most one that is not an aborted attempt."""
    report.at("books")
    tickets: dict[int, list[tuple[int, GroupEntry]]] = defaultdict(list)
    for (ticket, attempt), entry in sorted(groups.items()):
        tickets[ticket].append((attempt, entry))
    if len(groups) != sum(counters.fates):
        report.add("books", "groups", f"{len(groups)} were opened, {sum(counters.fates)} have a fate")
    if sorted(tickets) != list(range(counters.next_ticket)):
        report.add("books", "tickets", f"{len(tickets)} of {counters.next_ticket} tickets were opened")
    aborted = FATES.index(GroupFate.ABORTED)
    gone = (aborted, FATES.index(GroupFate.DROPPED))
    live = 0
    for ticket, attempts in tickets.items():
        numbers = [attempt for attempt, _ in attempts]
        earlier = [entry for _, entry in attempts[:-1]]
        if numbers != list(range(len(numbers))) or any(entry.fate != aborted for entry in earlier):
            report.add("books", f"ticket {ticket}", f"its attempts {numbers} do not follow each other")
        last = attempts[-1][1]
        live += not (last.fate in gone and last.final)
    if live != counters.live_tickets:
        report.add("books", "tickets", f"{live} are live, the counters say {counters.live_tickets}")
