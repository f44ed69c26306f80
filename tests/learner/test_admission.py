"""Admission over random drops, aborts, skips and crashes: it never exceeds its bound and never deadlocks."""

import tempfile
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.events import (
    AdamParams,
    GoalSet,
    GroupDropped,
    JournalEvent,
    PlannedGroup,
    PolicyPublished,
    StepCommitted,
    StepPlanned,
)
from learner.selection import Rule, decide
from store.log import Log, open_log
from store.ports import Admission, Claim, GroupFate, GroupRow, NoClaim
from tests.learner.support import CHAINS, chain_group, make_config, open_event, writes

GOAL = 4
ACTIONS = st.sampled_from(
    [
        "claim",
        "claim",
        "claim",
        "close",
        "close",
        "abort",
        "give_up",
        "crash",
        "drop",
        "learn",
        "learn_skipped",
        "plan",
    ]
)


class Rules(NamedTuple):
    """One run's bounds."""

    max_staleness: int
    groups_per_step: int


class Simulation:
    """Workers without a policy and a learner without a trainer, on a real log."""

    def __init__(self, log: Log, rules: Rules) -> None:
        self.log = log
        self.rules = rules
        self.admission = Admission(rules.max_staleness, rules.groups_per_step)
        self.rule = Rule(rules.groups_per_step, rules.max_staleness, 1e9)
        self.workers = 0
        self.claims: list[Claim] = []
        self.stale: list[str] = []
        config = make_config(max_staleness=rules.max_staleness, groups_per_step=rules.groups_per_step)
        log.open_run(open_event(config))
        log.journal.append_sync([GoalSet(max_steps=GOAL)])

    @property
    def worker(self) -> str:
        """The id of the worker that is alive."""
        return f"worker-{self.workers}"

    def claim(self) -> Claim | NoClaim:
        """Claim a group; new tickets stay within the bound that staleness sets."""
        before = self.log.state()
        found = self.log.groups.claim_sync(self.worker, self.admission, 0.0)
        after = self.log.state()
        if after.next_ticket > before.next_ticket:
            bound = (self.rules.max_staleness + after.committed_steps + 1) * self.rules.groups_per_step
            assert after.live_tickets <= bound
        if isinstance(found, Claim):
            self.claims.append(found)
        return found

    def close(self, which: int = 0) -> None:
        """Complete one of the claimed groups."""
        if self.claims:
            claim = self.claims.pop(which % len(self.claims))
            script = chain_group(claim, CHAINS)
            self.log.groups.append_sync(claim, writes(script.records))
            self.log.groups.close_sync(claim, script.scored()[1], 0.0)

    def abort(self, which: int, *, final: bool) -> None:
        """Give one of the claimed groups up."""
        if self.claims:
            self.log.groups.abort_sync(self.claims.pop(which % len(self.claims)), "test", 0.0, final=final)

    def crash(self) -> None:
        """End the worker with everything it has; another one starts."""
        self.log._locks.release(self.worker)
        self.claims.clear()
        self.workers += 1

    def drop(self, which: int) -> None:
        """Drop a closed group."""
        rows = list(self.log.group_rows(GroupFate.CLOSED))
        if rows:
            uid = rows[which % len(rows)].uid
            self.log.journal.append_sync([GroupDropped(uid=uid, reason="test")])

    def plan(self) -> bool:
        """Plan the lowest tickets if they are all closed, as a learner does that then dies; tell whether it did."""
        state = self.log.state()
        if state.committed_steps == GOAL or state.planned_step is not None:
            return False
        step = state.committed_steps
        decision = decide(self.log.next_step_groups(self.rules.groups_per_step), step, self.rule, {})
        for row in decision.too_old:
            self.leave(row)
        if not decision.ready:
            return bool(decision.too_old)
        assert all(step - row.opened_at_step <= self.rules.max_staleness for row in decision.ready)
        planned = StepPlanned(
            step=step,
            groups=tuple(PlannedGroup(uid=row.uid, digest=row.digest) for row in decision.ready),
            estimator="group_mean",
            estimator_params={},
            shaping="base",
            shaping_params={},
            prefix_weight="each",
            kl_beta=0.0,
            loss="importance_sampling",
            loss_config={},
            adam=AdamParams(learning_rate=1.0),
            members=0,
            micro_batches=(),
            datum_digests=(),
            batch_digest="",
            policy_version=state.policy_version,
            fingerprints={},
        )
        self.log.journal.append_sync([planned])
        return True

    def leave(self, row: GroupRow) -> None:
        """Let a group go that is too old: a closed one is dropped, an open one's ticket is opened again."""
        self.stale.append(row.uid)
        if row.fate == GroupFate.CLOSED:
            self.log.journal.append_sync([GroupDropped(uid=row.uid, reason="stale")])
        else:
            self.claims = [claim for claim in self.claims if claim.uid != row.uid]
            claim = self.log.groups.take_over_sync(row.uid, "learner", 0.0)
            self.log.groups.abort_sync(claim, "stale", 0.0, final=False)

    def learn(self, *, skipped: bool = False) -> bool:
        """Train the planned step, or plan one and train it; tell whether anything was done."""
        moved = self.plan()
        state = self.log.state()
        if state.planned_step is None:
            return moved
        step, version = state.planned_step, state.policy_version + (not skipped)
        events: list[JournalEvent] = [StepCommitted(step=step, skipped=skipped, policy_version=version)]
        if not skipped:
            events.append(PolicyPublished(policy_version=version, weights_uri=f"w{version}", step=step + 1))
        self.log.journal.append_sync(events)
        return True

    def change(self, max_staleness: int) -> None:
        """Start everything again with another bound; workers keep what they had claimed."""
        self.rules = self.rules._replace(max_staleness=max_staleness)
        self.admission = Admission(max_staleness, self.rules.groups_per_step)
        self.rule = self.rule._replace(max_staleness=max_staleness)

    def act(self, action: str, which: int) -> None:
        """Do one of the things that can happen."""
        match action:
            case "claim":
                self.claim()
            case "close":
                self.close(which)
            case "abort" | "give_up":
                self.abort(which, final=action == "give_up")
            case "crash":
                self.crash()
            case "drop":
                self.drop(which)
            case "plan":
                self.plan()
            case _:
                self.learn(skipped=action == "learn_skipped")

    def finish(self) -> None:
        """From here on nothing fails: the goal must be reached."""
        patience = 100
        while self.log.state().committed_steps < GOAL:
            patience -= 1
            assert patience, f"deadlock: {self.log.state()}"
            while isinstance(self.claim(), Claim):
                pass
            while self.claims:
                self.close()
            while self.learn():
                pass
        assert self.log.groups.claim_sync(self.worker, self.admission, 0.0) is NoClaim.GOAL


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rules=st.builds(Rules, st.integers(0, 3), st.integers(1, 3)),
    actions=st.lists(st.tuples(ACTIONS, st.integers(0, 7)), max_size=40),
)
def test_admission_keeps_its_bound_and_always_gets_to_the_goal(
    rules: Rules, actions: list[tuple[str, int]]
) -> None:
    """Whatever happened before, and without ever making a group that is too old for its step."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_log(Path(folder) / "run", create=True, role="rollout", sync=False, map_size=1 << 24) as log,
    ):
        simulation = Simulation(log, rules)
        for action, which in actions:
            simulation.act(action, which)
        simulation.finish()
        state = log.state()
        assert state.fates["trained"] == GOAL * rules.groups_per_step
        assert simulation.stale == []


AHEAD = [("claim", 0)] * 3 + [("close", 0)] * 2 + [("learn", 0)]
"""Of three groups of a run that may be two steps ahead, one is trained, one closed and one open."""


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(rules=Rules(2, 1), before=AHEAD, bound=0, after=[])
@given(
    rules=st.builds(Rules, st.integers(0, 3), st.integers(1, 3)),
    before=st.lists(st.tuples(ACTIONS, st.integers(0, 7)), max_size=25),
    bound=st.integers(0, 3),
    after=st.lists(st.tuples(ACTIONS, st.integers(0, 7)), max_size=15),
)
def test_with_a_changed_bound_groups_leave_for_a_reason_and_the_goal_is_reached(
    rules: Rules, before: list[tuple[str, int]], bound: int, after: list[tuple[str, int]]
) -> None:
    """Only a tighter bound makes groups too old; each of them is in the books as stale."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_log(Path(folder) / "run", create=True, role="rollout", sync=False, map_size=1 << 24) as log,
    ):
        simulation = Simulation(log, rules)
        for action, which in before:
            simulation.act(action, which)
        simulation.change(bound)
        for action, which in after:
            simulation.act(action, which)
        simulation.finish()
        assert log.state().fates["trained"] == GOAL * rules.groups_per_step
        assert bound < rules.max_staleness or simulation.stale == []
        assert all(log.group(uid).reason == "stale" for uid in simulation.stale)
        assert len(set(simulation.stale)) == len(simulation.stale)
        assert before is not AHEAD or len(simulation.stale) == 2
