"""Groups grown by a scripted policy: whole, interrupted anywhere, and under any schedule."""

import contextlib
from collections import Counter

import anyio
import pytest

from core.closing import close_or_give_up
from core.config import Config
from core.events import GroupAsked, Observed, TurnSampled
from core.tree import Group
from rollout.data import Example
from rollout.live import LiveGroup
from rollout.plan import ask, make_params, make_plan
from rollout.progress import silence
from rollout.run import Environment, make_gardener
from store.ports import Claim
from tests.fakes import Latency, ScriptedSampler, ScriptedSearch, chance, make_config, make_environment
from tests.rollout.support import CrashError, Recorder, Records, timeless

CHAINS = {"mode": "chain", "group_size": 3}
TREES = {"mode": "tree", "tree": {"m": 2, "n": 2, "l": 2, "k": 3}}
VALUE_TREES = {"mode": "tree", "tree": {"m": 2, "n": 2, "l": 2, "k": 3, "expand": "value"}}
UNSURE_TREES = {"mode": "tree", "tree": {"m": 1, "n": 3, "l": 2, "k": 3, "expand": "uncertainty"}}


def question(config: Config, environment: Environment, ticket: int) -> GroupAsked:
    """Return what a ticket asks."""
    claim = Claim(f"{ticket:06d}.0", ticket, 0, 1, 0, "", adopted=False)
    example = Example(f"q{ticket}", "Who was first?", ("Ada",), "nq")
    plan, params = make_plan(config.rollout), make_params(config.rollout)
    return ask(environment.chat, plan, params, claim, example, 0.0)


async def grow(config: Config, environment: Environment, live: LiveGroup, reference: str = "") -> Group:
    """Grow a group to its end."""
    gardener = make_gardener(config, environment, silence(), run_seed=11)
    await gardener.grow(live, lambda: None, reference=reference)
    return live.group


def undisturbed(shape: dict[str, object], ticket: int, reference: str = "") -> tuple[Recorder, Group]:
    """Return a group grown in one go, and its recorder."""
    config, environment = make_config(**shape), make_environment(ScriptedSampler(), ScriptedSearch())
    recorder = Recorder()

    async def main() -> Group:
        live = await LiveGroup.open(question(config, environment, ticket), recorder.write)
        return await grow(config, environment, live, reference)

    return recorder, anyio.run(main)


def interrupted(shape: dict[str, object], ticket: int, after: int, reference: str = "") -> Group:
    """Return a group whose worker dies after so many writes and which another worker then adopts."""
    config = make_config(**shape)
    recorder = Recorder(writes_left=after)

    async def first() -> None:
        environment = make_environment(ScriptedSampler(), ScriptedSearch())
        live = await LiveGroup.open(question(config, environment, ticket), recorder.write)
        await grow(config, environment, live, reference)

    async def second() -> Group:
        environment = make_environment(ScriptedSampler(), ScriptedSearch())
        heir = Recorder(recorder.records)
        return await grow(config, environment, LiveGroup.adopt(heir.records, heir.write), reference)

    with pytest.raises((CrashError, BaseExceptionGroup)):
        anyio.run(first)
    return anyio.run(second)


@pytest.mark.parametrize(
    ("shape", "ticket", "stride"),
    [(CHAINS, 0, 1), (CHAINS, 1, 1), (TREES, 0, 1), (TREES, 1, 3), (VALUE_TREES, 2, 4), (UNSURE_TREES, 3, 4)],
)
def test_adoption_anywhere_ends_as_if_undisturbed(shape: dict[str, object], ticket: int, stride: int) -> None:
    """Whatever write was the last, the heir grows the very group: same nodes, tokens, logprobs, rewards."""
    recorder, whole = undisturbed(shape, ticket)
    for after in range(1, recorder.writes, stride):
        assert timeless(interrupted(shape, ticket, after)) == timeless(whole), f"killed after write {after}"


def test_adoption_keeps_reference_logprobs() -> None:
    """The KL term's logprobs are asked for once per turn, and the heir asks for the missing ones only."""
    recorder, whole = undisturbed(TREES, 1, reference="base")
    references = [node.reference for tree in whole.trees.values() for node in tree.nodes.values()]
    assert any(references)
    for after in range(recorder.writes - 6, recorder.writes):
        assert timeless(interrupted(TREES, 1, after, reference="base")) == timeless(whole)


