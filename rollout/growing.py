"""Owns the growing of one group: every tree and branch on its own, bounded, with no barrier between turns.

What goes on is decided from the recorded nodes each time, so a group that was left anywhere goes on there.
"""

from collections.abc import Callable

import anyio

from core.events import NodesChosen
from rollout.acting import Actor
from rollout.live import LiveGroup
from rollout.references import missing_references, reference_events
from rollout.trees import Place, Policy, Request, continuation, first_request, next_in_tree
from rollout.turns import Continue, Rules, next_action


class Gardener:
    """Grows groups until nothing is left to do in them."""

    def __init__(self, actor: Actor, rules: Rules, policy: Policy, slots: anyio.CapacityLimiter) -> None:
        self._actor = actor
        self._rules = rules
        self._policy = policy
        self._slots = slots

    @property
    def run_seed(self) -> int:
        """The seed under which choices are made."""
        return self._policy.run_seed

    async def grow(self, live: LiveGroup, tree_done: Callable[[], None], *, reference: str = "") -> None:
        """Let every trajectory of the group end; with `reference`, the base model's id, add its logprobs.

        A trajectory in flight holds one slot from its turn to its end. Raises what the actor raises, in an
        ExceptionGroup; what was recorded until then stays.
        """
        if not live.group.trees:
            async with self._slots:
                await self._actor.ask(live, first_request(live.group.asked))
        async with anyio.create_task_group() as trees:
            for tree in live.group.trees:
                trees.start_soon(self._grow_tree, live, tree, tree_done, reference)

    async def _grow_tree(
        self, live: LiveGroup, tree: int, tree_done: Callable[[], None], reference: str
    ) -> None:
        while (step := next_in_tree(self._policy, live.group, tree)) is not None:
            if isinstance(step, NodesChosen):
                await live.append({tree: [step]})
                continue
            async with anyio.create_task_group() as branches:
                for tip in step.tips:
                    branches.start_soon(self._advance, live, Place(tree, tip))
                for request in step.requests:
                    branches.start_soon(self._branch_out, live, request)
        if reference:
            await self._refer(live, tree, reference)
        tree_done()

    async def _branch_out(self, live: LiveGroup, request: Request) -> None:
        async with self._slots:
            places = await self._actor.ask(live, request)
        async with anyio.create_task_group() as branches:
            for place in places:
                branches.start_soon(self._advance, live, place)

    async def _advance(self, live: LiveGroup, place: Place) -> None:
        """Take one branch to its end: strictly sample, tool, observation, sample."""
        async with self._slots:
            while (action := next_action(self._rules, live.group, *place)) is not None:
                if not isinstance(action, Continue):
                    await self._actor.act(live, place, action)
                    continue
                reached = await self._actor.ask(live, continuation(live.group.trees[place.tree], place.node))
                if not reached:
                    return
                (place,) = reached

    async def _refer(self, live: LiveGroup, tree: int, base_model: str) -> None:
        while (missing := missing_references(live.group, self._policy.run_seed, tree)) is not None:
            async with self._slots:
                logprobs = await self._actor.reference_logprobs(missing.tokens)
            await live.append({tree: reference_events(missing, logprobs, base_model)})
