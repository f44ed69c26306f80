"""Owns the wait for a step's groups, and the books of those that leave it: old, late, or without signal."""

import sys
import time
from collections.abc import Sequence

from core.closing import Close, GiveUp, close_or_give_up
from core.errors import GroupClosed, OwnerLost
from core.events import GroupDropped
from learner.batch import Taken, fetch, fold_bundle, members_of
from learner.history import History
from learner.metrics import is_degenerate
from learner.selection import DEADLINE, NO_SIGNAL, STALE, Decision, Rule, decide
from learner.work import Work
from store.locks import LEARNER
from store.ports import GroupFate, GroupRow

TELL_SECONDS, TELL_AGAIN_SECONDS = 15.0, 300.0
"""How long a wait is normal, and how often a longer one is spoken of."""
EVERYTHING = sys.maxsize
UNSETTLED = frozenset({GroupFate.OPEN, GroupFate.CLOSED})
LOOK_SECONDS = 0.5
"""How often a waiting learner looks again even though the journal did not grow (deadlines, dead workers)."""


class Gatherer:
    """Waits for the lowest tickets of one step after another."""

    def __init__(self, work: Work, history: History, *, any_age: bool) -> None:
        learner = work.config.learner
        self._work = work
        self._history = history
        self._rule = Rule(
            learner.groups_per_step, None if any_age else learner.max_staleness, learner.group_deadline
        )
        self._since: dict[str, float] = {}
        self._quiet_until: float | None = None

    def __repr__(self) -> str:
        return f"<Gatherer waiting for {sorted(self._since)}>"

    def poll(self, step: int) -> list[Taken] | None:
        """Return the groups of step `step` if all are there, else settle what can be and return None.

        The caller waits for the journal to grow and calls again.
        """
        while True:
            rows = self._work.log.next_step_groups(self._rule.groups_per_step)
            decision = decide(rows, step, self._rule, self._waited(rows))
            if self._settle(decision):
                continue
            if not decision.ready:
                self._wait_for(decision.waiting, step)
                return None
            taken = fetch(self._work.log.groups, decision.ready)
            if not self._replace(taken):
                break
        self._since.clear()
        self._quiet_until = None
        return taken

    def _waited(self, rows: Sequence[GroupRow]) -> dict[str, float]:
        now = time.monotonic()
        living = {row.uid for row in rows if row.uid in self._since}
        return {uid: now - self._since[uid] for uid in living}

    def _wait_for(self, waiting: Sequence[GroupRow], step: int) -> None:
        """Start the clock of what is waited for; it runs only while the group's worker lives."""
        now = time.monotonic()
        alive = {row.uid for row in waiting if row.fate == GroupFate.OPEN and self._alive(row)}
        self._since = {uid: self._since.get(uid, now) for uid in alive}
        self._tell(waiting, step)

    def _tell(self, waiting: Sequence[GroupRow], step: int) -> None:
        """Say what the step waits for, when that takes long, and again only when it takes much longer."""
        now = time.monotonic()
        if self._quiet_until is None:
            self._quiet_until = now + TELL_SECONDS
        if now < self._quiet_until:
            return
        self._quiet_until = now + TELL_AGAIN_SECONDS
        names = ", ".join(row.uid for row in waiting[:4])
        more = f" and {len(waiting) - 4} more" if len(waiting) > 4 else ""
        working = "" if self._since else "; no worker that is alive has one, is `rollout` running?"
        what = f"groups {names}{more}" if waiting else "rollouts"
        self._work.hooks.notify(f"step {step} waits for {what}{working}")

    def _alive(self, row: GroupRow) -> bool:
        return not self._work.log.worker_is_dead(row.worker)

    def _settle(self, decision: Decision) -> bool:
        """Enter what is too old or too late in the books; tell whether anything was."""
        for row in decision.too_old:
            self._leave(row, STALE, final=False)
        for row in decision.late:
            self._finish_late(row)
        return bool(decision.too_old or decision.late)

    def _leave(self, row: GroupRow, reason: str, *, final: bool) -> None:
        """Drop a closed group, give an open one up; one that changed meanwhile is looked at again."""
        work, groups = self._work, self._work.log.groups
        try:
            if row.fate == GroupFate.CLOSED:
                dropped = GroupDropped(uid=row.uid, reason=reason, at=work.clock())
                work.log.journal.append_sync([dropped])
            else:
                claim = groups.take_over_sync(row.uid, LEARNER, work.clock())
                groups.abort_sync(claim, reason, work.clock(), final=final)
        except (GroupClosed, OwnerLost) as exc:
            work.hooks.notify(f"group {row.uid} changed meanwhile: {exc}")
            return
        work.hooks.notify(f"group {row.uid} leaves: {reason}")

    def _finish_late(self, row: GroupRow) -> None:
        """Take a late group over; close it with what has ended if that is enough, else give it up."""
        work, groups = self._work, self._work.log.groups
        try:
            claim = groups.take_over_sync(row.uid, LEARNER, work.clock())
            bundle = groups.fetch(row.uid)
            empty = GiveUp("nothing was asked yet")
            ending = close_or_give_up(fold_bundle(bundle), work.opened.seed) if bundle.records else empty
            if isinstance(ending, Close):
                groups.close_sync(claim, ending.chosen, work.clock())
                work.hooks.notify(f"group {row.uid} is closed late, with {len(ending.chosen)} members")
            else:
                groups.abort_sync(claim, f"{DEADLINE}: {ending.reason}", work.clock(), final=True)
                work.hooks.notify(f"group {row.uid} is given up: {DEADLINE}, {ending.reason}")
        except (GroupClosed, OwnerLost) as exc:
            work.hooks.notify(f"group {row.uid} changed meanwhile: {exc}")

    def _replace(self, taken: Sequence[Taken]) -> bool:
        """Drop groups without signal (dynamic sampling) within the step's bound; tell whether any."""
        learner = self._work.config.learner
        if not learner.dynamic_sampling:
            return False
        self._history.catch_up(self._work.log.journal)
        left = learner.max_replaced - self._history.replaced
        blank = [one.group.uid for one in taken if is_degenerate(members_of(one))][: max(left, 0)]
        if blank:
            now = self._work.clock()
            self._work.log.journal.append_sync(
                [GroupDropped(uid=uid, reason=NO_SIGNAL, at=now) for uid in blank]
            )
            self._work.hooks.notify(f"{len(blank)} groups without signal are replaced")
        return bool(blank)

    def clear(self, reason: str, *, final: bool, below: int | None = None) -> None:
        """Give every open or closed group that waits a fate; `final` gives up the tickets of open ones too.

        With `below`, only groups that are sampled from an older policy version.
        """
        while True:
            left = [
                row
                for row in self._work.log.next_step_groups(EVERYTHING)
                if row.fate in UNSETTLED and (below is None or row.policy_version < below)
            ]
            if not left:
                return
            for row in left:
                self._leave(row, reason, final=final)