@pytest.mark.parametrize("shape", [CHAINS, TREES])
def test_no_schedule_changes_a_group(shape: dict[str, object]) -> None:
    """Latencies decide what comes first, never what comes."""
    _, whole = undisturbed(shape, 2)

    def delays(shuffle: int) -> Latency:
        return lambda said, seed: 0.004 * chance("late", shuffle, said, seed)

    for shuffle in range(3):
        config = make_config(**shape)
        sampler = ScriptedSampler(latency=delays(shuffle))
        environment = make_environment(sampler, ScriptedSearch(latency=delays(shuffle)))

        async def main(config: Config = config, environment: Environment = environment) -> Group:
            live = await LiveGroup.open(question(config, environment, 2), Recorder().write)
            return await grow(config, environment, live)

        assert timeless(anyio.run(main)) == timeless(whole)


def test_nothing_recorded_is_bought_again() -> None:
    """The heir neither samples a recorded turn again nor repeats a recorded search."""
    recorder, whole = undisturbed(TREES, 3)
    for after in range(1, recorder.writes, 2):
        check_nothing_bought_again(whole, after)


def check_nothing_bought_again(whole: Group, after: int) -> None:
    """Kill a worker of ticket 3 after so many writes, and count what its heir asks for."""
    config = make_config(**TREES)
    turns = sum(len(tree.nodes) for tree in whole.trees.values())
    searches = sum(
        node.observation is not None for tree in whole.trees.values() for node in tree.nodes.values()
    )
    half = Recorder(writes_left=after)
    samplers = ScriptedSampler(), ScriptedSampler()
    tools = ScriptedSearch(), ScriptedSearch()

    async def first() -> None:
        environment = make_environment(samplers[0], tools[0])
        live = await LiveGroup.open(question(config, environment, 3), half.write)
        await grow(config, environment, live)

    with pytest.raises((CrashError, BaseExceptionGroup)):
        anyio.run(first)
    sampled_before = sum(isinstance(event, TurnSampled) for _, event in half.records)
    observed_before = sum(isinstance(event, Observed) for _, event in half.records)

    async def second() -> None:
        heir = Recorder(half.records)
        await grow(config, make_environment(samplers[1], tools[1]), LiveGroup.adopt(heir.records, heir.write))

    anyio.run(second)
    assert sum(asked.num_samples for asked in samplers[1].requests) == turns - sampled_before
    assert len(tools[1].queries) == searches - observed_before


def test_first_turns_are_one_request_and_seeds_are_used_once() -> None:
    """The G first turns come from one request; no two requests of a group share a seed."""
    config, sampler = make_config(**CHAINS), ScriptedSampler()
    environment = make_environment(sampler, ScriptedSearch())

    async def main() -> Group:
        live = await LiveGroup.open(question(config, environment, 0), Recorder().write)
        return await grow(config, environment, live)

    group = anyio.run(main)
    assert sampler.requests[0].num_samples == 3
    assert all(asked.num_samples == 1 for asked in sampler.requests[1:])
    assert len({asked.seed for asked in sampler.requests}) == len(sampler.requests)
    assert [tree.nodes["0.0.0"].sample.sample_index for tree in group.trees.values()] == [0, 1, 2]


def test_samples_of_one_response_are_one_write() -> None:
    """A crash leaves either all turns of a response or none."""
    config = make_config(**TREES)
    recorder, _ = undisturbed(TREES, 0)
    whole = turns_by_request(recorder.records)
    assert max(whole.values()) > 1
    for after in range(1, recorder.writes, 2):
        half = Recorder(recorder.records[:1], writes_left=after)

        async def main(half: Recorder = half) -> None:
            environment = make_environment(ScriptedSampler(), ScriptedSearch())
            await grow(config, environment, LiveGroup.adopt(half.records, half.write))

        with contextlib.suppress(BaseExceptionGroup, CrashError):
            anyio.run(main)
        assert all(count == whole[key] for key, count in turns_by_request(half.records).items())


def turns_by_request(records: Records) -> Counter[tuple[int, str | None, int]]:
    """Return how many recorded turns each request made."""
    return Counter(
        (0 if event.parent is None and event.request == 0 else tree, event.parent, event.request)
        for tree, event in records
        if isinstance(event, TurnSampled)
    )


def test_closing_follows_from_the_records() -> None:
    """Both the heir and the undisturbed worker choose the same members."""
    recorder, whole = undisturbed(TREES, 2)
    heir = interrupted(TREES, 2, recorder.writes // 3)
    assert close_or_give_up(heir, 11) == close_or_give_up(whole, 11)
