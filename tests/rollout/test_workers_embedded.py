"""Rollouts on the embedded engine: real tokens, real logprobs, both protocols, chains and trees."""

from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest

from core.arrays import view_logprobs
from core.config import Config, EngineSettings
from core.segments import segments
from core.tree import Group, fold_group, members, trajectories
from engine.client import Session, connect
from rollout.environment import build_environment, freeze, prepare_world, questions
from rollout.progress import silence
from rollout.run import Options, run_rollouts
from rollout.workers import Ending
from store.log import Log
from tests.rollout.logs import open_run

LIMITS = {"max_turns": 5, "max_trajectory_tokens": 2048, "max_assistant_tokens": 64, "max_tool_tokens": 256}
CHAINS = {"group_size": 4, "prompt": "demo"}
TREES = {
    "mode": "tree",
    "tree": {"m": 2, "n": 2, "l": 1, "k": 3},
    "prompt": "demo-tags",
    "protocol": "search_r1",
}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One engine for this file."""
    with connect(EngineSettings(), tmp_path_factory.mktemp("engine")) as opened:
        yield opened


def configure(shape: dict[str, object]) -> Config:
    """Return a configuration whose members also get the base model's logprobs."""
    plain = {"rollout": {**LIMITS, **shape}, "learner": {"kl_beta": 0.001}}
    return freeze(msgspec.convert(plain, Config))


def roll(run_dir: Path, session: Session, shape: dict[str, object], tickets: int) -> tuple[Log, Config]:
    """Roll out some tickets and return the open log."""
    config = configure(shape)
    prepare_world(config, run_dir)
    log = open_run(run_dir)
    environment = build_environment(config, session, run_dir, cache=log)
    examples = questions(config, run_dir, "train")
    ending = anyio.run(run_rollouts, log, config, examples, environment, silence(), Options(tickets))
    assert ending is Ending.GOAL
    return log, config


def groups(log: Log) -> list[tuple[Group, tuple[object, ...]]]:
    """Return all groups with their chosen leaves."""
    return [
        (fold_group((r.tree, r.event) for r in log.groups.fetch(row.uid).records), row.chosen)
        for row in log.group_rows()
    ]


@pytest.mark.parametrize("shape", [CHAINS, TREES])
def test_sampled_logprobs_are_the_base_models_own(
    tmp_path: Path, session: Session, shape: dict[str, object]
) -> None:
    """At version 0 acting policy and base model are one: its logprobs of whole segments equal those sampled.

    This holds only if every prompt was exactly what the segment says, token for token.
    """
    log, _ = roll(tmp_path, session, shape, tickets=4)
    with log:
        turns = 0
        for group, chosen in groups(log):
            for member in members(group, chosen):  # type: ignore[arg-type]
                for node in member.path:
                    assert node.reference is not None
                    sampled = view_logprobs(node.sample.sampled_logprobs)
                    again = view_logprobs(node.reference.logprobs)
                    assert np.abs(sampled - again).max(initial=0.0) < 1e-4
                    turns += 1
        assert turns > 20


@pytest.mark.parametrize("shape", [CHAINS, TREES])
def test_segments_read_as_the_conversation(
    tmp_path: Path, session: Session, shape: dict[str, object]
) -> None:
    """Decoded, a segment is prompt, turn, result, turn, ... in the template's words, and searches found facts."""
    log, config = roll(tmp_path, session, shape, tickets=4)
    tokenizer = session.tokenizer()
    found = 0
    with log:
        for group, _ in groups(log):
            for trajectory in trajectories(group):
                (segment,) = segments(trajectory)
                text = tokenizer.decode(segment.tokens.tolist())
                assert text.startswith("<|im_start|>system\n")
                assert group.asked.question in text
                sampled = [
                    tokenizer.decode(
                        segment.tokens[segment.node_index == place].tolist(), skip_special_tokens=True
                    )
                    for place in range(len(trajectory.path))
                ]
                for place, node in enumerate(trajectory.path):
                    assert node.sample.text == sampled[place]
                    if node.observation is not None and node is not trajectory.path[-1]:
                        assert node.observation.content in text
                        found += node.observation.ok and "[1] " in node.observation.content
                assert len(segment.tokens) <= config.rollout.max_trajectory_tokens
    assert found > 4
