"""Owns the learner tests' rollouts: made-up trajectories, a pure function of seed and uid, and their worker."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from core.choice import draw
from core.closing import Close, close_or_give_up
from core.config import Config, EngineSettings, LearnerSettings, RolloutSettings, config_digest, to_plain
from core.events import GroupEvent, Plan, RunOpened
from core.ids import make_node
from core.tree import fold_group
from store.log import Log
from store.ports import Admission, Claim, NoClaim, StreamWrite
from tests.building import Script

TOKENS = range(300, 1200)
"""Token ids of the embedded engine's model that stand for whole words."""


def make_config(**learner: Any) -> Config:
    """Return a small configuration for the embedded engine."""
    defaults: dict[str, Any] = {"groups_per_step": 2, "learning_rate": 2e-3, "save_every": 2}
    return Config(
        engine=EngineSettings(lora_rank=4),
        rollout=RolloutSettings(group_size=3),
        learner=LearnerSettings(**(defaults | learner)),
    )


def open_event(config: Config) -> RunOpened:
    """Return the `run` event of a test run."""
    return RunOpened(
        schema=1,
        config=to_plain(config),
        config_digest=config_digest(config),
        fingerprints={},
        base_model="",
        seed=config.run.seed,
        run_id="run-under-test",
    )


def numbers(uid: str, tree: int, name: str, count: int) -> list[float]:
    """Return floats in [0, 1) that depend on nothing but these names."""
    return draw(0, uid, tree, name, count=count).tolist()


def words(uid: str, tree: int, name: str, count: int) -> list[int]:
    """Return token ids that depend on nothing but these names."""
    return [TOKENS[int(value * len(TOKENS))] for value in numbers(uid, tree, name, count)]


def logprobs(uid: str, tree: int, name: str, count: int) -> list[float]:
    """Return plausible logprobs."""
    return [-0.05 - 2.0 * value for value in numbers(uid, tree, f"{name}-logprobs", count)]


Reward = Callable[[str, int], float]


def any_reward(uid: str, tree: int) -> float:
    """Return 1 or 0, at random but for ever the same."""
    return float(numbers(uid, tree, "reward", 1)[0] < 0.5)


def chain_group(claim: Claim, plan: Plan, reward: Reward = any_reward) -> Script:
    """Return a group of two-turn chains."""
    uid = claim.uid
    script = Script(
        claim.ticket,
        words(uid, 0, "prompt", 12),
        attempt=claim.attempt,
        plan=plan,
        policy_version=claim.policy_version,
        weights_uri=claim.weights_uri,
    )
    for tree in range(1, plan.group_size + 1):
        first, last = make_node(0, 0, 0), make_node(0, 0, 1)
        _turn(script, claim, first, None, tree)
        script.see(first, words(uid, tree, "seen", 6), tree=tree)
        _turn(script, claim, last, first, tree)
        script.end(last, reward(uid, tree), tree=tree)
    return script


def tree_group(claim: Claim, plan: Plan, reward: Reward = any_reward) -> Script:
    """Return a group of trees: a chain of two turns, and one expansion of its first turn."""
    uid = claim.uid
    script = Script(
        claim.ticket,
        words(uid, 0, "prompt", 12),
        attempt=claim.attempt,
        plan=plan,
        policy_version=claim.policy_version,
        weights_uri=claim.weights_uri,
    )
    for tree in range(1, plan.m + 1):
        first, last, branch = make_node(0, 0, 0), make_node(0, 0, 1), make_node(1, 0, 1)
        _turn(script, claim, first, None, tree)
        script.see(first, words(uid, tree, "seen", 6), tree=tree)
        _turn(script, claim, last, first, tree)
        script.end(last, reward(uid, tree), tree=tree)
        script.expand(1, [first], tree=tree)
        _turn(script, claim, branch, first, tree)
        script.end(branch, reward(uid, tree + 100), tree=tree)
    return script


def _turn(script: Script, claim: Claim, node: str, parent: str | None, tree: int) -> None:
    tokens = words(claim.uid, tree, node, 5)
    script.turn(node, parent, tokens, logprobs(claim.uid, tree, node, 5), tree=tree)
    index, event = script.records[-1]
    script.records[-1] = (index, msgspec.structs.replace(event, policy_version=claim.policy_version))


def writes(records: Sequence[tuple[int, GroupEvent]]) -> list[StreamWrite]:
    """Return a group's records as appends, one per tree."""
    streams: dict[int, list[GroupEvent]] = {}
    for tree, event in records:
        streams.setdefault(tree, []).append(event)
    return [StreamWrite(tree, 0, events) for tree, events in sorted(streams.items())]


class Worker:
    """A rollout worker without a policy: claims, writes and closes groups until the goal is reached."""

    def __init__(self, log: Log, config: Config, plan: Plan, reward: Reward = any_reward) -> None:
        self.log = log
        self.plan = plan
        self.reward = reward
        self.admission = Admission(config.learner.max_staleness, config.learner.groups_per_step)
        self.made: list[str] = []

    def step(self) -> Claim | NoClaim:
        """Make one group if there is one to make."""
        claim = self.log.groups.claim_sync(self.log.worker_id, self.admission, 0.0)
        if isinstance(claim, Claim):
            self.make(claim)
        return claim

    def make(self, claim: Claim) -> None:
        """Write a whole group and close it."""
        build = tree_group if self.plan.mode == "tree" else chain_group
        script = build(claim, self.plan, self.reward)
        self.log.groups.append_sync(claim, writes(script.records))
        ending = close_or_give_up(fold_group(script.records), 0)
        assert isinstance(ending, Close)
        self.log.groups.close_sync(claim, ending.chosen, 0.0)
        self.made.append(claim.uid)

    def fill(self) -> NoClaim:
        """Make groups until none may be claimed."""
        while isinstance(claim := self.step(), Claim):
            pass
        assert isinstance(claim, NoClaim)
        return claim


CHAINS = Plan(mode="chain", group_size=3)
TREES = Plan(mode="tree", m=2, n=1, l=1, k=2)


@contextlib.contextmanager
def working(worker: Worker) -> Iterator[Worker]:
    """Let a worker make groups on a thread of its own while the block runs."""
    stop = threading.Event()
    failed: list[BaseException] = []

    def body() -> None:
        try:
            while not stop.is_set():
                worker.fill()
                stop.wait(0.005)
        except BaseException as exc:  # noqa: BLE001 shown in the test
            failed.append(exc)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join()
        if failed:
            raise failed[0]


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition; fails the test after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.01)


def final_weights(run_dir: Path, uri: str) -> dict[str, Any]:
    """Return the arrays of a weights URI of a run's embedded engine."""
    _, _, rest = uri.partition("trio://")
    training_run, kind, name = rest.split("/")
    [path] = list(run_dir.rglob(f"runs/{training_run}/{kind}/{name}.npz"))
    with np.load(path) as arrays:
        return {key: arrays[key] for key in arrays.files}
