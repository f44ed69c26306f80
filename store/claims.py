"""Owns who gets which group: the decision inside the claiming transaction, and changes of owner."""

from collections.abc import Callable
from typing import NamedTuple

from core.errors import GroupClosed, OwnerLost, StoreError
from core.events import GroupAdopted, GroupOpened
from core.ids import make_uid, parse_uid
from store import codec, keys
from store.journal import encode_all, journal_changes, views_of
from store.keys import Table
from store.ports import Admission, Claim, NoClaim
from store.rows import FATES, Counters, OpenEntry
from store.snapshot import Snapshot
from store.views import Views, decode_open
from store.writer import Job, Plan


class Claimant(NamedTuple):
    """Who claims, and what of the outside world the decision may ask."""

    worker: str
    is_dead: Callable[[str], bool]
    """Of a worker's id; asked inside the transaction, so two claimants never both find the same answer."""
    orphans: set[str]
    """Groups that this worker was given by claims whose callers were cancelled before they heard of it."""


def claim_job(claimant: Claimant, admission: Admission, now: float) -> Job[Claim | NoClaim]:
    """Return the job that adopts a dead worker's group, re-opens a ticket, or opens the next one."""
    taken: list[str] = []

    def job(snapshot: Snapshot) -> Plan[Claim | NoClaim]:
        views = views_of(snapshot)
        counters = views.counters()
        claimant.orphans.update(taken)  # a transaction that failed hands nothing out
        taken.clear()
        if reached(counters):
            return Plan((), NoClaim.GOAL)
        for uid, entry in open_groups(snapshot):
            if entry.worker == claimant.worker and uid in claimant.orphans:
                claimant.orphans.discard(uid)
                taken.append(uid)
                return Plan((), to_claim(views, uid, entry.owner, adopted=True))
            if entry.worker != claimant.worker and claimant.is_dead(entry.worker):
                adopted = adopt(snapshot, views, uid, claimant.worker, now)
                return Plan(adopted.changes, adopted.result)
        ticket, attempt = next_ticket(snapshot, counters)
        if attempt == 0:
            refusal = admit(counters, admission)
            if refusal is not None:
                return Plan((), refusal)
        opened = _open(snapshot, counters, claimant.worker, ticket, attempt, now)
        return Plan(opened.changes, opened.result)

    return job


def reached(counters: Counters) -> bool:
    """Return whether the goal is reached."""
    return counters.max_steps is not None and counters.committed_steps >= counters.max_steps


def admit(counters: Counters, admission: Admission) -> NoClaim | None:
    """Return why no new ticket may be opened now, or None when one may."""
    if admission.max_tickets is not None and counters.next_ticket >= admission.max_tickets:
        return NoClaim.GOAL
    bound = (admission.max_staleness + counters.committed_steps + 1) * admission.groups_per_step
    if counters.max_steps is not None:
        bound = min(bound, counters.max_steps * admission.groups_per_step)
    return NoClaim.WAIT if counters.live_tickets >= bound else None


def open_groups(snapshot: Snapshot) -> list[tuple[str, OpenEntry]]:
    """Return the open groups with owner and worker, lowest ticket first."""
    found: list[tuple[str, OpenEntry]] = []
    for key, value in snapshot.scan(Table.VIEWS, keys.OPEN_VIEW, keys.after(keys.OPEN_VIEW)):
        entry = decode_open(codec.unpack(Table.VIEWS, key, value).body)
        found.append((make_uid(*keys.parse_group_view(key)), entry))
    return found


def next_ticket(snapshot: Snapshot, counters: Counters) -> tuple[int, int]:
    """Return ticket and attempt of the next group: an aborted ticket's next attempt, or a new ticket."""
    for key, value in snapshot.scan(Table.VIEWS, keys.REOPEN_VIEW, keys.after(keys.REOPEN_VIEW)):
        aborted = int.from_bytes(codec.unpack(Table.VIEWS, key, value).body, "big")
        if aborted < keys.MAX_ATTEMPT:
            return keys.parse_view_number(key), aborted + 1
    return counters.next_ticket, 0


def adopt(snapshot: Snapshot, views: Views, uid: str, worker: str, now: float) -> Plan[Claim]:
    """Return the plan by which `worker` owns an open group from now on."""
    entry = views.open_entry(uid)
    if entry is None:
        raise closed_error(views, uid)
    event = GroupAdopted(uid=uid, owner=entry.owner + 1, worker=worker, at=now)
    return Plan(
        journal_changes(snapshot, encode_all([event])), to_claim(views, uid, event.owner, adopted=True)
    )


def _open(
    snapshot: Snapshot, counters: Counters, worker: str, ticket: int, attempt: int, now: float
) -> Plan[Claim]:
    uid = make_uid(ticket, attempt)
    event = GroupOpened(
        uid=uid,
        ticket=ticket,
        attempt=attempt,
        owner=1,
        worker=worker,
        policy_version=counters.policy_version,
        weights_uri=counters.weights_uri,
        committed_steps=counters.committed_steps,
        at=now,
    )
    claim = Claim(uid, ticket, attempt, 1, counters.policy_version, counters.weights_uri, adopted=False)
    return Plan(journal_changes(snapshot, encode_all([event])), claim)


def to_claim(views: Views, uid: str, owner: int, *, adopted: bool) -> Claim:
    """Return the claim on an existing group."""
    group = views.group(uid)
    assert group is not None
    return Claim(uid, *parse_uid(uid), owner, group.policy_version, group.weights_uri, adopted)


def check_owner(views: Views, claim: Claim) -> None:
    """Raise OwnerLost or GroupClosed unless `claim` may still write its group."""
    entry = views.open_entry(claim.uid)
    if entry is not None and entry.owner == claim.owner:
        return
    group = views.group(claim.uid)
    if group is None:
        raise StoreError(f"this log has no group {claim.uid!r}")
    if group.owner != claim.owner:
        raise OwnerLost(
            f"group {claim.uid!r} belongs to worker {group.worker!r} now (owner {group.owner}, this one is "
            f"{claim.owner}): drop what is in flight and claim again"
        )
    raise closed_error(views, claim.uid)


def closed_error(views: Views, uid: str) -> StoreError:
    """Return the error for a write to a group that is not open."""
    group = views.group(uid)
    if group is None:
        return StoreError(f"this log has no group {uid!r}")
    reason = f" ({group.reason})" if group.reason else ""
    return GroupClosed(f"group {uid!r} is {FATES[group.fate].value}{reason}: nothing can be added to it")
