"""What acting records: unusable samples, cut turns, corrections, late scores, node rewards."""

from collections.abc import Callable, Sequence

import anyio
import numpy as np
import pytest

from core.arrays import Float32, Int32, view_tokens
from core.config import Config
from core.errors import EngineDied, ServiceBusy, ToolError
from core.events import Outcome, Rewarded
from core.ids import parse_node
from core.tree import Group, Trajectory, fold_group, trajectories
from rollout.acting import GroupFailed
from rollout.live import LiveGroup
from rollout.reward import NodeScore, Score, Scorer
from rollout.run import Environment
from rollout.serving import first
from store.ports import StreamWrite
from tests.fakes import (
    TOKENIZER,
    ScriptedSampler,
    ScriptedSearch,
    Turn,
    answer,
    call,
    make_config,
    make_environment,
)
from tests.rollout.support import Recorder, Records
from tests.rollout.test_trees_adoption import grow, question

ONE = {"mode": "chain", "group_size": 1}
TWO = {"mode": "chain", "group_size": 2}


def rolled(config: Config, environment: Environment, reference: str = "") -> Group:
    """Return a group grown from nothing."""

    async def main() -> Group:
        live = await LiveGroup.open(question(config, environment, 0), Recorder().write)
        return await grow(config, environment, live, reference)

    return anyio.run(main)


def continued(config: Config, environment: Environment, records: Records) -> Group:
    """Return a group grown on from records."""
    heir = Recorder(records)
    return anyio.run(grow, config, environment, LiveGroup.adopt(heir.records, heir.write))


class BadSampler(ScriptedSampler):
    """A sampler whose continuations are spoilt on the way."""

    def __init__(self, spoil: Callable[[list[Turn]], list[Turn]]) -> None:
        super().__init__(lambda prompt, seed, index: answer("Ada"))
        self.spoil = spoil

    async def sample(self, weights_uri: str, prompt: Int32, **params: object) -> list[Turn]:  # type: ignore[override]
        """Return spoilt continuations."""
        return self.spoil(await super().sample(weights_uri, prompt, **params))  # type: ignore[arg-type]


def with_logprob(value: float) -> Callable[[list[Turn]], list[Turn]]:
    """Return what puts a bad logprob into the last continuation."""

    def spoil(turns: list[Turn]) -> list[Turn]:
        logprobs = turns[-1].logprobs.copy()
        logprobs[2] = value
        return [*turns[:-1], turns[-1]._replace(logprobs=logprobs)]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (with_logprob(float("nan")), "logprob 2 of continuation 1 is nan"),
        (with_logprob(0.5), "logprob 2 of continuation 1 is 0.5"),
        (lambda turns: turns[:1], "returned 1 continuations, expected 2"),
        (lambda turns: [turn._replace(logprobs=turn.logprobs[1:]) for turn in turns], "tokens and"),
    ],
)
def test_unusable_continuations_are_void(spoil: Callable[[list[Turn]], list[Turn]], words: str) -> None:
    """What cannot be trained on is not recorded as a turn; the end says what was wrong."""
    group = rolled(make_config(**TWO), make_environment(BadSampler(spoil), ScriptedSearch()))
    for tree in group.trees.values():
        assert not tree.nodes
        assert tree.unborn["0.0.0"].outcome is Outcome.VOID_ENGINE
        assert words in tree.unborn["0.0.0"].detail


def test_tokens_after_an_action_are_left_out() -> None:
    """With tags the first action ends the turn, wherever the sampler stopped; logprobs stay with their tokens."""

    def chatty(prompt: str, seed: int, index: int) -> str:
        if "All about" in prompt:
            return "<answer>Ada</answer> and so on"
        return "<search>it</search> and on and on"

    sampler = ScriptedSampler(chatty)
    group = rolled(make_config(**ONE), make_environment(sampler, ScriptedSearch(), protocol="search_r1"))
    first_turn, last_turn = group.trees[1].nodes.values()
    assert first_turn.sample.text == "<search>it</search>"
    assert last_turn.sample.text == "<answer>Ada</answer>"
    assert len(first_turn.sample.tokens) == len(first_turn.sample.sampled_logprobs)
    assert len(view_tokens(first_turn.sample.tokens)) == len("<search>it</search>")
    prompt = TOKENIZER.decode(sampler.requests[1].prompt, skip_special_tokens=False)
    assert prompt.endswith("<search>it</search>\n\n<information>[1] All about it.</information>\n\n")


