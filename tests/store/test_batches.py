"""What waits is written in one transaction, and means the same as one request after another."""

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import GroupClosed, OwnerLost
from core.events import (
    GoalSet,
    GroupAborted,
    GroupDropped,
    JournalEvent,
    PlannedGroup,
    PolicyPublished,
    StepCommitted,
)
from core.events import (
    GroupClosed as GroupClosedEvent,
)
from store.claims import adopt
from store.journal import views_of
from store.log import Log
from store.ports import Admission, Claim, StreamWrite
from store.rebuilding import rebuild
from store.verify import verify
from tests.store.making import asked, busy_writer, chain, claim, open_run, plan
from tests.store.telling import told

GROUPS = 3
DIGEST = "d" * 64
Request = Callable[[Log, Sequence[Claim]], Coroutine[Any, Any, object]]


def appending(group: int, owner: int, tree: int, expect: int | None, start: int, count: int) -> Request:
    """Append a piece of a chain with the claim of some owner."""
    events = chain(tree)[start : start + count]
    return lambda log, claims: log.groups.append(
        claims[group]._replace(owner=owner), [StreamWrite(tree, expect, events)]
    )


def taking_over(group: int, worker: str) -> Request:
    """Take a group over, as a thread of its own would."""

    async def request(log: Log, claims: Sequence[Claim]) -> object:

        uid = claims[group].uid
        return await log._writer.run(
            lambda snapshot: adopt(snapshot, views_of(snapshot), uid, worker, 1.0), 1
        )

    return request


def recording(*events: JournalEvent, expect: int | None = None) -> Request:
    """Append to the journal."""
    return lambda log, _: log.journal.append(events, expect)


def claiming(per_step: int) -> Request:
    """Claim a group."""
    return lambda log, _: log.groups.claim("worker-9", Admission(0, per_step), 1.0)


def uid_of(group: int) -> str:
    """Return the uid of a group."""
    return f"{group:06d}.0"


NUMBERS = st.integers(0, GROUPS - 1)
UIDS = NUMBERS.map(uid_of)
REQUESTS: st.SearchStrategy[Request] = st.one_of(
    st.builds(
        appending,
        NUMBERS,
        st.integers(1, 2),
        st.integers(1, 2),
        st.none() | st.integers(0, 4),
        st.integers(0, 4),
        st.integers(1, 2),
    ),
    st.builds(appending, NUMBERS, st.just(1), st.just(1), st.none(), st.just(0), st.just(1)),
    st.builds(taking_over, NUMBERS, st.sampled_from(["worker-7", "worker-8"])),
    st.builds(claiming, st.integers(1, 6)),
    st.builds(lambda uid: recording(GroupClosedEvent(uid=uid, chosen=(), records=0, digest=DIGEST)), UIDS),
    st.builds(
        lambda uid, final: recording(GroupAborted(uid=uid, reason="r", final=final)), UIDS, st.booleans()
    ),
    st.builds(lambda uid: recording(GroupDropped(uid=uid, reason="r")), UIDS),
    st.builds(
        lambda uid, step: recording(plan(step, [PlannedGroup(uid=uid, digest=DIGEST)])),
        UIDS,
        st.integers(0, 1),
    ),
    st.builds(
        lambda step: recording(StepCommitted(step=step, skipped=False, policy_version=0)), st.integers(0, 1)
    ),
    st.builds(
        lambda version: recording(PolicyPublished(policy_version=version, weights_uri="w", step=0)),
        st.integers(0, 2),
    ),
    st.builds(lambda expect: recording(GoalSet(max_steps=1), expect=expect), st.none() | st.integers(3, 9)),
)


def plain(outcome: object) -> object:
    """Return a result, or what kind of error it was."""
    return type(outcome) if isinstance(outcome, BaseException) else outcome


def history(
    run_dir: Path, requests: Sequence[Request], *, together: bool
) -> tuple[list[object], dict[str, Any]]:
    """Return outcomes and what the log tells, where the requests were made together or one after another."""

    async def scene() -> tuple[list[object], dict[str, Any]]:
        with open_run(run_dir, sync=False) as log:
            claims = [claim(log, worker="worker-1") for _ in range(GROUPS)]
            for group in claims:
                log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])])
            outcomes: list[object] = []
            if together:
                async with busy_writer(log):
                    tasks = [asyncio.ensure_future(request(log, claims)) for request in requests]
                    await asyncio.sleep(0)
                    assert log._writer._queue.qsize() == len(requests)
                outcomes += await asyncio.gather(*tasks, return_exceptions=True)
            else:
                for request in requests:
                    outcomes += await asyncio.gather(request(log, claims), return_exceptions=True)
            return list(map(plain, outcomes)), told(log)

    return asyncio.run(scene())


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(requests=st.lists(REQUESTS, min_size=2, max_size=12))
def test_requests_in_one_transaction_mean_the_same_as_in_many(requests: list[Request]) -> None:
    """Each sees those before it: owners, fates, positions, books; those that fail leave nothing behind."""
    with tempfile.TemporaryDirectory() as place:
        one, many = Path(place) / "one", Path(place) / "many"
        assert history(one, requests, together=True) == history(many, requests, together=False)
        assert rebuild(one) == rebuild(many)


def test_an_owner_is_asked_for_again_after_a_change_of_owner_in_the_same_transaction(tmp_path: Path) -> None:
    """What was found of a group holds until anything changes in the books."""
    first = appending(0, 1, 1, 0, 0, 1)
    late = appending(0, 1, 1, 1, 1, 1)
    ours = appending(0, 2, 1, 1, 1, 1)
    end = recording(GroupAborted(uid=uid_of(0), reason="r"))
    outcomes, _ = history(tmp_path, [first, taking_over(0, "worker-7"), late, ours, end, ours], together=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, Claim)] == [
        None,
        OwnerLost,
        None,
        5,
        GroupClosed,
    ]
    assert {finding.kind for finding in verify(tmp_path)} <= {"group"}
