"""Owns the views: a pure fold of the journal into rows, and the rules that a journal must keep.

`apply` is called for every journal event, in the transaction that appends it, and raises before anything is
written when the event contradicts the rows. Rebuilding folds the same journal into identical bytes.
"""

from typing import assert_never

import msgspec

from core.errors import Conflict, GroupClosed, StoreError
from core.events import (
    CheckpointSaved,
    Evaluated,
    GoalSet,
    GroupAborted,
    GroupAdopted,
    GroupDropped,
    GroupOpened,
    JournalEvent,
    PolicyPublished,
    Recovered,
    RunOpened,
    StepCommitted,
    StepPlanned,
)
from core.events import GroupClosed as GroupClosedEvent
from core.ids import make_uid, parse_uid
from store import keys
from store.ports import GroupFate
from store.rows import FATES, Counters, GroupEntry, PolicyEntry, StepEntry, plan_mark
from store.views import Views

PROJECTION_VERSION = 1
"""Raised whenever the rows' bytes change; a log with older rows is rebuilt when it is opened for writing."""


def apply(views: Views, index: int, event: JournalEvent) -> None:
    """Fold the event at journal position `index`; raises Conflict, GroupClosed or StoreError on a bad one."""
    match event:
        case RunOpened():
            _run_opened(views, index, event)
        case _ if index == 0:
            raise StoreError("the run has not been opened: journal record 0 must be `run`, call open_run")
        case GroupOpened() | GroupAdopted() | GroupClosedEvent() | GroupAborted() | GroupDropped():
            _apply_group(views, event)
        case GoalSet(max_steps=max_steps):
            views.set_counters(msgspec.structs.replace(views.counters(), max_steps=max_steps))
        case Recovered() | Evaluated():
            pass
        case StepPlanned() | StepCommitted() | PolicyPublished() | CheckpointSaved():
            _apply_step(views, index, event)
        case _:
            assert_never(event)
    views.set_counters(msgspec.structs.replace(views.counters(), journal_length=index + 1))


def _apply_group(
    views: Views, event: GroupOpened | GroupAdopted | GroupClosedEvent | GroupAborted | GroupDropped
) -> None:
    if isinstance(event, GroupOpened):
        _group_opened(views, event)
    elif isinstance(event, GroupAdopted):
        _group_adopted(views, event)
    else:
        _group_ended(views, event)


def _apply_step(
    views: Views, index: int, event: StepPlanned | StepCommitted | PolicyPublished | CheckpointSaved
) -> None:
    if isinstance(event, StepPlanned):
        _step_planned(views, index, event)
    elif isinstance(event, StepCommitted):
        _step_committed(views, index, event)
    elif isinstance(event, PolicyPublished):
        _policy_published(views, index, event)
    else:
        _checkpoint_saved(views, index, event)


def _run_opened(views: Views, index: int, event: RunOpened) -> None:
    if index != 0:
        raise Conflict(f"`run` at journal position {index}, expected only at 0: a log holds one run")
    views.set_counters(Counters(weights_uri=event.weights_uri))
    views.set_policy(0, PolicyEntry(event.weights_uri, 0, 0))


def _group_opened(views: Views, event: GroupOpened) -> None:
    counters, ticket = views.counters(), event.ticket
    if event.uid != make_uid(ticket, event.attempt):
        raise Conflict(f"uid {event.uid!r} is not ticket {ticket} attempt {event.attempt}")
    if event.attempt == 0 and ticket == counters.next_ticket:
        counters = msgspec.structs.replace(
            counters, next_ticket=ticket + 1, live_tickets=counters.live_tickets + 1
        )
    elif event.attempt == 0 or views.reopen(ticket) != event.attempt - 1:
        raise Conflict(
            f"group {event.uid!r} cannot be opened: expected ticket {counters.next_ticket} attempt 0, or the "
            "attempt after one that was aborted and not given up"
        )
    views.set_counters(_count(counters, None, GroupFate.OPEN))
    views.set_attempt(keys.REOPEN_VIEW, ticket, None)
    views.set_attempt(keys.PENDING_VIEW, ticket, event.attempt)
    views.set_group(
        event.uid,
        GroupEntry(
            owner=event.owner,
            worker=event.worker,
            policy_version=event.policy_version,
            weights_uri=event.weights_uri,
            opened_at_step=event.committed_steps,
            opened_at=event.at,
        ),
    )


def _known_group(views: Views, uid: str, *, fates: tuple[GroupFate, ...], verb: str) -> GroupEntry:
    entry = views.group(uid)
    if entry is None:
        raise StoreError(f"group {uid!r} cannot be {verb}: this log has no such group")
    if FATES[entry.fate] not in fates:
        wanted = " or ".join(fate.value for fate in fates)
        reason = f" ({entry.reason})" if entry.reason else ""
        raise GroupClosed(
            f"group {uid!r} cannot be {verb}: it is {FATES[entry.fate].value}{reason}, expected {wanted}"
        )
    return entry


def _group_adopted(views: Views, event: GroupAdopted) -> None:
    entry = _known_group(views, event.uid, fates=(GroupFate.OPEN,), verb="adopted")
    if event.owner != entry.owner + 1:
        raise Conflict(f"owner {event.owner} of group {event.uid!r}, expected {entry.owner + 1}")
    views.set_group(event.uid, msgspec.structs.replace(entry, owner=event.owner, worker=event.worker))


