"""Every number that replay prints, computed again from the stored events without any of the learner's code."""

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.config import PackingSettings
from core.events import Answered, GroupAsked, Observed, Plan, Rewarded, ToolCalled, TurnSampled
from engine.client import Session
from learner.fingerprints import code_fingerprints
from learner.loop import run_learner
from learner.replay import Auditor, StepReport, replay_step
from learner.telling import report_lines
from learner.view import Name, view_trajectory
from store.log import Log, open_log
from store.ports import Bundle
from tests.learner.support import CHAINS, TREES, Worker, make_config, open_event

STEPS = 3
MOST_DATUMS = 5


@pytest.fixture(scope="module", params=["chains", "trees", "pairs"])
def log(
    request: pytest.FixtureRequest, session: Session, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Log]:
    """Give a run of three steps whose groups were all made before the first: of staleness 0, 1 and 2."""
    plan = {"chains": CHAINS, "trees": TREES, "pairs": Plan(mode="chain", group_size=2)}[request.param]
    run = tmp_path_factory.mktemp(request.param) / "run"
    config = make_config(
        estimator="group_mean",
        groups_per_step=3,
        max_staleness=2,
        packing=PackingSettings(max_datums=MOST_DATUMS),
    )
    with open_log(run, create=True, role="learner") as opened:
        opened.open_run(open_event(config))
        Worker(
            opened, config, plan, lambda uid, tree: [1.0, 0.0, -0.1, 0.25][(int(uid[:6]) + tree) % 4]
        ).fill()
        run_learner(opened, session, config, STEPS)
    with open_log(run, readonly=True) as opened:
        yield opened


