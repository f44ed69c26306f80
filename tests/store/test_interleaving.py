"""Many writers at once, in threads and event loops: each stream holds what each wrote, in its order."""

import asyncio
import hashlib
import struct
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.errors import GroupClosed
from core.events import ChosenLeaf, GroupEvent, TurnSampled
from store import codec
from store.log import Log
from store.ports import Bundle, Claim, StreamWrite
from tests.store.children import until
from tests.store.making import asked, busy_writer, claim, open_run, sampled

GROUPS, TREES = 2, 3


class Request(NamedTuple):
    """One append: how many records go to which trees of which group."""

    group: int
    counts: dict[int, int]


class Work(NamedTuple):
    """What one writer does, one request after another."""

    in_loop: bool
    """As a coroutine, in one event loop with the other coroutines; else in a thread of its own."""
    requests: list[Request]


REQUESTS = st.builds(
    Request,
    group=st.integers(0, GROUPS - 1),
    counts=st.dictionaries(st.integers(1, TREES), st.integers(1, 4), min_size=1, max_size=TREES),
)
WORK = st.lists(
    st.builds(Work, in_loop=st.booleans(), requests=st.lists(REQUESTS, min_size=1, max_size=8)),
    min_size=2,
    max_size=6,
)


def marked(writer: int, number: int) -> TurnSampled:
    """Return a record that says who wrote it and as which of its records."""
    return msgspec.structs.replace(sampled(0, tokens=3), seed=writer, sample_index=number)


class Writers:
    """Runs writers on one log, and keeps what each of them wrote to each stream."""

    def __init__(self, log: Log, claims: list[Claim]) -> None:
        self._log = log
        self._claims = claims
        self.wrote: dict[tuple[int, int, int], list[GroupEvent]] = defaultdict(list)
        """(group, tree, writer) -> events."""

    def _writes(self, writer: int, number: int, request: Request) -> list[StreamWrite]:
        writes = []
        for tree, count in request.counts.items():
            events = [marked(writer, 10 * number + place) for place in range(count)]
            self.wrote[request.group, tree, writer] += events
            writes.append(StreamWrite(tree, None, events))
        return writes

    def in_thread(self, writer: int, work: Work) -> None:
        """Write, blocking."""
        for number, request in enumerate(work.requests):
            writes = self._writes(writer, number, request)
            self._log.groups.append_sync(self._claims[request.group], writes)

    async def in_loop(self, writer: int, work: Work) -> None:
        """Write as a coroutine."""
        for number, request in enumerate(work.requests):
            writes = self._writes(writer, number, request)
            await self._log.groups.append(self._claims[request.group], writes)

    def run(self, works: list[Work]) -> None:
        """Run them all at once."""

        async def loop() -> None:
            await asyncio.gather(
                *(self.in_loop(writer, work) for writer, work in enumerate(works) if work.in_loop)
            )

        with ThreadPoolExecutor(len(works) + 1) as pool:
            jobs = [pool.submit(asyncio.run, loop())]
            jobs += [
                pool.submit(self.in_thread, writer, work)
                for writer, work in enumerate(works)
                if not work.in_loop
            ]
            for job in jobs:
                job.result()


def own_digest(bundle: Bundle) -> str:
    """Return a group's digest as the documentation words it, by code of its own."""
    digest = hashlib.sha256(b"rolltape.group.v1")
    numbers = [
        [record.tree for record in bundle.records],
        [record.index for record in bundle.records],
        list(bundle.schemas),
        [len(record.raw) for record in bundle.records],
    ]
    for column in numbers:
        digest.update(struct.pack(f"<{len(column)}I", *column))
    for record in bundle.records:
        digest.update(codec.encode(record.event))
    return digest.hexdigest()


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(works=WORK)
def test_any_interleaving_keeps_every_writers_order_and_loses_nothing(works: list[Work]) -> None:
    """Positions have no gaps, each writer's records stand in its order, and the digest is over just these."""
    with tempfile.TemporaryDirectory() as place, open_run(Path(place) / "run", sync=False) as log:
        claims = [claim(log) for _ in range(GROUPS)]
        for group in claims:
            log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])])
        writers = Writers(log, claims)
        writers.run(works)
        for number, group in enumerate(claims):
            bundle = log.groups.fetch(group.uid)
            streams: dict[int, list[TurnSampled]] = defaultdict(list)
            for record in bundle.records[1:]:
                assert record.index == len(streams[record.tree])
                assert isinstance(record.event, TurnSampled)
                streams[record.tree].append(record.event)
            for tree in range(1, TREES + 1):
                for writer in range(len(works)):
                    theirs = [event for event in streams[tree] if event.seed == writer]
                    assert theirs == writers.wrote[number, tree, writer]
                assert len(streams[tree]) == sum(
                    len(writers.wrote[number, tree, writer]) for writer in range(len(works))
                )
            chosen = [ChosenLeaf(tree=1, leaf="0.0.0")]
            assert log.groups.close_sync(group, chosen, 1.0) == own_digest(bundle)
            assert log.groups.fetch(group.uid) == bundle
            assert log.group(group.uid).digest == own_digest(bundle)


Ending = Callable[[Log, Claim], Awaitable[object]]
ENDINGS: dict[str, Ending] = {
    "close": lambda log, group: log.groups.close(group, (), 2.0),
    "abort": lambda log, group: log.groups.abort(group, "late", 2.0),
    "close in a thread": lambda log, group: asyncio.to_thread(log.groups.close_sync, group, (), 2.0),
    "abort in a thread": lambda log, group: asyncio.to_thread(log.groups.abort_sync, group, "late", 2.0),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_group_does_not_end_without_a_record_that_came_while_it_was_sealed(
    tmp_path: Path, name: str
) -> None:
    """Sealing happens before the lock; where records were added meanwhile, it is done again with them."""

    async def scene() -> None:
        with open_run(tmp_path) as log:
            group = claim(log)
            log.groups.append_sync(group, [StreamWrite(0, 0, [asked(group.uid)])])
            writer = log._writer
            async with busy_writer(log):
                late = asyncio.create_task(log.groups.append(group, [StreamWrite(1, 0, [marked(0, 0)])]))
                await asyncio.to_thread(until, lambda: writer._queue.qsize() == 1)
                ending = asyncio.ensure_future(ENDINGS[name](log, group))
                await asyncio.to_thread(until, lambda: writer._queue.qsize() == 2)
            await asyncio.gather(late, ending)
            bundle = log.groups.fetch(group.uid)
            assert len(bundle.records) == log.group(group.uid).records == 2
            if name.startswith("close"):
                assert log.group(group.uid).digest == own_digest(bundle)
            with pytest.raises(GroupClosed, match="nothing can be added"):
                await log.groups.append(group, [StreamWrite(1, 1, [marked(0, 1)])])

    asyncio.run(scene())
