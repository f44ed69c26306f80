"""Owns recorded steps for benchmarks: made-up groups, planned and committed like the learner, untrained."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from core.arrays import pack_logprobs, pack_tokens
from core.config import Config, LearnerSettings, config_digest, to_plain
from core.events import (
    Answered,
    ChosenLeaf,
    GoalSet,
    GroupAsked,
    GroupEvent,
    Observed,
    Outcome,
    Plan,
    Rewarded,
    RunOpened,
    SamplingParams,
    StepCommitted,
    ToolCalled,
    TurnSampled,
)
from core.ids import make_node
from core.tree import fold_group, trajectories
from learner.batch import PlanContext, fetch, group_facts, plan_event, recipe_from_learner
from learner.metrics import step_metrics
from learner.rebuild import derive
from store.log import Log, open_log
from store.ports import Admission, Claim, StreamWrite


class Shape:
    """How long things are, in tokens."""

    def __init__(self, prompt: int, turns: int, sampled: int, observed: int) -> None:
        self.prompt = prompt
        self.turns = turns
        self.sampled = sampled
        self.observed = observed

    @property
    def trajectory(self) -> int:
        """Tokens of one trajectory."""
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.observed


REALISTIC = Shape(prompt=180, turns=3, sampled=90, observed=400)


def group_events(
    claim: Claim, trajectories_: int, shape: Shape, rng: np.random.Generator
) -> list[tuple[int, GroupEvent]]:
    """Return the records of a group of chains."""
    asked = GroupAsked(
        uid=claim.uid,
        ticket=claim.ticket,
        attempt=claim.attempt,
        example_id=f"q{claim.ticket}",
        question="who?",
        references=("she",),
        data_source="made",
        prompt=pack_tokens(rng.integers(0, 150_000, shape.prompt)),
        plan=Plan(mode="chain", group_size=trajectories_),
        policy_version=claim.policy_version,
        weights_uri=claim.weights_uri,
        params=SamplingParams(),
    )
    records: list[tuple[int, GroupEvent]] = [(0, asked)]
    for tree in range(1, trajectories_ + 1):
        records += [(tree, event) for event in _chain(claim, shape, rng)]
    return records


def _chain(claim: Claim, shape: Shape, rng: np.random.Generator) -> list[GroupEvent]:
    events: list[GroupEvent] = []
    for turn in range(shape.turns):
        node = make_node(0, 0, turn)
        events.append(
            TurnSampled(
                node=node,
                parent=make_node(0, 0, turn - 1) if turn else None,
                turn=turn,
                tokens=pack_tokens(rng.integers(0, 150_000, shape.sampled)),
                sampled_logprobs=pack_logprobs(-rng.random(shape.sampled, dtype=np.float32)),
                text="words " * (shape.sampled // 2),
                stop_reason="stop",
                seed=1,
                sample_index=0,
                policy_version=claim.policy_version,
            )
        )
        if turn + 1 < shape.turns:
            call = f"call-{turn}"
            events.append(ToolCalled(node=node, call_id=call, tool="search", arguments={"query": "who"}))
            observed = pack_tokens(rng.integers(0, 150_000, shape.observed))
            events.append(
                Observed(node=node, content="found " * 200, tokens=observed, status="success", call_id=call)
            )
    leaf = make_node(0, 0, shape.turns - 1)
    events.append(Answered(leaf=leaf, outcome=Outcome.ANSWERED, answer="she", text="Answer: she"))
    events.append(
        Rewarded(
            node=leaf,
            value=float(rng.integers(0, 2)),
            scorer="made",
            scorer_version="1",
            source_digest="d",
            components={"exact_match": 1.0, "format": 1.0, "f1": 1.0},
        )
    )
    return events


def writes(records: Sequence[tuple[int, GroupEvent]]) -> list[StreamWrite]:
    """Return records as appends, one per tree."""
    streams: dict[int, list[GroupEvent]] = {}
    for tree, event in records:
        streams.setdefault(tree, []).append(event)
    return [StreamWrite(tree, 0, events) for tree, events in streams.items()]


def make_group(log: Log, size: int, shape: Shape, rng: np.random.Generator) -> None:
    """Claim, write and close one group."""
    claim = log.groups.claim_sync(log.worker_id, Admission(0, 1_000_000), 0.0)
    assert isinstance(claim, Claim)
    records = group_events(claim, size, shape, rng)
    log.groups.append_sync(claim, writes(records))
    chosen = [ChosenLeaf(tree=ended.tree, leaf=ended.leaf) for ended in trajectories(fold_group(records))]
    log.groups.close_sync(claim, chosen, 0.0)


def record_steps(run_dir: Path, steps: int, groups: int, size: int, shape: Shape) -> Log:
    """Return the open log of a new run with `steps` committed steps of groups × size trajectories."""
    config = Config(learner=LearnerSettings(groups_per_step=groups))
    log = open_log(run_dir, create=True, role="learner", sync=False)
    log.open_run(
        RunOpened(
            schema=1,
            config=to_plain(config),
            config_digest=config_digest(config),
            fingerprints={},
            base_model="",
            seed=0,
            run_id="bench",
        )
    )
    log.journal.append_sync([GoalSet(max_steps=steps + 1)])
    rng = np.random.default_rng(0)
    recipe = recipe_from_learner(config.learner, 1e-4)
    for step in range(steps):
        for _ in range(groups):
            make_group(log, size, shape, rng)
        taken = fetch(log.groups, log.next_step_groups(groups))
        rebuilt = derive(taken, recipe)
        planned = plan_event(taken, rebuilt.batch, rebuilt.digests, recipe, PlanContext(step, 0, {}, 0.0))
        metrics = step_metrics(group_facts(taken, rebuilt.batch, step), rebuilt.batch)
        committed = StepCommitted(step=step, skipped=False, policy_version=0, rollout_metrics=metrics)
        log.journal.append_sync([planned, committed])
    return log
