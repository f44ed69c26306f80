"""Owns the claim loop of one rollout process: how much it takes on, when it waits, and when it ends.

It claims while trajectories in flight are below the bound, waits for the journal (never in a busy loop)
while admission refuses, adopts what dead workers left, and ends at the goal or at a budget.
"""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from core.budget import exceeded
from core.closing import tree_count
from core.config import BudgetSettings
from core.errors import DataError
from core.events import Plan
from rollout.progress import Voice
from rollout.serving import Served, Server
from rollout.watching import Watch
from store.ports import Admission, Claim, Groups, NoClaim

LOOK_AGAIN = 2.0
"""Seconds after which a waiting worker asks anew: a worker's death leaves no record in the journal."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds without new claims after a group that failed, doubled for each further one in a row: a search or
an engine that is down must not use up the questions."""

TOO_LONG_IN_A_ROW = 100


class Ending(StrEnum):
    """Why a rollout process ended by itself."""

    GOAL = "goal"
    BUDGET = "budget"


class Bounds(NamedTuple):
    """How much a worker takes on, and until when."""

    admission: Admission
    concurrency: int
    """Trajectories in flight."""
    budget: BudgetSettings
    plan: Plan
    pause: float = FIRST_PAUSE
    check: Callable[[], None] = lambda: None
    """Raises when waiting is in vain, because the engine is gone."""


class Worker:
    """Claims groups under one worker's id until the goal or a budget is reached."""

    def __init__(
        self, name: str, groups: Groups, watch: Watch, server: Server, bounds: Bounds, voice: Voice
    ) -> None:
        self.name = name
        self._claims = groups
        self._watch = watch
        self._server = server
        self._bounds = bounds
        self._voice = voice
        self._open_groups = 0
        self._open_trees = 0
        self._failures = 0
        self._too_long = 0
        self._resting_until = 0.0

    def __repr__(self) -> str:
        return f"<Worker {self.name}: {self._open_groups} groups, {self._open_trees} trees in work>"

    async def run(self) -> Ending:
        """Work until the goal or a budget is reached.

        When cancelled, what is recorded stays, and the open groups wait to be adopted. Raises, in an
        ExceptionGroup, what ends a whole process: EngineDied, ServiceRefused, ToolError, RewardError, ...
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch.follow)
            ending = await self._claim_on(tasks)
            tasks.cancel_scope.cancel()
        return ending

    async def _claim_on(self, tasks: TaskGroup) -> Ending:
        """Claim groups, or wait for something to happen, until there is nothing left to do."""
        while True:
            seen = self._watch.ticks
            self._watch.catch_up()
            spent = exceeded(self._watch.spent, self._bounds.budget)
            rest = self._resting_until - time.monotonic()
            if spent:
                if not self._open_groups:
                    self._voice.say(f"no more groups are opened: {spent}")
                    return Ending.BUDGET
                await self._wait(seen, "the last groups", LOOK_AGAIN)
            elif rest > 0:
                await self._wait(seen, f"a rest after {self._failures} failed groups", rest)
            elif self._open_trees >= self._bounds.concurrency:
                await self._wait(seen, "", LOOK_AGAIN)
            else:
                claim = await self._claims.claim(self.name, self._bounds.admission, time.time())
                if isinstance(claim, Claim):
                    self._start(tasks, claim)
                elif claim is NoClaim.GOAL and not self._open_groups:
                    return Ending.GOAL
                else:
                    await self._hold(seen, claim)

    def _start(self, tasks: TaskGroup, claim: Claim) -> None:
        self._open_groups += 1
        self._open_trees += tree_count(self._bounds.plan)
        self._voice.progress.groups_adopted += claim.adopted
        tasks.start_soon(self._serve, claim)

    async def _hold(self, seen: int, claim: NoClaim) -> None:
        """Wait although there is room: for the learner, or at the goal for what is still in work."""
        if claim is NoClaim.GOAL and self._bounds.admission.max_tickets is None:
            self._server.run_ended = True
            self._watch.let_go()
        await self._wait(seen, "the learner" if claim is NoClaim.WAIT else "the last groups", LOOK_AGAIN)

    async def _wait(self, seen: int, why: str, seconds: float) -> None:
        self._voice.progress.waiting = why
        self._report()
        self._bounds.check()
        await self._watch.news(seen, seconds)
        self._voice.progress.waiting = ""

    async def _serve(self, claim: Claim) -> None:
        left = [tree_count(self._bounds.plan)]

        def tree_done() -> None:
            if left[0]:
                left[0] -= 1
                self._open_trees -= 1
                self._watch.wake()

        try:
            served, reason = await self._server.serve(claim, tree_done)
        finally:
            self._open_groups -= 1
            self._open_trees -= left[0]
        self._settle(claim, served, reason)
        self._watch.wake()

    def _settle(self, claim: Claim, served: Served, reason: str) -> None:
        """Count what became of a claim, and rest after failures."""
        progress = self._voice.progress
        progress.groups_closed += served is Served.CLOSED
        progress.groups_lost += served is Served.LOST
        if served in (Served.FAILED, Served.EXPIRED, Served.TOO_LONG):
            progress.groups_aborted += 1
            self._voice.say(f"group {claim.uid} was given up: {reason}")
        failed = served in (Served.FAILED, Served.EXPIRED)
        self._failures = self._failures + 1 if failed else 0
        if self._failures:
            pause = min(self._bounds.pause * 2.0 ** (self._failures - 1), LONGEST_PAUSE)
            self._resting_until = time.monotonic() + pause
        self._too_long = self._too_long + 1 if served is Served.TOO_LONG else 0
        if self._too_long >= TOO_LONG_IN_A_ROW:
            raise DataError(
                f"{self._too_long} questions in a row have prompts that leave no room to answer: raise "
                "rollout.max_trajectory_tokens, or use a shorter prompt template"
            )
        self._report()

    def _report(self) -> None:
        self._voice.progress.groups_open = self._open_groups
        self._voice.progress.trajectories_open = self._open_trees
        self._voice.notify(self._voice.progress)
