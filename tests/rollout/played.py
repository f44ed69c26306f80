"""Plays a trajectory by hand through a chat, into the events and the fold that a real one goes through."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.arrays import Int32, pack_logprobs, pack_tokens
from core.events import (
    Answered,
    GroupAsked,
    GroupEvent,
    Observed,
    Outcome,
    Plan,
    SamplingParams,
    ToolCalled,
    TurnSampled,
)
from core.ids import make_node
from core.tree import Trajectory, fold_group, trajectory
from rollout.chat import Rendered


class Step(NamedTuple):
    """A turn, and what the environment answered to it."""

    text: str
    tokens: Sequence[int] = (7,)
    logprobs: Sequence[float] | None = None
    observed: Rendered | str | None = None
    called: bool = True
    """The observation answers a call; otherwise it corrects an invalid turn."""


OUTCOMES = {"answer": Outcome.ANSWERED, "invalid": Outcome.BAD_FORMAT, "truncated": Outcome.TRUNCATED}


def play(
    steps: Sequence[Step],
    *,
    prompt: Sequence[int] | Int32 = (1, 2, 3),
    references: Sequence[str] = ("Rome",),
    outcome: Outcome = Outcome.ANSWERED,
    answer: str | None = None,
    protocol: str = "qwen3_5",
) -> Trajectory:
    """Return the folded trajectory of these steps."""
    events: list[tuple[int, GroupEvent]] = [(0, _asked(prompt, references, protocol))]
    for depth, step in enumerate(steps):
        node = make_node(0, 0, depth)
        events.append((1, _sampled(step, depth)))
        if step.observed is None:
            continue
        if step.called:
            call = ToolCalled(node=node, call_id=node, tool="search", arguments={"query": "q"})
            events.append((1, call))
        events.append((1, _observed(step.observed, node, step.called)))
    leaf = make_node(0, 0, len(steps) - 1)
    events.append((1, Answered(leaf=leaf, outcome=outcome, answer=answer, text=steps[-1].text)))
    return trajectory(fold_group(events), 1, leaf)


def _asked(prompt: Sequence[int] | Int32, references: Sequence[str], protocol: str) -> GroupAsked:
    return GroupAsked(
        uid="000000.0",
        ticket=0,
        attempt=0,
        example_id="q",
        question="?",
        references=tuple(references),
        data_source="",
        prompt=pack_tokens(np.asarray(prompt, dtype=np.int32)),
        plan=Plan(mode="chain", group_size=1),
        policy_version=0,
        weights_uri="",
        params=SamplingParams(),
        protocol=protocol,
    )


def _sampled(step: Step, depth: int) -> TurnSampled:
    logprobs = [-0.5] * len(step.tokens) if step.logprobs is None else list(step.logprobs)
    return TurnSampled(
        node=make_node(0, 0, depth),
        parent=make_node(0, 0, depth - 1) if depth else None,
        turn=depth,
        tokens=pack_tokens(list(step.tokens)),
        sampled_logprobs=pack_logprobs(logprobs),
        text=step.text,
        stop_reason="stop",
        seed=0,
        sample_index=0,
        policy_version=0,
    )


def _observed(observed: Rendered | str, node: str, called: bool) -> Observed:
    if isinstance(observed, str):
        observed = Rendered(np.asarray([8, 9], dtype=np.int32), observed)
    reset = observed.prompt_reset
    return Observed(
        node=node,
        content=observed.content,
        tokens=pack_tokens(observed.tokens),
        prompt_reset=None if reset is None else pack_tokens(reset),
        ok=called,
        call_id=node if called else "",
    )