def test_invalid_action_is_corrected_and_goes_on() -> None:
    """The correction is an observation that says so; it is no search."""

    def learns(prompt: str, seed: int, index: int) -> str:
        return "<answer>Ada</answer>" if "previous action is invalid" in prompt else "hm"

    search = ScriptedSearch()
    sampler = ScriptedSampler(learns)
    group = rolled(make_config(**ONE), make_environment(sampler, search, protocol="search_r1"))
    corrected, last = group.trees[1].nodes.values()
    assert corrected.tool_call is None
    assert corrected.observation is not None
    assert (corrected.observation.status, corrected.observation.ok) == ("invalid_action", False)
    assert last.answer is not None
    assert last.answer.outcome is Outcome.ANSWERED
    assert not search.queries


def test_a_recorded_end_without_its_reward_is_scored() -> None:
    """A log may hold an end whose reward was not written any more; it is made up for."""
    config = make_config(**ONE)
    environment = make_environment(
        ScriptedSampler(lambda prompt, seed, index: answer("Ada")), ScriptedSearch()
    )
    recorder = Recorder()

    async def main() -> None:
        live = await LiveGroup.open(question(config, environment, 0), recorder.write)
        await grow(config, environment, live)

    anyio.run(main)
    assert isinstance(recorder.records[-1][1], Rewarded)
    group = continued(config, environment, recorder.records[:-1])
    assert group == fold_group(recorder.records)


@pytest.mark.parametrize("fault", [ServiceBusy("no capacity"), EngineDied("gone")])
def test_missing_references_fail_the_group(fault: Exception) -> None:
    """Without its KL term a group cannot be trained; a dead engine is the worker's business."""

    class NoReferences(ScriptedSampler):
        async def compute_logprobs(self, weights_uri: str, tokens: Int32) -> Float32:
            raise fault

    environment = make_environment(NoReferences(lambda prompt, seed, index: answer("Ada")), ScriptedSearch())
    with pytest.raises(BaseExceptionGroup) as raised:
        rolled(make_config(**ONE), environment, reference="base")
    error = first(raised.value)
    if isinstance(fault, EngineDied):
        assert error is fault
    else:
        assert isinstance(error, GroupFailed)
        assert str(error) == "void_engine: no capacity"


def test_recorded_call_of_an_undeclared_tool_is_an_error() -> None:
    """A run whose tools were changed says so instead of failing somewhere else."""
    config = make_config(**ONE)
    sampler = ScriptedSampler(lambda prompt, seed, index: call("it"))
    environment = make_environment(sampler, ScriptedSearch())._replace(tools={})
    with pytest.raises(BaseExceptionGroup) as raised:
        rolled(config, environment)
    error = first(raised.value)
    assert isinstance(error, ToolError)
    assert "calls tool 'search', but this run declares none" in str(error)


def test_node_rewards_come_from_the_turns_own_branch() -> None:
    """A dense scorer names every turn of a path; a shared turn keeps the value of the branch it belongs to."""

    def dense(ended: Trajectory) -> Score:
        length = float(len(ended.path))
        return Score(length, {}, tuple(NodeScore(node.node, length) for node in ended.path))

    config = make_config(mode="tree", tree={"m": 1, "n": 3, "l": 2, "k": 9})
    environment = make_environment(ScriptedSampler(), ScriptedSearch())
    group = rolled(config, environment._replace(scorer=Scorer("dense", "1", "d", dense)))
    tree = group.trees[1]
    branches: dict[str, set[float]] = {}
    for node in tree.nodes.values():
        if node.node_reward is not None:
            branches.setdefault(node.node.rsplit(".", 1)[0], set()).add(node.node_reward.value)
    assert len(branches) > 1
    assert all(len(values) == 1 for values in branches.values())
    for leaf in tree.leaves():
        if leaf.reward is not None:
            assert branches[leaf.node.rsplit(".", 1)[0]] == {leaf.reward.value}


def test_first_turns_that_fail_leave_nothing_to_score() -> None:
    """When the one request for all trees fails, every trajectory is void and no tree is expanded."""
    sampler = ScriptedSampler(faults=lambda asked: ServiceBusy("no capacity"))
    config = make_config(mode="tree", tree={"m": 2, "n": 2, "l": 1, "k": 3})
    group = rolled(config, make_environment(sampler, ScriptedSearch()))
    assert len(sampler.requests) == 1
    assert all(set(tree.unborn) == {"0.0.0"} and not tree.expansions for tree in group.trees.values())


def test_failed_expansion_voids_its_branches_only() -> None:
    """The request of one expanded node fails: its branches are void, the others go on."""
    failed: list[int] = []

    def third(asked: object) -> ServiceBusy | None:
        seed: int = asked.seed  # type: ignore[attr-defined]
        if len(sampler.requests) > 3 and not failed:
            failed.append(seed)
            return ServiceBusy("no capacity")
        return None

    sampler = ScriptedSampler(lambda prompt, seed, index: answer("Ada"), faults=third)
    config = make_config(mode="tree", tree={"m": 1, "n": 2, "l": 4, "k": 9})
    group = rolled(config, make_environment(sampler, ScriptedSearch()))
    tree = group.trees[1]
    assert len(tree.expansions) == 4
    assert len(tree.unborn) == 2
    assert len([leaf for leaf in tree.leaves() if leaf.reward is not None]) == 1 + 4 * 2 - 2


