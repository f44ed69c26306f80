"""Owns the draft of the next step, made on a thread of its own while the trainer works on this one.

Only whole steps are drafted, and only from groups that are closed, so a draft is what would be made later;
one that no longer fits (other groups, another learning rate) is thrown away.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from core.errors import RolltapeError
from learner.batch import Recipe, Taken, assemble, fetch, step_digest
from learner.rebuild import Rebuilt
from learner.step import Prepared, prepare_batch
from store.ports import GroupFate, GroupRow, Groups


class Draft(NamedTuple):
    """A step that is ready to be planned."""

    uids: tuple[str, ...]
    rebuilt: Rebuilt
    prepared: Prepared


def make_draft(taken: Sequence[Taken], recipe: Recipe) -> Draft:
    """Return the step of these groups; raises FoldError, RewardError or EstimatorError."""
    batch = assemble(taken, recipe.settings)
    prepared = prepare_batch(batch)
    digest = step_digest(batch, prepared.digests, recipe)
    rebuilt = Rebuilt(tuple(taken), batch, prepared.digests, recipe, digest)
    return Draft(tuple(one.group.uid for one in taken), rebuilt, prepared)


class Ahead:
    """At most one draft in the making."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="next-step")
        self._pending: Future[Draft] | None = None

    def __repr__(self) -> str:
        return f"<Ahead {'drafting' if self._pending else 'idle'}>"

    def start(self, rows: Sequence[GroupRow], recipe: Recipe, groups_per_step: int) -> None:
        """Draft the step of `rows` if they are a whole step of closed groups."""
        whole = len(rows) == groups_per_step and all(row.fate == GroupFate.CLOSED for row in rows)
        if whole and self._pending is None:
            self._pending = self._thread.submit(lambda: make_draft(fetch(self._groups, rows), recipe))

    def take(self, taken: Sequence[Taken], recipe: Recipe) -> Draft:
        """Return the draft of these groups, made ahead where that fits and now where it does not."""
        pending, self._pending = self._pending, None
        if pending is not None:
            draft = _result(pending)
            uids = tuple(one.group.uid for one in taken)
            if draft is not None and draft.uids == uids and draft.rebuilt.recipe == recipe:
                return draft
        return make_draft(taken, recipe)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def _result(pending: Future[Draft]) -> Draft | None:
    """Return a finished draft; what went wrong in it will show again when the step is made in earnest."""
    try:
        return pending.result()
    except RolltapeError:
        return None
