"""A state machine drives real processes on one log, kills them, and compares the log with the model.

Where a kill lands is the scheduler's choice, so whether the killed request was written is not the same in every
run of one history. Nothing that is drawn may depend on it: claims are picked by a number, not from a bundle,
whose size (and thereby which rules may run) would follow from what the log said.
"""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from core.errors import RolltapeError
from core.events import (
    ChosenLeaf,
    GoalSet,
    GroupAborted,
    GroupDropped,
    GroupEvent,
    JournalEvent,
    PlannedGroup,
    PolicyPublished,
    StepCommitted,
)
from store.ports import Admission, Claim, NoClaim, StreamWrite
from store.verify import verify
from tests.store.children import LogChild
from tests.store.making import asked, chain, open_run, plan, run_event, sampled
from tests.store.model import ModelLog
from tests.store.telling import timeless

WORKERS = ("w0", "w1")
LEARNER = "learner"
PICKS = st.integers(0, 7)
"""Which claim a rule uses, counted back from the newest."""
UNENDED = ("has not ended, so it is no leaf", "has no node", "has no tree")
"""What `verify` rightly says of the groups that are closed here."""


def expected(model: ModelLog) -> dict[str, Any]:
    """Return the same as the model tells it."""
    return {
        "journal": [timeless(event) for event in model.journal],
        "fates": model.fates(),
        "owners": {uid: (group.owner, group.worker) for uid, group in model.groups.items()},
        "streams": {
            uid: {tree: events for tree, events in group.streams.items() if events}
            for uid, group in model.groups.items()
        },
        "next": model.next_step_groups(3),
        "counters": (model.live, model.committed, model.goal, len(model.latest)),
        "policy": model.policy,
        "pinned": sorted({g.version: g.uri for g in model.groups.values() if g.fate == "open"}.items()),
    }


def turns(version: int) -> tuple[GroupEvent, ...]:
    """Return what is appended: the start of a chain, so that the fold accepts any prefix of it."""
    return (*chain(tokens=3, version=version)[:3], sampled(1, tokens=600, version=version))


