"""Owns the doing of what was decided: sampling, tools and scoring, each recorded before the next decision.

No action is retried here; the session and the back-ends retry within their own bounds. What fails all the
same is recorded as a void end of the trajectories concerned. Faults that say that nothing can be sampled or
searched any more (engine died, no credentials, refused for good, weights gone) leave as exceptions.
"""

import time
from collections.abc import Mapping
from typing import NamedTuple

from core.arrays import Float32, Int32, view_tokens
from core.errors import CredentialsMissing, EngineDied, EngineError, ServiceRefused, ToolError, WeightsGone
from core.events import VOID_OUTCOMES, Answered, GroupEvent, Outcome, Rewarded, ToolCalled
from core.ids import NodeId
from core.segments import next_prompt
from core.tree import trajectory
from rollout.chat import Chat
from rollout.live import LiveGroup
from rollout.observing import OnFault, correction, tool_observation
from rollout.progress import Voice
from rollout.reward import Scorer
from rollout.sampling import Asked, Continuation, Sampler, check_continuations, turn_event
from rollout.scoring import end_events, reward_events
from rollout.tools import Tool
from rollout.trees import Place, Request
from rollout.turns import SEARCH, Correct, End, Rules, RunTool, Score, max_tokens, next_action

FATAL = (CredentialsMissing, EngineDied, ServiceRefused, WeightsGone)
"""Not one trajectory's misfortune: the group or the worker must decide."""


class GroupFailed(Exception):
    """Raised when a whole group cannot go on, through no fault of the policy; says why."""


class Surroundings(NamedTuple):
    """What trajectories live in; the same for a whole run."""

    sampler: Sampler
    chat: Chat
    rules: Rules
    tools: Mapping[str, Tool]
    scorer: Scorer
    on_fault: OnFault
    run_seed: int


class Actor:
    """Does what was decided for the trajectories of one process, and counts it."""

    def __init__(self, surroundings: Surroundings, voice: Voice) -> None:
        self._around = surroundings
        self._voice = voice
        self._progress = voice.progress

    async def ask(self, live: LiveGroup, request: Request) -> tuple[Place, ...]:
        """Sample a request and record all its turns at once; return their places.

        A request that fails leaves void ends in its children's places, and no place is returned.
        """
        uid, version = live.group.uid, live.group.asked.policy_version
        seed = request.seed(self._around.run_seed, uid)
        started = time.monotonic()
        try:
            turns = await self._sample(live, request, seed)
        except FATAL:
            raise
        except EngineError as error:
            await self._void(live, request.children, str(error))
            return ()
        asked = Asked(request, seed, version, time.monotonic() - started)
        events: dict[int, list[GroupEvent]] = {}
        for index, (place, turn) in enumerate(zip(request.children, turns, strict=True)):
            event = turn_event(self._around.chat, asked, index, turn)
            events.setdefault(place.tree, []).append(event)
            self._progress.turns += 1
            self._progress.tokens_sampled += len(view_tokens(event.tokens))
        await live.append(self._with_calls(live, request, events))
        self._voice.notify(self._progress)
        return request.children

    async def act(self, live: LiveGroup, place: Place, action: RunTool | Correct | End | Score) -> None:
        """Do one action at a branch's tip and record what came of it."""
        tree, tip = place
        match action:
            case RunTool():
                await self._run_tool(live, place, action)
            case Correct():
                node = live.group.trees[tree].nodes[tip]
                await live.append({tree: [correction(self._around.chat, node, action.problem)]})
            case End():
                events = end_events(self._around.scorer, live.group, tree, tip, action)
                await live.append({tree: events})
                self._count_end(action.outcome, events)
            case Score():
                events = reward_events(self._around.scorer, trajectory(live.group, tree, tip))
                await live.append({tree: events})
        self._voice.notify(self._progress)

    async def reference_logprobs(self, tokens: Int32) -> Float32:
        """Return the base model's logprobs of a segment, float32 [n]; raises GroupFailed."""
        try:
            return await self._around.sampler.compute_logprobs("", tokens)
        except FATAL:
            raise
        except EngineError as error:
            raise GroupFailed(f"{Outcome.VOID_ENGINE}: {error}") from error

    def _with_calls(
        self, live: LiveGroup, request: Request, events: dict[int, list[GroupEvent]]
    ) -> dict[int, list[GroupEvent]]:
        """Add the calls that follow from the turns: one commit for both is one less to wait for."""
        grown = live.preview(events)
        for tree, node in request.children:
            action = next_action(self._around.rules, grown, tree, node)
            if isinstance(action, RunTool):
                events[tree].append(action.event)
        return events

    async def _sample(self, live: LiveGroup, request: Request, seed: int) -> list[Continuation]:
        asked = live.group.asked
        prompt = next_prompt(live.group, request.tree, request.parent)
        turns = await self._around.sampler.sample(
            asked.weights_uri,
            prompt,
            num_samples=len(request.children),
            seed=seed,
            max_tokens=max_tokens(asked.params, len(prompt)),
            temperature=asked.params.temperature,
            top_p=asked.params.top_p,
            top_k=asked.params.top_k,
            stop=self._around.chat.stop,
        )
        check_continuations(turns, len(request.children))
        return list(turns)

    async def _void(self, live: LiveGroup, places: tuple[Place, ...], detail: str) -> None:
        events: dict[int, list[GroupEvent]] = {}
        for place in places:
            events.setdefault(place.tree, []).append(
                Answered(leaf=place.node, outcome=Outcome.VOID_ENGINE, answer=None, text="", detail=detail)
            )
        await live.append(events)
        for _ in places:
            self._count_end(Outcome.VOID_ENGINE, [])
        self._voice.notify(self._progress)

    async def _run_tool(self, live: LiveGroup, place: Place, action: RunTool) -> None:
        tree, tip = place
        call = action.event
        if not action.recorded:
            await live.append({tree: [call]})
        result = await self._tool(call, tip).run(call.arguments)
        if result.fatal:
            raise ToolError(f"tool {call.tool!r} can no longer be used: {result.error}")
        self._progress.search_calls += call.tool == SEARCH
        self._progress.search_faults += call.tool == SEARCH and not result.ok
        path = live.group.trees[tree].path(tip)
        seen = tool_observation(self._around.chat, live.group, path, call, result, self._around.on_fault)
        await live.append({tree: [seen]})

    def _tool(self, call: ToolCalled, tip: NodeId) -> Tool:
        tool = self._around.tools.get(call.tool)
        if tool is None:
            raise ToolError(
                f"node {tip} calls tool {call.tool!r}, but this run declares "
                f"{', '.join(sorted(self._around.tools)) or 'none'}: see tools.declared"
            )
        return tool

    def _count_end(self, outcome: Outcome, events: list[GroupEvent]) -> None:
        self._progress.trajectories_ended += 1
        self._progress.trajectories_void += outcome in VOID_OUTCOMES
        for event in events:
            if isinstance(event, Rewarded) and event.scope == "leaf":
                self._progress.reward_sum += event.value
                self._progress.exact_match_sum += event.components.get("exact_match", 0.0)
                self._progress.format_sum += event.components.get("format", 0.0)
