"""Owns the model of the two ports: dicts and lists that say what a log must do. The state machine's oracle.

It knows nothing of bytes, transactions or processes; who is dead is told to it.
"""

import copy
from collections.abc import Sequence
from typing import Self

from core.errors import Conflict, GroupClosed, OwnerLost
from core.events import (
    ChosenLeaf,
    GoalSet,
    GroupAborted,
    GroupAdopted,
    GroupDropped,
    GroupEvent,
    GroupOpened,
    JournalEvent,
    PolicyPublished,
    RunOpened,
    StepCommitted,
    StepPlanned,
)
from core.events import GroupClosed as GroupClosedEvent
from core.ids import make_uid, parse_uid
from store.ports import Admission, Claim, NoClaim, StreamWrite


class ModelGroup:
    """One group."""

    def __init__(self, opened: GroupOpened) -> None:
        self.owner = opened.owner
        self.worker = opened.worker
        self.version = opened.policy_version
        self.uri = opened.weights_uri
        self.fate = "open"
        self.final = False
        self.streams: dict[int, list[GroupEvent]] = {}


class ModelLog:
    """The run: a journal and groups. Times and digests are left out of what is compared."""

    def __init__(self, run: RunOpened) -> None:
        self.journal: list[JournalEvent] = [run]
        self.groups: dict[str, ModelGroup] = {}

    def copy(self) -> Self:
        """Return an independent copy."""
        return copy.deepcopy(self)

    @property
    def committed(self) -> int:
        """Committed steps."""
        return sum(isinstance(event, StepCommitted) for event in self.journal)

    @property
    def goal(self) -> int | None:
        """The newest goal."""
        goals = [event.max_steps for event in self.journal if isinstance(event, GoalSet)]
        return goals[-1] if goals else None

    @property
    def policy(self) -> tuple[int, str]:
        """The newest policy."""
        published = [event for event in self.journal if isinstance(event, PolicyPublished)]
        return (published[-1].policy_version, published[-1].weights_uri) if published else (0, "")

    @property
    def planned(self) -> StepPlanned | None:
        """The plan that is not committed."""
        plans = [event for event in self.journal if isinstance(event, StepPlanned)]
        return plans[-1] if plans and plans[-1].step == self.committed else None

    @property
    def latest(self) -> dict[int, str]:
        """Ticket -> its latest attempt."""
        return {parse_uid(uid).ticket: uid for uid in self.groups}

    @property
    def live(self) -> int:
        """Tickets not dropped and not given up."""
        ended = {"dropped", "aborted"}
        return sum(
            not (self.groups[uid].fate in ended and self.groups[uid].final) for uid in self.latest.values()
        )

    def fates(self) -> dict[str, str]:
        """Return every group's fate."""
        return {uid: group.fate for uid, group in self.groups.items()}

    def next_step_groups(self, count: int) -> list[str]:
        """Return the lowest tickets without a fate."""
        waiting = [
            uid
            for _, uid in sorted(self.latest.items())
            if self.groups[uid].fate in {"open", "closed"}
            or (self.groups[uid].fate == "aborted" and not self.groups[uid].final)
        ]
        return waiting[:count]

    def claim(self, worker: str, dead: set[str], admission: Admission) -> Claim | NoClaim:
        """Adopt, re-open or open."""
        if self.goal is not None and self.committed >= self.goal:
            return NoClaim.GOAL
        for uid in sorted(self.groups):
            if self.groups[uid].fate == "open" and self.groups[uid].worker in dead:
                return self.adopt(uid, worker)
        for ticket, uid in sorted(self.latest.items()):
            if self.groups[uid].fate == "aborted" and not self.groups[uid].final:
                return self.open(ticket, parse_uid(uid).attempt + 1, worker)
        bound = (admission.max_staleness + self.committed + 1) * admission.groups_per_step
        if self.goal is not None:
            bound = min(bound, self.goal * admission.groups_per_step)
        if self.live >= bound:
            return NoClaim.WAIT
        return self.open(len(self.latest), 0, worker)

    def open(self, ticket: int, attempt: int, worker: str) -> Claim:
        """Open a group."""
        version, uri = self.policy
        event = GroupOpened(
            uid=make_uid(ticket, attempt),
            ticket=ticket,
            attempt=attempt,
            owner=1,
            worker=worker,
            policy_version=version,
            weights_uri=uri,
            committed_steps=self.committed,
        )
        self.journal.append(event)
        self.groups[event.uid] = ModelGroup(event)
        return Claim(event.uid, ticket, attempt, 1, version, uri, adopted=False)

    def adopt(self, uid: str, worker: str) -> Claim:
        """Give an open group to another worker."""
        group = self.groups[uid]
        if group.fate != "open":
            raise GroupClosed
        group.owner, group.worker = group.owner + 1, worker
        self.journal.append(GroupAdopted(uid=uid, owner=group.owner, worker=worker))
        return Claim(uid, *parse_uid(uid), group.owner, group.version, group.uri, adopted=True)

    def _owned(self, claim: Claim) -> ModelGroup:
        group = self.groups[claim.uid]
        if group.owner != claim.owner:
            raise OwnerLost
        if group.fate != "open":
            raise GroupClosed
        return group

    def append(self, claim: Claim, writes: Sequence[StreamWrite]) -> None:
        """Append to streams, all or nothing."""
        streams = copy.deepcopy(self._owned(claim).streams)
        for tree, expect, events in writes:
            stream = streams.setdefault(tree, [])
            start = len(stream) if expect is None else expect
            if start > len(stream):
                raise Conflict
            if start == len(stream):
                stream.extend(events)
            elif stream[start : start + len(events)] != list(events):
                raise Conflict
        self.groups[claim.uid].streams = streams

    def close(self, claim: Claim, chosen: Sequence[ChosenLeaf]) -> None:
        """Complete a group."""
        group = self.groups[claim.uid]
        before = [
            event for event in self.journal if isinstance(event, GroupClosedEvent) and event.uid == claim.uid
        ]
        if before and group.owner == claim.owner and before[0].chosen == tuple(chosen):
            return
        group = self._owned(claim)
        group.fate = "closed"
        self.journal.append(
            GroupClosedEvent(
                uid=claim.uid,
                chosen=tuple(chosen),
                records=sum(map(len, group.streams.values())),
                digest="",
            )
        )

    def abort(self, claim: Claim, reason: str, *, final: bool) -> None:
        """Give a group up."""
        group = self.groups[claim.uid]
        before = [
            event for event in self.journal if isinstance(event, GroupAborted) and event.uid == claim.uid
        ]
        if before and group.owner == claim.owner and (before[0].reason, before[0].final) == (reason, final):
            return
        self._owned(claim)
        self._abort(GroupAborted(uid=claim.uid, reason=reason, final=final))

    def _abort(self, event: GroupAborted) -> None:
        self.groups[event.uid].fate, self.groups[event.uid].final = "aborted", event.final
        self.journal.append(event)

    def record(self, event: JournalEvent) -> None:
        """Append what the learner says."""
        match event:
            case GroupDropped():
                if self.groups[event.uid].fate != "closed":
                    raise GroupClosed
                self.groups[event.uid].fate, self.groups[event.uid].final = "dropped", True
                self.journal.append(event)
            case GroupAborted():
                if self.groups[event.uid].fate != "open":
                    raise GroupClosed
                self._abort(event)
            case StepPlanned():
                self._plan(event)
            case StepCommitted():
                if self.planned is None or self.planned.step != event.step:
                    raise Conflict
                for group in self.planned.groups:
                    self.groups[group.uid].fate = "trained"
                self.journal.append(event)
            case PolicyPublished():
                if event.policy_version <= self.policy[0]:
                    raise Conflict
                self.journal.append(event)
            case _:
                self.journal.append(event)

    def _plan(self, event: StepPlanned) -> None:
        if event.step != self.committed:
            raise Conflict
        if self.planned is not None:
            if self.planned != event:
                raise Conflict
        else:
            if any(self.groups[group.uid].fate != "closed" for group in event.groups):
                raise GroupClosed
            for group in event.groups:
                self.groups[group.uid].fate = "planned"
        self.journal.append(event)