class LogMachine(RuleBasedStateMachine):
    """Two workers and a learner, each a process, and the model."""

    @initialize()
    def start(self) -> None:
        """Open the run and start the processes."""
        self.place = tempfile.TemporaryDirectory()
        self.run_dir = Path(self.place.name) / "run"
        open_run(self.run_dir).close()
        self.model = ModelLog(run_event())
        self.children: dict[str, LogChild] = {}
        self.dead: set[str] = set()
        self.claims: list[Claim] = []

    def picked(self, pick: int) -> Claim | None:
        """Return a claim that was once given, None when there was none yet."""
        return self.claims[-1 - pick % len(self.claims)] if self.claims else None

    def keep(self, found: object) -> None:
        """Keep what a request gave, if it is a claim."""
        if isinstance(found, Claim):
            self.claims.append(found)

    def child(self, name: str) -> LogChild:
        """Return a living process of that role."""
        if name not in self.children:
            self.children[name] = LogChild(self.run_dir, "learner" if name == LEARNER else "rollout")
            self.dead.discard(LEARNER if name == LEARNER else "")
        return self.children[name]

    def worker(self, name: str) -> str:
        """Return the id under which a process claims."""
        return self.child(name).worker_id

    def kill(self, name: str) -> None:
        """SIGKILL a process."""
        child = self.children.pop(name, None)
        if child is not None:
            child.kill()
            self.dead.add(LEARNER if name == LEARNER else child.worker_id)

    def both(
        self, name: str, real: str, arguments: tuple[object, ...], says: Callable[[ModelLog], Any], kill: bool
    ) -> Any:
        """Do the same to log and model; where the process is killed in between, find out what came of it."""
        child = self.child(name)
        if kill:
            after = self.model.copy()
            with contextlib.suppress(RolltapeError):
                says(after)
            child.say((real, arguments, {}))
            self.kill(name)
            # A writer that dies while its last page is flushed has written, but only the next one shows it.
            other = self.child("w0" if name != "w0" else "w1")
            other.do("journal.append_sync", [])
            found = other.do("told")
            assert found in (expected(self.model), expected(after))
            if found == expected(after):
                self.model = after
            return None
        try:
            wanted: object = says(self.model)
        except RolltapeError as exc:
            wanted = type(exc)
        try:
            got: object = child.do(real, *arguments)
        except RolltapeError as exc:
            got = type(exc)
        if isinstance(wanted, type | Claim | NoClaim):
            assert got == wanted
        else:
            assert not isinstance(got, type), got
        return got

    @rule(
        name=st.sampled_from(WORKERS),
        staleness=st.integers(0, 1),
        per_step=st.integers(1, 3),
        kill=st.booleans(),
    )
    def claim(self, name: str, staleness: int, per_step: int, kill: bool) -> None:
        """Ask for a group, as a worker."""
        worker, admission = self.worker(name), Admission(staleness, per_step)
        found = self.both(
            name,
            "groups.claim_sync",
            (worker, admission, 0.0),
            lambda model: model.claim(worker, self.dead, admission),
            kill and name == "w0",
        )
        self.keep(found)

    @rule(
        name=st.sampled_from(WORKERS),
        pick=PICKS,
        tree=st.integers(1, 2),
        place=st.none() | st.integers(0, 3),
        count=st.integers(1, 2),
        kill=st.booleans(),
    )
    def append(self, name: str, pick: int, tree: int, place: int | None, count: int, kill: bool) -> None:
        """Append with a claim, at the end or at a place."""
        claim = self.picked(pick)
        if claim is None:
            return
        stream = self.model.groups[claim.uid].streams.get(tree, [])
        start = len(stream) if place is None else place
        writes = [StreamWrite(tree, start, turns(claim.policy_version)[start : start + count])]
        if not self.model.groups[claim.uid].streams.get(0):
            writes.insert(0, StreamWrite(0, None, [asked(claim.uid, claim.policy_version)]))
        self.both(
            name, "groups.append_sync", (claim, writes), lambda model: model.append(claim, writes), kill
        )

    @rule(
        name=st.sampled_from(WORKERS),
        pick=PICKS,
        leaf=st.sampled_from(["0.0.0", "0.0.1"]),
        kill=st.booleans(),
    )
    def close(self, name: str, pick: int, leaf: str, kill: bool) -> None:
        """Close with a claim; only groups with records are ever closed."""
        claim = self.picked(pick)
        if claim is not None and self.model.groups[claim.uid].streams.get(1):
            chosen = (ChosenLeaf(tree=1, leaf=leaf),)
            self.both(
                name,
                "groups.close_sync",
                (claim, chosen, 0.0),
                lambda model: model.close(claim, chosen),
                kill,
            )

    @rule(name=st.sampled_from(WORKERS), pick=PICKS, final=st.booleans(), reason=st.sampled_from(["a", "b"]))
    def abort(self, name: str, pick: int, final: bool, reason: str) -> None:
        """Give a group up with a claim."""
        claim = self.picked(pick)
        if claim is None:
            return

        def says(model: ModelLog) -> None:
            model.abort(claim, reason, final=final)

        child = self.child(name)
        try:
            says(self.model)
            wanted = None
        except RolltapeError as exc:
            wanted = type(exc)
        if wanted is None:
            child.do("groups.abort_sync", claim, reason, 0.0, final=final)
        else:
            with pytest.raises(wanted):
                child.do("groups.abort_sync", claim, reason, 0.0, final=final)

    @rule(pick=PICKS, kill=st.booleans())
    def take_over(self, pick: int, kill: bool) -> None:
        """Take a late group, as the learner."""
        claim = self.picked(pick)
        if claim is None:
            return
        self.child(LEARNER)
        found = self.both(
            LEARNER,
            "groups.take_over_sync",
            (claim.uid, LEARNER, 0.0),
            lambda model: model.adopt(claim.uid, LEARNER),
            kill,
        )
        self.keep(found)

    @rule(pick=PICKS, kind=st.sampled_from(["drop", "abort"]), final=st.booleans())
    def end(self, pick: int, kind: str, final: bool) -> None:
        """Drop or abort a group through the journal."""
        claim = self.picked(pick)
        if claim is None:
            return
        event: JournalEvent = GroupDropped(uid=claim.uid, reason="r")
        if kind == "abort":
            event = GroupAborted(uid=claim.uid, reason="r", final=final)
        self.record(event, kill=False)

    @rule(kill=st.booleans(), other=st.booleans())
    def plan(self, kill: bool, other: bool) -> None:
        """Plan the next step of what is closed, or the planned one again."""
        step, planned = self.model.committed, self.model.planned
        uids = [uid for uid, fate in sorted(self.model.fates().items()) if fate == "closed"][:2]
        if planned is not None:
            uids = [group.uid for group in planned.groups]
        child = self.child(LEARNER)
        groups = [PlannedGroup(uid=uid, digest=child.do("group", uid).digest) for uid in uids]
        self.record(plan(step, groups, estimator="grpo" if other else "group_mean"), kill=kill)

    @rule(kill=st.booleans())
    def commit(self, kill: bool) -> None:
        """Commit the planned step."""
        self.record(
            StepCommitted(step=self.model.committed, skipped=False, policy_version=self.model.policy[0]),
            kill=kill,
        )

    @rule(version=st.integers(0, 3))
    def publish(self, version: int) -> None:
        """Publish a policy, newer or not."""
        self.record(
            PolicyPublished(policy_version=version, weights_uri=f"w{version}", step=self.model.committed),
            kill=False,
        )

    @rule(steps=st.integers(1, 3))
    def aim(self, steps: int) -> None:
        """Set a goal."""
        self.record(GoalSet(max_steps=steps), kill=False)

    def record(self, event: JournalEvent, *, kill: bool) -> None:
        """Append a journal event."""
        self.both(LEARNER, "journal.append_sync", ([event],), lambda model: model.record(event), kill)

    @rule(name=st.sampled_from([*WORKERS, LEARNER]))
    def die(self, name: str) -> None:
        """Kill a process while it rests."""
        self.kill(name)

    @invariant()
    def agrees(self) -> None:
        """Log and model tell the same."""
        if hasattr(self, "model"):
            name = next(iter(self.children), "w1")
            found, wanted = self.child(name).do("told"), expected(self.model)
            for what, value in wanted.items():
                assert found[what] == value, what

    def teardown(self) -> None:
        """Verify the log; closed groups of this test have no scored leaves, which alone is found."""
        if not hasattr(self, "model"):
            return
        for child in self.children.values():
            child.kill()
        for finding in verify(self.run_dir):
            assert finding.kind == "group", finding
            assert any(words in finding.message for words in UNENDED), finding
        self.place.cleanup()


LogMachine.TestCase.settings = settings(
    max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_log_does_what_the_model_does = LogMachine.TestCase


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_log_does_what_the_model_does_for_long() -> None:
    """Longer histories, many more of them."""
    many = settings(
        max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(LogMachine, settings=many)