class Leaf:
    """One trajectory, put together by hand: its tokens, which of them were sampled, and its score."""

    def __init__(self, bundle: Bundle, tree: int, node: str) -> None:
        events = [record.event for record in bundle.records if record.tree == tree]
        [asked] = [record.event for record in bundle.records if isinstance(record.event, GroupAsked)]
        turns = {event.node: event for event in events if isinstance(event, TurnSampled)}
        seen = {event.node: event for event in events if isinstance(event, Observed)}
        path: list[str] = []
        at: str | None = node
        while at is not None:
            path.insert(0, at)
            at = turns[at].parent
        self.uid, self.tree, self.node, self.path = bundle.uid, tree, node, path
        self.prompt = len(asked.prompt) // 4
        self.sampled = [len(turns[step].tokens) // 4 for step in path]
        self.given = [len(seen[step].tokens) // 4 for step in path[:-1]]
        self.calls = sum(isinstance(event, ToolCalled) and event.node in path for event in events)
        [self.reward] = [e.value for e in events if isinstance(e, Rewarded) and e.node == node]
        self.length = self.prompt + sum(self.sampled) + sum(self.given)


def bundles_of(log: Log, step: int) -> list[Bundle]:
    """Return the groups of a step by ticket: three each, in order."""
    return [log.groups.fetch(f"{ticket:06}.0") for ticket in range(3 * step, 3 * step + 3)]


def leaves_of(bundle: Bundle) -> list[Leaf]:
    """Return a group's trajectories by tree and leaf."""
    ends = [
        (record.tree, record.event.leaf) for record in bundle.records if isinstance(record.event, Answered)
    ]
    return [Leaf(bundle, tree, node) for tree, node in sorted(ends)]


def report_of(log: Log, step: int) -> StepReport:
    """Return a report that matches."""
    report = replay_step(Auditor(log, code_fingerprints()), step)
    assert report.match, report.differences
    return report


def packed(lengths: list[int]) -> list[list[int]]:
    """Return places per micro-batch, longest first, at most MOST_DATUMS each."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    return [order[start : start + MOST_DATUMS] for start in range(0, len(order), MOST_DATUMS)]


def advantages_of(leaves: list[Leaf]) -> dict[tuple[str, int, str], float]:
    """Return R − the mean of its group, per leaf."""
    groups: dict[str, list[float]] = defaultdict(list)
    for leaf in leaves:
        groups[leaf.uid].append(leaf.reward)
    return {
        (leaf.uid, leaf.tree, leaf.node): leaf.reward - math.fsum(groups[leaf.uid]) / len(groups[leaf.uid])
        for leaf in leaves
    }


@pytest.mark.parametrize("step", range(STEPS))
def test_groups_rewards_and_advantages(log: Log, step: int) -> None:
    """Mean, std with n − 1, staleness, policy version, and each member's line."""
    report = report_of(log, step)
    bundles = bundles_of(log, step)
    assert [group.uid for group in report.groups] == [bundle.uid for bundle in bundles]
    assert report.policy_version == step
    assert report.skipped is False
    for group, bundle in zip(report.groups, bundles, strict=True):
        leaves = leaves_of(bundle)
        rewards = [leaf.reward for leaf in leaves]
        mean = math.fsum(rewards) / len(rewards)
        assert group.policy_version == 0
        assert group.staleness == step
        assert group.mean == pytest.approx(mean)
        spread = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
        assert group.std == pytest.approx(spread)
        expected = advantages_of(leaves)
        assert [(line.tree, line.leaf) for line in group.members] == [
            (leaf.tree, leaf.node) for leaf in leaves
        ]
        for line, leaf in zip(group.members, leaves, strict=True):
            assert line.reward == line.shaped == leaf.reward
            assert line.advantage == pytest.approx(expected[leaf.uid, leaf.tree, leaf.node])
            assert (line.turns, line.sampled_tokens) == (len(leaf.path), sum(leaf.sampled))


@pytest.mark.parametrize("step", range(STEPS))
def test_tokens_by_kind_and_micro_batches(log: Log, step: int) -> None:
    """A leaf without an advantage sends nothing and stays in N; a datum has one token less than its text."""
    report = report_of(log, step)
    leaves = [leaf for bundle in bundles_of(log, step) for leaf in leaves_of(bundle)]
    advantages = advantages_of(leaves)
    sent = [leaf for leaf in leaves if advantages[leaf.uid, leaf.tree, leaf.node] != 0]
    nodes: dict[tuple[str, int, str], int] = {}
    for leaf in leaves:
        nodes |= {
            (leaf.uid, leaf.tree, node): size for node, size in zip(leaf.path, leaf.sampled, strict=True)
        }
    sampled = sum(sum(leaf.sampled) for leaf in leaves)
    assert report.members == len(leaves)
    assert report.tokens == {
        "prompt": sum(leaf.prompt for leaf in leaves),
        "observation": sum(sum(leaf.given) for leaf in leaves),
        "sampled": sampled,
        "shared": sampled - sum(nodes.values()),
        "trained": sum(sum(leaf.sampled) for leaf in sent),
        "sent": sum(leaf.length - 1 for leaf in sent),
    }
    micro = packed([leaf.length for leaf in sent])
    assert len(micro) > 1
    assert report.micro_batches == tuple(map(len, micro))
    padded = sum(len(batch) * max(sent[place].length - 1 for place in batch) for batch in micro)
    expected = {
        "train/members": len(leaves),
        "train/datums": len(sent),
        "train/micro_batches": len(micro),
        "train/tokens": report.tokens["sent"],
        "train/loss_tokens": report.tokens["trained"],
        "train/padded_tokens": padded,
        "train/update_skipped": 0,
        "staleness/mean": step,
        "staleness/max": step,
        "reward/mean": math.fsum(leaf.reward for leaf in leaves) / len(leaves),
        "rollout/trajectories": len(leaves),
        "rollout/turns": sum(len(leaf.path) for leaf in leaves) / len(leaves),
        "rollout/search_calls": sum(leaf.calls for leaf in leaves) / len(leaves),
        "rollout/trajectory_tokens": sum(leaf.length for leaf in leaves) / len(leaves),
        "rollout/longest_trajectory": max(leaf.length for leaf in leaves),
        "rollout/tokens_sampled": sum(nodes.values()),
        "budget/generated_tokens": sum(nodes.values()),
        "budget/generated_tokens_per_group": sum(nodes.values()) / 3,
        "budget/generated_tokens_per_leaf": sum(nodes.values()) / len(leaves),
        "budget/saved_by_sharing": 1 - sum(nodes.values()) / sampled,
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("step", range(STEPS))
def test_what_each_token_was_sent_with(log: Log, step: int) -> None:
    """A · n_k / N on sampled tokens, 0 on all others; `--trajectory` shows the same."""
    leaves = [leaf for bundle in bundles_of(log, step) for leaf in leaves_of(bundle)]
    advantages = advantages_of(leaves)
    sent = [leaf for leaf in leaves if advantages[leaf.uid, leaf.tree, leaf.node] != 0]
    share = {place: len(batch) for batch in packed([leaf.length for leaf in sent]) for place in batch}
    scaled = {
        (leaf.uid, leaf.tree, leaf.node): advantages[leaf.uid, leaf.tree, leaf.node]
        * share[place]
        / len(leaves)
        for place, leaf in enumerate(sent)
    }
    assert len(set(share.values())) > 1
    for leaf in leaves:
        view = view_trajectory(
            log, Name(leaf.uid, leaf.tree, leaf.node), lambda ids: [str(one) for one in ids]
        )
        [segment] = view.segments
        expected = [0.0] * leaf.prompt
        for sampled, given in zip(leaf.sampled, [*leaf.given, 0], strict=True):
            expected += [scaled.get((leaf.uid, leaf.tree, leaf.node), 0.0)] * sampled + [0.0] * given
        assert [token.advantage for token in segment.tokens] == pytest.approx(expected, rel=1e-6)
        assert segment.datum == ((leaf.uid, leaf.tree, leaf.node) in scaled)


def test_the_lines_hold_the_numbers_of_the_report(log: Log) -> None:
    """What is printed is what was derived, to the digits that are printed."""
    report = report_of(log, 1)
    lines = report_lines(report, whole=True)
    text = "\n".join(lines)
    flat = " ".join(text.split())
    assert lines[0] == f"step 1: MATCH  batch {report.batch_digest[:16]}"
    micro = " + ".join(map(str, report.micro_batches))
    assert f"3 groups, N = {report.members} members, datums per micro-batch: {micro}" in flat
    for name, value in report.tokens.items():
        assert f"{name} {value}" in flat
    for name in ("padded_tokens", "datums", "loss_tokens"):
        assert f"{name} {report.metrics[f'train/{name}']:.0f}" in flat
    for group in report.groups:
        assert f"mean reward {group.mean:.6g} std {group.std:.6g}" in flat
        assert "policy v0 staleness 1" in flat
        for line in group.members:
            row: Any = [
                part for part in text.splitlines() if part.split()[:1] == [f"t{line.tree}/{line.leaf}"]
            ]
            assert any(f"{line.reward:+.4f}" in one and f"{line.advantage:+.6f}" in one for one in row), (
                line,
                row,
            )


def test_a_group_of_one_has_no_spread_and_no_signal(session: Session, tmp_path: Path) -> None:
    """Nothing to send: the step is skipped, and told so."""
    config = make_config(groups_per_step=1)
    with open_log(tmp_path / "run", create=True, role="learner") as log:
        log.open_run(open_event(config))
        Worker(log, config, Plan(mode="chain", group_size=1, min_group=1), lambda uid, tree: 1.0).fill()
        run_learner(log, session, config, 1)
        report = report_of(log, 0)
    [group] = report.groups
    assert (group.mean, group.std, [line.advantage for line in group.members]) == (1.0, 0.0, [0.0])
    assert (report.skipped, report.micro_batches, report.members) == (True, (), 1)
    assert (report.tokens["sent"], report.tokens["trained"]) == (0, 0)
    assert report_lines(report, whole=True)[0].endswith("(skipped: no signal)")
