"""The rollout worker on a real log: claiming, closing, waiting, giving up, adopting, stopping."""

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from core.config import BudgetSettings, Config
from core.errors import (
    CodeNotAllowed,
    DataError,
    EngineDied,
    EngineError,
    ServiceBusy,
    ToolError,
    WeightsGone,
)
from core.events import (
    GoalSet,
    GroupAborted,
    Outcome,
    PlannedGroup,
    PolicyPublished,
    StepCommitted,
    TurnSampled,
)
from core.tree import Group, fold_group
from rollout.data import Example
from rollout.progress import Progress, Voice
from rollout.run import Options, run_rollouts
from rollout.tickets import Tickets
from rollout.tools import ToolResult
from rollout.workers import Ending
from store.log import Log
from store.ports import GroupFate
from tests.fakes import Asked, ScriptedSampler, ScriptedSearch, answer, call, make_config, make_environment
from tests.rollout.logs import open_run, plan
from tests.rollout.support import timeless

EXAMPLES = [Example(f"q{index}", f"Who was number {index}?", ("Ada",), "nq") for index in range(7)]


class Heard:
    """What a run told."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.notices: list[str] = []
        self.calls = 0
        self.most_open = 0

    def voice(self) -> Voice:
        """Return the voice that tells it here."""

        def notify(progress: Progress) -> None:
            self.calls += 1
            self.most_open = max(self.most_open, progress.trajectories_open)

        return Voice(self.progress, notify, self.notices.append)


def roll(
    log: Log,
    sampler: ScriptedSampler,
    search: ScriptedSearch | None = None,
    *,
    config: Config | None = None,
    tickets: int | None = 3,
    beside: Callable[[], object] | None = None,
) -> tuple[Ending, Heard]:
    """Roll out until the end, with another task beside it if there is one."""
    heard = Heard()
    environment = make_environment(sampler, search or ScriptedSearch())
    options = Options(tickets, pause=0.01)

    async def main() -> Ending:
        ending: list[Ending] = []

        async def work() -> None:
            ending.append(
                await run_rollouts(
                    log,
                    config or make_config(group_size=3),
                    EXAMPLES,
                    environment,
                    heard.voice(),
                    options,
                )
            )

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                if beside is not None:
                    await anyio.to_thread.run_sync(beside)
        return ending[0]

    try:
        return anyio.run(main), heard
    except BaseExceptionGroup as raised:
        (error,) = raised.exceptions
        raise error from None


def group(log: Log, uid: str) -> Group:
    """Return a recorded group."""
    return fold_group((record.tree, record.event) for record in log.groups.fetch(uid).records)


def sure(prompt: str, seed: int, index: int) -> str:
    """Search once, then answer."""
    return answer("Ada") if "All about" in prompt else call("it")


def train(log: Log, steps: int, groups: int = 2) -> None:
    """Stand in for the learner: commit steps as soon as their groups are closed."""
    for step in range(log.state().committed_steps, steps):
        while True:
            seen = log.journal.length()
            rows = log.next_step_groups(groups)
            if len(rows) == groups and all(row.fate is GroupFate.CLOSED for row in rows):
                break
            assert log.journal.wait_sync(seen, 30)
        log.journal.append_sync([plan(step, [PlannedGroup(uid=row.uid, digest=row.digest) for row in rows])])
        log.journal.append_sync(
            [
                StepCommitted(step=step, skipped=False, policy_version=step + 1),
                PolicyPublished(policy_version=step + 1, weights_uri=f"w{step + 1}", step=step + 1),
            ]
        )


def wide(**rollout: object) -> Config:
    """Return a configuration that admits many groups at once."""
    config = make_config(group_size=3, **rollout)
    return msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, groups_per_step=100)
    )


def test_groups_are_asked_grown_scored_and_closed(tmp_path: Path) -> None:
    """Each ticket becomes a closed group of its shuffled question, with all its leaves as members."""
    with open_run(tmp_path) as log:
        ending, heard = roll(log, ScriptedSampler(sure))
        assert ending is Ending.GOAL
        rows = list(log.group_rows())
        assert [(row.ticket, row.fate) for row in rows] == [(n, GroupFate.CLOSED) for n in range(3)]
        assert len({group(log, row.uid).asked.example_id for row in rows}) == 3
        for row in rows:
            assert [choice.tree for choice in row.chosen] == [1, 2, 3]
            for tree in group(log, row.uid).trees.values():
                first, last = tree.nodes.values()
                assert first.tool_call is not None
                assert first.observation is not None
                assert first.observation.content == "[1] All about it."
                assert last.answer is not None
                assert (last.answer.outcome, last.answer.answer) == (Outcome.ANSWERED, "Ada")
                assert last.reward is not None
                assert last.reward.value == 1.0
        assert (heard.progress.groups_closed, heard.progress.trajectories_ended, heard.progress.turns) == (
            3,
            9,
            18,
        )
        assert (heard.progress.search_calls, heard.progress.reward_sum, heard.progress.groups_open) == (
            9,
            9.0,
            0,
        )
        assert heard.calls > 18


def test_claims_pause_for_the_learner_and_end_at_the_goal(tmp_path: Path) -> None:
    """On-policy: a step's groups, then a wait for its commit; at the goal the worker ends by itself."""
    config = make_config(group_size=3)
    config = msgspec.structs.replace(
        config, learner=msgspec.structs.replace(config.learner, groups_per_step=2)
    )
    with open_run(tmp_path) as log:
        log.journal.append_sync([GoalSet(max_steps=3)])
        ending, _ = roll(
            log, ScriptedSampler(sure), config=config, tickets=None, beside=lambda: train(log, 3)
        )
        assert ending is Ending.GOAL
        rows = list(log.group_rows())
        assert [(row.fate, row.step, row.policy_version, row.weights_uri) for row in rows] == [
            (GroupFate.TRAINED, ticket // 2, ticket // 2, f"w{ticket // 2}" if ticket > 1 else "")
            for ticket in range(6)
        ]


def test_what_is_open_at_the_goal_is_given_up(tmp_path: Path) -> None:
    """Nobody will train it: a group in work when the goal is reached is aborted with that reason."""
    config = make_config(group_size=3)
    learner = msgspec.structs.replace(config.learner, groups_per_step=1, max_staleness=5)
    config = msgspec.structs.replace(config, learner=learner)
    sampler = ScriptedSampler(
        sure, latency=lambda said, seed: 30.0 if "number" in said and slow(said) else 0.0
    )
    with open_run(tmp_path) as log:
        order = [EXAMPLES[place].question for place in _order(7)]

        def slow(said: str) -> bool:
            return order[1] in said

        def goal() -> None:
            train(log, 1, groups=1)
            log.journal.append_sync([GoalSet(max_steps=1)])

        sampler = ScriptedSampler(sure, latency=lambda said, seed: 30.0 if slow(said) else 0.0)
        ending, _ = roll(log, sampler, config=config, tickets=None, beside=goal)
        assert ending is Ending.GOAL
        row = log.group("000001.0")
        assert (row.fate, row.reason, row.final) == (GroupFate.ABORTED, "run_ended", True)


def _order(questions: int) -> list[int]:
    tickets = Tickets(0, questions)
    return [tickets.position(ticket) for ticket in range(questions)]


def test_expired_weights_open_the_ticket_again(tmp_path: Path) -> None:
    """A group whose weights are gone is never scored; its ticket is sampled from the newest weights."""

    def faults(asked: Asked) -> EngineError | None:
        return WeightsGone("w0 is gone") if asked.weights_uri == "" and expired else None

    expired = True
    with open_run(tmp_path) as log:

        def publish() -> None:
            while not any(isinstance(record.event, GroupAborted) for record in log.journal.read()):
                assert log.journal.wait_sync(log.journal.length(), 30)
            log.journal.append_sync([PolicyPublished(policy_version=1, weights_uri="w1", step=0)])

        _, heard = roll(log, ScriptedSampler(sure, faults=faults), tickets=1, beside=publish)
        rows = list(log.group_rows())
        assert rows[0].fate is GroupFate.ABORTED
        assert rows[0].reason.startswith("weights_expired")
        assert not rows[0].final
        assert (rows[-1].ticket, rows[-1].fate, rows[-1].weights_uri) == (0, GroupFate.CLOSED, "w1")
        assert not any(tree.nodes for tree in group(log, rows[0].uid).trees.values())
        assert any("weights_expired" in notice for notice in heard.notices)


def test_dead_engine_ends_the_worker_and_leaves_its_groups(tmp_path: Path) -> None:
    """EngineDied reaches the caller as it is; the groups stay open and the next worker adopts them."""
    sampler = ScriptedSampler(
        sure, faults=lambda asked: EngineDied("the engine is gone") if len(asked.prompt) > 150 else None
    )
    with open_run(tmp_path) as log:
        with pytest.raises(EngineDied, match="the engine is gone"):
            roll(log, sampler)
        assert {row.fate for row in log.group_rows()} == {GroupFate.OPEN}
    with open_run(tmp_path) as log:
        ending, heard = roll(log, ScriptedSampler(sure))
        assert ending is Ending.GOAL
        assert heard.progress.groups_adopted == 3
        assert {(row.attempt, row.fate) for row in log.group_rows()} == {(0, GroupFate.CLOSED)}


def test_a_stopped_worker_leaves_all_to_the_next(tmp_path: Path) -> None:
    """Cancelling keeps what is finished; the rest is adopted and ends as if there had been no stop."""
    sampler = ScriptedSampler(latency=lambda said, seed: 0.01)

    def stop_at_the_tenth(asked: Asked) -> None:
        if len(sampler.requests) >= 10:
            scopes[0].cancel()

    scopes: list[anyio.CancelScope] = []
    sampler.faults = stop_at_the_tenth

    async def main(log: Log) -> None:
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            environment = make_environment(sampler, ScriptedSearch())
            await run_rollouts(
                log, make_config(group_size=3), EXAMPLES, environment, Heard().voice(), Options(3)
            )

    with open_run(tmp_path / "a") as log:
        anyio.run(main, log)
        assert GroupFate.OPEN in {row.fate for row in log.group_rows()}
    with open_run(tmp_path / "a") as log:
        roll(log, ScriptedSampler())
        stopped = [timeless(group(log, row.uid)) for row in log.group_rows()]
    with open_run(tmp_path / "b") as log:
        roll(log, ScriptedSampler())
        assert [timeless(group(log, row.uid)) for row in log.group_rows()] == stopped


def test_void_groups_are_tried_three_times(tmp_path: Path) -> None:
    """Search down: every trajectory is void, nothing is scored, and the third attempt is the last."""
    with open_run(tmp_path) as log:
        _, heard = roll(log, ScriptedSampler(sure), ScriptedSearch(fails=lambda query: True), tickets=1)
        rows = list(log.group_rows())
        assert [(row.attempt, row.fate, row.final) for row in rows] == [
            (0, GroupFate.ABORTED, False),
            (1, GroupFate.ABORTED, False),
            (2, GroupFate.ABORTED, True),
        ]
        assert rows[0].reason == "all_void: void_tool (no answer in time)"
        tree = group(log, rows[0].uid).trees[1]
        leaf = tree.nodes["0.0.0"]
        assert leaf.observation is not None
        assert (leaf.observation.status, leaf.observation.tokens, leaf.reward) == ("timeout", b"", None)
        assert heard.progress.search_faults == 9


def test_one_void_trajectory_is_left_out(tmp_path: Path) -> None:
    """The group closes with the others."""
    failed: list[int] = []

    def second_fails(asked: Asked) -> EngineError | None:
        if asked.num_samples > 1 or failed:
            return None
        failed.append(asked.seed)
        return ServiceBusy("no capacity")

    sampler = ScriptedSampler(sure, faults=second_fails)
    with open_run(tmp_path) as log:
        roll(log, sampler, tickets=1)
        row = log.group("000000.0")
        trees = group(log, row.uid).trees
        (void,) = [tree for tree in trees.values() if tree.unborn]
        assert void.unborn["0.0.1"].outcome is Outcome.VOID_ENGINE
        assert void.unborn["0.0.1"].detail == "no capacity"
        assert [choice.tree for choice in row.chosen] == [index for index in trees if index != void.index]


def test_observed_faults_are_the_policys_problem(tmp_path: Path) -> None:
    """With on_fault = observe the policy reads the notice and goes on."""
    config = make_config(group_size=3)
    config = msgspec.structs.replace(config, tools=msgspec.structs.replace(config.tools, on_fault="observe"))

    def give_up(prompt: str, seed: int, index: int) -> str:
        return answer("Ada") if "Search failed" in prompt else call("it")

    with open_run(tmp_path) as log:
        roll(
            log, ScriptedSampler(give_up), ScriptedSearch(fails=lambda query: True), config=config, tickets=1
        )
        row = log.group("000000.0")
        assert row.fate is GroupFate.CLOSED
        leaf = group(log, row.uid).trees[1].nodes["0.0.1"]
        assert leaf.reward is not None
        assert leaf.reward.value == 1.0


def test_a_late_group_is_let_go(tmp_path: Path) -> None:
    """When the learner takes over a group, the worker stops working on it and goes on with others."""
    sampler = ScriptedSampler(sure, latency=lambda said, seed: 30.0)
    with open_run(tmp_path) as log:

        def take_over() -> None:
            while not list(log.group_rows()):
                assert log.journal.wait_sync(log.journal.length(), 30)
            claim = log.groups.take_over_sync("000000.0", "learner-1", 0.0)
            log.groups.abort_sync(claim, "group_deadline", 0.0, final=True)

        _, heard = roll(log, sampler, tickets=1, beside=take_over)
        assert heard.progress.groups_lost == 1
        assert log.group("000000.0").reason == "group_deadline"


def test_budget_stops_new_groups(tmp_path: Path) -> None:
    """When the closed groups have used up the budget, no other group is opened."""
    config = msgspec.structs.replace(
        make_config(group_size=3, concurrency=3), budget=BudgetSettings(search_calls=4)
    )
    with open_run(tmp_path) as log:
        ending, heard = roll(log, ScriptedSampler(sure), config=config, tickets=100)
        assert ending is Ending.BUDGET
        assert len(list(log.group_rows())) <= 3
        assert any("search_calls" in notice for notice in heard.notices)
        assert {row.fate for row in log.group_rows()} == {GroupFate.CLOSED}


def test_too_long_prompts_are_given_up_at_once(tmp_path: Path) -> None:
    """A question without room for an answer costs no request; if all are such, that is an error."""
    sampler = ScriptedSampler(sure)
    with open_run(tmp_path) as log:
        with pytest.raises(DataError, match="max_trajectory_tokens"):
            roll(log, sampler, config=wide(max_trajectory_tokens=20), tickets=300)
        assert not sampler.requests
        rows = [row for row in log.group_rows() if row.fate is GroupFate.ABORTED]
        assert {(row.reason, row.final) for row in rows} == {("prompt_too_long", True)}


@pytest.mark.parametrize("limit", [1, 4, 20])
def test_concurrency_is_bounded(tmp_path: Path, limit: int) -> None:
    """Never more requests in flight than trajectories are allowed, and no groups hoarded beyond that."""
    sampler = ScriptedSampler(latency=lambda said, seed: 0.02)
    with open_run(tmp_path) as log:
        _, heard = roll(log, sampler, config=wide(concurrency=limit), tickets=7)
        assert min(limit, 6) <= sampler.most_running <= limit
        assert heard.most_open < limit + 3, "groups are claimed only while trajectories are below the bound"
        assert {row.fate for row in log.group_rows()} == {GroupFate.CLOSED}


class RefusedSearch(ScriptedSearch):
    """A search whose keys are refused."""

    async def run(self, arguments: object) -> ToolResult:  # type: ignore[override]
        """Say that it is of no use."""
        return ToolResult((), ok=False, status="auth", error="the keys are refused", fatal=True)


def test_hopeless_tool_ends_the_worker(tmp_path: Path) -> None:
    """Refused keys stop the run with their reason, and nothing is lost."""
    with open_run(tmp_path) as log:
        with pytest.raises(ToolError, match="keys are refused"):
            roll(log, ScriptedSampler(sure), RefusedSearch())
        assert {row.fate for row in log.group_rows()} == {GroupFate.OPEN}


def test_user_policy_is_refused_without_permission(tmp_path: Path) -> None:
    """An expansion policy of the user's own is imported only when allowed by name."""
    config = make_config(mode="tree", tree={"expand": "tests.fakes:policy"})
    with open_run(tmp_path) as log, pytest.raises(CodeNotAllowed, match="--allow-code"):
        roll(log, ScriptedSampler(sure), config=config)


def test_each_group_samples_from_the_weights_of_its_claim(tmp_path: Path) -> None:
    """Policy version and URI of every turn are those under which the group was opened."""
    with open_run(tmp_path) as log:
        log.journal.append_sync([PolicyPublished(policy_version=4, weights_uri="w4", step=0)])
        sampler = ScriptedSampler(sure)
        roll(log, sampler, tickets=2)
        assert {asked.weights_uri for asked in sampler.requests} == {"w4"}
        events: Sequence[object] = [record.event for record in log.groups.fetch("000000.0").records]
        assert {event.policy_version for event in events if isinstance(event, TurnSampled)} == {4}


def test_members_get_reference_logprobs_for_a_kl_term(tmp_path: Path) -> None:
    """With kl_beta every turn of a chosen leaf carries the base model's logprobs of its own tokens."""
    config = make_config(mode="tree", tree={"m": 2, "n": 2, "l": 1, "k": 2})
    config = msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, kl_beta=0.001))
    with open_run(tmp_path) as log:
        sampler = ScriptedSampler()
        roll(log, sampler, config=config, tickets=1)
        row = log.group("000000.0")
        trees = group(log, row.uid).trees
        for choice in row.chosen:
            for node in trees[choice.tree].path(choice.leaf):
                assert node.reference is not None
                assert node.reference.base_model == "scripted"
                assert len(node.reference.logprobs) == len(node.sample.tokens)