def _group_ended(views: Views, event: GroupClosedEvent | GroupAborted | GroupDropped) -> None:
    ticket, attempt = parse_uid(event.uid)
    counters = views.counters()
    match event:
        case GroupClosedEvent():
            entry = _known_group(views, event.uid, fates=(GroupFate.OPEN,), verb="closed")
            fate = GroupFate.CLOSED
            chosen = tuple((leaf.tree, leaf.leaf) for leaf in event.chosen)
            ended = msgspec.structs.replace(entry, records=event.records, digest=event.digest, chosen=chosen)
        case GroupAborted():
            entry = _known_group(views, event.uid, fates=(GroupFate.OPEN,), verb="aborted")
            fate = GroupFate.ABORTED
            ended = msgspec.structs.replace(
                entry, records=event.records, reason=event.reason, final=event.final
            )
        case _:
            entry = _known_group(views, event.uid, fates=(GroupFate.CLOSED,), verb="dropped")
            fate = GroupFate.DROPPED
            ended = msgspec.structs.replace(entry, reason=event.reason, final=True)
    if fate is GroupFate.ABORTED and not ended.final:
        views.set_attempt(keys.REOPEN_VIEW, ticket, attempt)
    elif fate is not GroupFate.CLOSED:
        views.set_attempt(keys.PENDING_VIEW, ticket, None)
        counters = msgspec.structs.replace(counters, live_tickets=counters.live_tickets - 1)
    views.set_counters(_count(counters, FATES[entry.fate], fate))
    views.set_group(event.uid, msgspec.structs.replace(ended, fate=FATES.index(fate)))


def _step_planned(views: Views, index: int, event: StepPlanned) -> None:
    counters, mark = views.counters(), plan_mark(event)
    if event.step != counters.committed_steps:
        raise Conflict(f"step {event.step} cannot be planned: the next step is {counters.committed_steps}")
    if counters.planned_step is not None:
        earlier = views.step(event.step)
        if earlier is None or earlier.mark != mark:
            raise Conflict(
                f"step {event.step} is planned already, with other content: an uncommitted plan is sent "
                "again as it stands, never replaced"
            )
        return
    for planned in event.groups:
        entry = _known_group(views, planned.uid, fates=(GroupFate.CLOSED,), verb="planned")
        if entry.digest != planned.digest:
            raise Conflict(
                f"group {planned.uid!r} is planned with digest {planned.digest!r}, "
                f"but it was closed with {entry.digest!r}"
            )
        views.set_attempt(keys.PENDING_VIEW, parse_uid(planned.uid).ticket, None)
        views.set_group(
            planned.uid,
            msgspec.structs.replace(entry, fate=FATES.index(GroupFate.PLANNED), step=event.step),
        )
        counters = _count(counters, GroupFate.CLOSED, GroupFate.PLANNED)
    views.set_counters(msgspec.structs.replace(counters, planned_step=event.step))
    uids = tuple(planned.uid for planned in event.groups)
    views.set_step(event.step, StepEntry(planned_index=index, mark=mark, groups=uids))


def _step_committed(views: Views, index: int, event: StepCommitted) -> None:
    counters, entry = views.counters(), views.step(event.step)
    if counters.planned_step != event.step or entry is None:
        raise Conflict(f"step {event.step} cannot be committed: the planned step is {counters.planned_step}")
    for uid in entry.groups:
        group = _known_group(views, uid, fates=(GroupFate.PLANNED,), verb="trained")
        views.set_group(uid, msgspec.structs.replace(group, fate=FATES.index(GroupFate.TRAINED)))
        counters = _count(counters, GroupFate.PLANNED, GroupFate.TRAINED)
    views.set_counters(msgspec.structs.replace(counters, planned_step=None, committed_steps=event.step + 1))
    views.set_step(
        event.step,
        msgspec.structs.replace(
            entry, committed_index=index, skipped=event.skipped, policy_version=event.policy_version
        ),
    )


def _policy_published(views: Views, index: int, event: PolicyPublished) -> None:
    counters = views.counters()
    if event.policy_version <= counters.policy_version:
        raise Conflict(
            f"policy version {event.policy_version} cannot be published: versions only rise, "
            f"the newest is {counters.policy_version}"
        )
    views.set_counters(
        msgspec.structs.replace(counters, policy_version=event.policy_version, weights_uri=event.weights_uri)
    )
    views.set_policy(event.policy_version, PolicyEntry(event.weights_uri, event.step, index))


def _checkpoint_saved(views: Views, index: int, event: CheckpointSaved) -> None:
    counters = views.counters()
    if event.step > counters.committed_steps:
        raise Conflict(f"a checkpoint of step {event.step}, but {counters.committed_steps} are committed")
    views.set_counters(msgspec.structs.replace(counters, checkpoint_index=index))


def _count(counters: Counters, before: GroupFate | None, now: GroupFate) -> Counters:
    fates = list(counters.fates)
    if before is not None:
        fates[FATES.index(before)] -= 1
    fates[FATES.index(now)] += 1
    return msgspec.structs.replace(counters, fates=tuple(fates))
