"""Owns what a rollout process knows of the journal: what the run has cost, and what others have done."""

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from core.budget import Spent, add
from core.events import GroupAborted, GroupAdopted, GroupClosed, JournalEvent
from store.ports import Claim, Journal


class Watch:
    """Follows the journal: reads it once from the start, then takes in every record."""

    def __init__(self, journal: Journal) -> None:
        self.spent = Spent()
        self.length = 0
        self.ticks = 0
        """Grows with everything that happens; what news() compares."""
        self._journal = journal
        self._news = anyio.Event()
        self._guarded: dict[str, tuple[int, anyio.CancelScope]] = {}
        self.catch_up()

    def __repr__(self) -> str:
        return f"<Watch of {self.length} records, {len(self._guarded)} groups guarded>"

    async def follow(self) -> None:
        """Take in new records, for ever."""
        async for record in self._journal.follow(self.length):
            self._take(record.index, record.event)
            self.wake()

    def catch_up(self) -> None:
        """Take in what is there now, without waiting to be told."""
        for record in self._journal.read(self.length):
            self._take(record.index, record.event)

    def wake(self) -> None:
        """Tell whoever waits for news that something happened."""
        self.ticks += 1
        self._news.set()
        self._news = anyio.Event()

    async def news(self, seen: int, seconds: float) -> None:
        """Return when something has happened since `ticks` was `seen`, or after `seconds`."""
        event = self._news
        if self.ticks == seen:
            with anyio.move_on_after(seconds):
                await event.wait()

    def let_go(self) -> None:
        """Cancel every guarded scope."""
        for _, scope in self._guarded.values():
            scope.cancel()

    @contextmanager
    def guard(self, claim: Claim) -> Iterator[anyio.CancelScope]:
        """Yield a scope that is cancelled when another takes over or ends the group."""
        with anyio.CancelScope() as scope:
            self._guarded[claim.uid] = (claim.owner, scope)
            try:
                yield scope
            finally:
                del self._guarded[claim.uid]

    def _take(self, index: int, event: JournalEvent) -> None:
        if index < self.length:
            return
        self.spent = add(self.spent, event)
        self.length = index + 1
        if isinstance(event, GroupAdopted | GroupClosed | GroupAborted) and event.uid in self._guarded:
            owner, scope = self._guarded[event.uid]
            if not isinstance(event, GroupAdopted) or event.owner != owner:
                scope.cancel()
