"""Owns a group in work: its fold, always exactly what is on disk, and the one way in which it grows."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack

import anyio

from core.events import GroupAsked, GroupEvent
from core.ids import GROUP_STREAM
from core.tree import Group, fold_group
from store.ports import StreamWrite

Write = Callable[[Sequence[StreamWrite]], Awaitable[None]]
"""Returns when the writes, all of them or none, are on disk."""


class LiveGroup:
    """The recorded events of one group, folded; appended first to the log, then to the fold."""

    def __init__(self, group: Group, lengths: Mapping[int, int], write: Write) -> None:
        self.group = group
        self._lengths = dict(lengths)
        self._write = write
        self._locks: dict[int, anyio.Lock] = {}

    def __repr__(self) -> str:
        return f"<LiveGroup {self.group.uid}, {sum(self._lengths.values())} records>"

    @classmethod
    async def open(cls, asked: GroupAsked, write: Write) -> "LiveGroup":
        """Record what is asked and return the new group."""
        await write([StreamWrite(GROUP_STREAM, 0, (asked,))])
        return cls(fold_group([(GROUP_STREAM, asked)]), {GROUP_STREAM: 1}, write)

    @classmethod
    def adopt(cls, records: Iterable[tuple[int, GroupEvent]], write: Write) -> "LiveGroup":
        """Return the group that `records`, pairs of tree number and event in stored order, tell of."""
        lengths: dict[int, int] = {}
        kept = list(records)
        for tree, _ in kept:
            lengths[tree] = lengths.get(tree, 0) + 1
        return cls(fold_group(kept), lengths, write)

    def preview(self, events: Mapping[int, Sequence[GroupEvent]]) -> Group:
        """Return the group as it would be with these events; other trees are left as they are."""
        trees = self.group.trees
        concerned = self.group._replace(trees={tree: trees[tree] for tree in events if tree in trees})
        grown = fold_group(
            [(tree, event) for tree in sorted(events) for event in events[tree]], onto=concerned
        )
        return self.group._replace(trees=dict(sorted({**trees, **grown.trees}.items())))

    async def append(self, events: Mapping[int, Sequence[GroupEvent]]) -> None:
        """Append events per tree in one transaction. A tree's appends keep their order; trees do not wait."""
        async with AsyncExitStack() as held:
            for tree in sorted(events):  # one order, so that two appends cannot wait for each other
                await held.enter_async_context(self._lock(tree))
            await self._write(
                [StreamWrite(tree, self._lengths.get(tree, 0), events[tree]) for tree in sorted(events)]
            )
            self.group = self.preview(events)
            for tree, added in events.items():
                self._lengths[tree] = self._lengths.get(tree, 0) + len(added)

    def _lock(self, tree: int) -> anyio.Lock:
        if tree not in self._locks:
            self._locks[tree] = anyio.Lock(fast_acquire=True)
        return self._locks[tree]
