"""Owns one claimed group from its claim to its place in the books.

It is closed with its members, aborted with a reason, or let go of because somebody else took it over or
ended it. A group that is interrupted stays open, for adoption.
"""

import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple

import anyio.to_thread

from core.arrays import view_tokens
from core.closing import Close, close_or_give_up
from core.errors import GroupClosed, OwnerLost, WeightsGone
from core.events import GroupAsked, Plan, SamplingParams
from rollout.acting import GroupFailed
from rollout.chat import Chat
from rollout.data import Example
from rollout.growing import Gardener
from rollout.live import LiveGroup
from rollout.plan import ask
from rollout.tickets import Tickets
from rollout.watching import Watch
from store.ports import Claim, Groups, StreamWrite

ATTEMPTS = 3
"""How often a ticket that comes to nothing is tried before it is given up."""

WEIGHTS_EXPIRED = "weights_expired"
PROMPT_TOO_LONG = "prompt_too_long"
RUN_ENDED = "run_ended"


class Served(StrEnum):
    """What became of a claim."""

    CLOSED = "closed"
    FAILED = "failed"
    """Given up: void trajectories, or an engine that answered no more."""
    EXPIRED = "expired"
    TOO_LONG = "too_long"
    LOST = "lost"
    """To another owner, or ended by one."""


class Questions(NamedTuple):
    """What is asked, and how."""

    examples: Sequence[Example]
    tickets: Tickets
    chat: Chat
    plan: Plan
    params: SamplingParams

    def ask(self, claim: Claim, now: float) -> GroupAsked:
        """Return the first record of a claimed group."""
        example = self.examples[self.tickets.position(claim.ticket)]
        return ask(self.chat, self.plan, self.params, claim, example, now)


class Server:
    """Serves the claims of one worker."""

    def __init__(
        self,
        groups: Groups,
        watch: Watch,
        gardener: Gardener,
        questions: Questions,
        *,
        reference: str = "",
    ) -> None:
        self._groups = groups
        self._watch = watch
        self._gardener = gardener
        self._questions = questions
        self._reference = reference
        """The base model's id when its logprobs are wanted."""
        self.run_ended = False
        """Set at the goal: what is still open is then given up, for nobody will train it."""

    async def serve(self, claim: Claim, tree_done: Callable[[], None]) -> tuple[Served, str]:
        """Bring a claimed group to its end; return what became of it, and why.

        Raises, in an ExceptionGroup, what concerns more than this group.
        """
        served, reason = Served.LOST, ""
        try:
            served, reason = await self._grow_and_close(claim, tree_done)
        except* (OwnerLost, GroupClosed):
            pass
        except* WeightsGone as gone:
            served, reason = Served.EXPIRED, f"{WEIGHTS_EXPIRED}: {first(gone)}"
        except* GroupFailed as failed:
            served, reason = Served.FAILED, str(first(failed))
        if served in (Served.EXPIRED, Served.FAILED, Served.TOO_LONG):
            served = await self._abort(claim, reason, served)
        elif served is Served.LOST and self.run_ended:
            served = await self._abort(claim, RUN_ENDED, served, final=True)
        return served, reason

    async def _grow_and_close(self, claim: Claim, tree_done: Callable[[], None]) -> tuple[Served, str]:
        live = await self._open(claim)
        asked = live.group.asked
        if len(view_tokens(asked.prompt)) >= asked.params.max_trajectory_tokens:
            return Served.TOO_LONG, PROMPT_TOO_LONG
        with self._watch.guard(claim) as scope:
            await self._gardener.grow(live, tree_done, reference=self._reference)
        if scope.cancelled_caught:
            return Served.LOST, ""
        ending = close_or_give_up(live.group, self._gardener.run_seed)
        if not isinstance(ending, Close):
            return Served.FAILED, ending.reason
        await self._groups.close(claim, ending.chosen, time.time())
        return Served.CLOSED, ""

    async def _open(self, claim: Claim) -> LiveGroup:
        async def write(writes: Sequence[StreamWrite]) -> None:
            await self._groups.append(claim, writes)

        if claim.adopted:
            bundle = await anyio.to_thread.run_sync(self._groups.fetch, claim.uid)
            if bundle.records:
                return LiveGroup.adopt([(record.tree, record.event) for record in bundle.records], write)
        return await LiveGroup.open(self._questions.ask(claim, time.time()), write)

    async def _abort(self, claim: Claim, reason: str, served: Served, *, final: bool = False) -> Served:
        tried_enough = served is Served.FAILED and claim.attempt + 1 >= ATTEMPTS
        final = final or tried_enough or served is Served.TOO_LONG
        try:
            await self._groups.abort(claim, reason, time.time(), final=final)
        except (OwnerLost, GroupClosed):
            return Served.LOST
        return served


def first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first plain exception inside nested groups."""
    inner = group.exceptions[0]
    return first(inner) if isinstance(inner, BaseExceptionGroup) else inner