def test_scored_values_are_the_scorers() -> None:
    """Value, components, id, version and source digest are recorded with the reward."""
    environment = make_environment(
        ScriptedSampler(lambda prompt, seed, index: answer("Ada")), ScriptedSearch()
    )
    (leaf,) = rolled(make_config(**ONE), environment).trees[1].nodes.values()
    assert leaf.reward is not None
    scorer = environment.scorer
    assert (leaf.reward.scorer, leaf.reward.scorer_version, leaf.reward.source_digest) == (
        scorer.id,
        scorer.version,
        scorer.source_digest,
    )
    assert leaf.reward.components["exact_match"] == 1.0


def test_answers_and_turns_are_never_reencoded() -> None:
    """The recorded tokens are the sampler's own array, and the next prompt is their plain concatenation."""
    sampler = ScriptedSampler(
        lambda prompt, seed, index: answer("Ada") if "All about" in prompt else call("it")
    )
    group = rolled(make_config(**ONE), make_environment(sampler, ScriptedSearch()))
    node = group.trees[1].nodes["0.0.0"]
    assert node.observation is not None
    prompt = np.concatenate(
        [view_tokens(raw) for raw in (group.asked.prompt, node.sample.tokens, node.observation.tokens)]
    )
    assert sampler.requests[1].prompt == tuple(prompt.tolist())


def test_an_end_and_its_reward_are_one_write() -> None:
    """No crash can part them; a void end is written alone, whatever its scorer would say."""
    writes: list[list[str]] = []

    class Noting(Recorder):
        """Notes what is written at once."""

        async def write(self, writes_: Sequence[StreamWrite]) -> None:
            """Note, and record."""
            writes.append([type(event).__name__ for write in writes_ for event in write.events])
            await super().write(writes_)

    def run(search: ScriptedSearch) -> None:
        sampler = ScriptedSampler(
            lambda prompt, seed, index: answer("x") if "All about" in prompt else call("it")
        )
        config, environment = make_config(**ONE), make_environment(sampler, search)

        async def main() -> None:
            live = await LiveGroup.open(question(config, environment, 0), Noting().write)
            await grow(config, environment, live)

        anyio.run(main)

    run(ScriptedSearch())
    assert writes[-1] == ["Answered", "Rewarded"]
    writes.clear()
    run(ScriptedSearch(fails=lambda query: True))
    assert writes[-1] == ["Answered"]


@pytest.mark.parametrize(
    ("limits", "outcome", "turns", "searches"),
    [
        ({"max_search_calls": 2, "max_turns": 9}, Outcome.TOOL_LIMIT, 3, 2),
        ({"max_search_calls": 9, "max_turns": 4}, Outcome.TURN_LIMIT, 4, 3),
        ({"max_search_calls": 99, "max_turns": 99, "max_trajectory_tokens": 700}, Outcome.TOKEN_LIMIT, 0, 0),
    ],
)
def test_budgets_of_every_branch_count_from_the_root(
    limits: dict[str, int], outcome: Outcome, turns: int, searches: int
) -> None:
    """A policy that always searches ends every branch, wherever it began, as a chain would have ended."""
    sampler = ScriptedSampler(lambda prompt, seed, index: call(f"q{seed % 97}"))
    shape = {"mode": "tree", "tree": {"m": 2, "n": 3, "l": 2, "k": 9}, **limits}
    group = rolled(make_config(**shape), make_environment(sampler, ScriptedSearch()))
    ended = list(trajectories(group))
    assert len(ended) == 2 * (1 + 2 * 3)
    begun = {parse_node(member.leaf).depth - len(own_turns(member)) + 1 for member in ended}
    assert len(begun) > 1  # branches began at the root and further down
    for member in ended:
        assert member.outcome is outcome
        if turns:
            assert len(member.path) == turns
            assert sum(node.observation is not None for node in member.path) == searches
        else:
            read = sum(len(view_tokens(node.sample.tokens)) for node in member.path)
            seen = [node.observation for node in member.path if node.observation is not None]
            read += sum(len(view_tokens(each.tokens)) for each in seen)
            prompt = len(view_tokens(group.asked.prompt))
            last = len(view_tokens(member.path[-1].sample.tokens))
            assert prompt + read - last < 700 <= prompt + read + 100


def own_turns(member: Trajectory) -> list[str]:
    """Return the turns of a trajectory's own branch."""
    branch = parse_node(member.leaf)[:2]
    return [node.node for node in member.path if parse_node(node.node)[:2] == branch]
