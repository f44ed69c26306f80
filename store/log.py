"""Owns the Log: one run's log as rollout, learner and viewers use it. Opening, the books, the owners.

The two ports are its `journal` and `groups`; everything else here reads the views in short snapshots.
"""

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from core.errors import ConfigError, Conflict, StoreError
from core.events import RunOpened, StepPlanned
from core.ids import parse_uid
from store import cache, codec, creating, keys
from store.claims import open_groups
from store.environment import Environment
from store.groups import LmdbGroups
from store.journal import LmdbJournal, views_of
from store.keys import Table
from store.locks import LEARNER, Locks, hold_open
from store.ports import GroupFate, GroupRow, PolicyRow, RunState, StepRow
from store.projections import PROJECTION_VERSION
from store.rebuilding import rebuild_views
from store.rows import to_group_row, to_policy_row, to_state, to_step_row
from store.versions import THIS_RELEASE
from store.views import decode_group, decode_policy
from store.writer import Job, T, Writer

Role = Literal["rollout", "learner", "reader"]
ROWS_PER_SNAPSHOT = 512


class Log:
    """An open log. Close it, or use it as a context manager; it must not be used after a fork."""

    def __init__(self, run_dir: Path, env: Environment, locks: Locks, role: Role) -> None:
        self.run_dir = run_dir
        self.role = role
        self.worker_id = f"{role}-{os.getpid()}-{secrets.token_hex(4)}"
        """The id under which this process claims groups; never used twice."""
        self._environment = env
        self._locks = locks
        self._writer = Writer(env)
        self.journal = LmdbJournal(env, self._writer)
        self.groups = LmdbGroups(env, self._writer, locks)

    def __repr__(self) -> str:
        return f"<Log {str(self.run_dir)!r} as {self.role}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write what is queued, give the locks back and close the environment."""
        self._writer.close()
        self.journal.close()
        self._environment.close()
        self._locks.release_all()

    def evict(self, worker: str) -> None:
        """Treat a worker that hangs as dead: its groups may be adopted, its appends fail from then on."""
        self._locks.evict(worker)

    def worker_is_dead(self, worker: str) -> bool:
        """Return whether the process behind a worker id is gone: its open groups wait to be adopted."""
        return self._locks.is_dead(worker)

    def open_run(self, event: RunOpened) -> None:
        """Create the run, or find that it is this one.

        The first writer wins; raises ConfigError when the log holds a run of another configuration.
        """
        stored = self.run_event()
        if stored is None:
            try:
                self.journal.append_sync([event], expect=0)
            except Conflict:
                stored = self.run_event()
        if stored is not None and stored.config_digest != event.config_digest:
            raise ConfigError(
                f"{str(self.run_dir)!r} holds a run of another configuration: its digest is "
                f"{stored.config_digest!r}, asked for is {event.config_digest!r}; use another --run directory"
            )

    def run_event(self) -> RunOpened | None:
        """Return what was frozen when the run was created, None in an empty log."""
        for record in self.journal.read(0, 1):
            assert isinstance(record.event, RunOpened)
            return record.event
        return None

    def state(self) -> RunState:
        """Return the run's counters."""
        with self._environment.read() as snapshot:
            return to_state(views_of(snapshot).counters())

    def group(self, uid: str) -> GroupRow:
        """Return a group's row; raises StoreError when there is none."""
        with self._environment.read() as snapshot:
            entry = views_of(snapshot).group(uid)
        if entry is None:
            raise StoreError(f"this log has no group {uid!r}")
        return to_group_row(*parse_uid(uid), entry)

    def group_rows(self, fate: GroupFate | None = None, start_ticket: int = 0) -> Iterator[GroupRow]:
        """Yield the groups' rows, all or those of one fate, in (ticket, attempt) order from a ticket on."""
        start = keys.group_view_key(keys.GROUP_VIEW, start_ticket, 0)
        while True:
            batch = self._group_batch(start)
            yield from (row for row in batch if fate is None or row.fate is fate)
            if len(batch) < ROWS_PER_SNAPSHOT:
                return
            start = keys.after(keys.group_view_key(keys.GROUP_VIEW, batch[-1].ticket, batch[-1].attempt))

    def next_step_groups(self, count: int) -> list[GroupRow]:
        """Return the latest attempts of the `count` lowest tickets without a fate.

        They may be open, closed, or aborted and waiting to be opened again; fewer when fewer were claimed.
        """
        rows: list[GroupRow] = []
        with self._environment.read() as snapshot:
            views = views_of(snapshot)
            for key, value in snapshot.scan(Table.VIEWS, keys.PENDING_VIEW, keys.after(keys.PENDING_VIEW)):
                if len(rows) == count:
                    break
                ticket = keys.parse_view_number(key)
                attempt = int.from_bytes(codec.unpack(Table.VIEWS, key, value).body, "big")
                entry = views.group_at(ticket, attempt)
                assert entry is not None
                rows.append(to_group_row(ticket, attempt, entry))
        return rows

    def pinned_weights(self) -> dict[int, str]:
        """Return policy version -> weights URI of every version that an open group samples from."""
        with self._environment.read() as snapshot:
            views = views_of(snapshot)
            entries = [views.group(uid) for uid, _ in open_groups(snapshot)]
        return {entry.policy_version: entry.weights_uri for entry in entries if entry is not None}

    def step(self, step: int) -> StepRow:
        """Return a step's row; raises StoreError when it was never planned."""
        with self._environment.read() as snapshot:
            entry = views_of(snapshot).step(step)
        if entry is None:
            raise StoreError(f"this log has no step {step}: {self.state().committed_steps} are committed")
        return to_step_row(step, entry)

    def plan(self, step: int) -> StepPlanned:
        """Return what a step was planned to be; raises StoreError when it was never planned."""
        event = self.journal.get(self.step(step).planned_index).event
        assert isinstance(event, StepPlanned)
        return event

    def policies(self) -> list[PolicyRow]:
        """Return every published policy version, ascending; version 0 is what the run started from."""
        with self._environment.read() as snapshot:
            found = list(snapshot.scan(Table.VIEWS, keys.POLICY_VIEW, keys.after(keys.POLICY_VIEW)))
        return [
            to_policy_row(
                keys.parse_view_number(key), decode_policy(codec.unpack(Table.VIEWS, key, value).body)
            )
            for key, value in found
        ]

    def write_sync(self, job: Job[T], size: int) -> T:
        """Run a job of this package on the writer's thread; return its result once it is on disk."""
        return self._writer.run_sync(job, size)

    def cache_get(self, key: bytes) -> bytes | None:
        """Return what was cached under `key`, None when nothing was or it is damaged."""
        return cache.get(self._environment, key)

    def cache_put(self, key: bytes, value: bytes) -> None:
        """Cache a value. Never blocks and promises nothing: a full queue or disk drops it."""
        self._writer.try_run(cache.put_job(key, value), len(value))

    def _group_batch(self, start: bytes) -> Sequence[GroupRow]:
        rows: list[GroupRow] = []
        with self._environment.read() as snapshot:
            for key, value in snapshot.scan(Table.VIEWS, start, keys.after(keys.GROUP_VIEW)):
                entry = decode_group(codec.unpack(Table.VIEWS, key, value).body)
                rows.append(to_group_row(*keys.parse_group_view(key), entry))
                if len(rows) == ROWS_PER_SNAPSHOT:
                    break
        return rows


def open_log(
    run_dir: Path,
    *,
    create: bool = False,
    readonly: bool = False,
    role: Role = "reader",
    map_size: int | None = None,
    sync: bool = True,
) -> Log:
    """Open the log of the run in `run_dir`; with `create`, make it when there is none.

    Role "learner" takes the learner's lock, raising LogBusy with the holder's pid. `map_size` (bytes) is that
    of a new log and the least of an existing one, by default ROLLTAPE_MAP_SIZE or 1 TiB. `sync=False` gives
    up the promise that an acknowledged append is on disk; for throw-away logs. Raises LogForeign, LogDamaged,
    LogTooNew or StoreError, and then has changed nothing.
    """
    try:
        return _open(run_dir, create, readonly, role, map_size, sync)
    except OSError as exc:
        raise StoreError(f"cannot open the log in {str(run_dir)!r}: {exc}") from exc


def _open(run_dir: Path, create: bool, readonly: bool, role: Role, map_size: int | None, sync: bool) -> Log:
    folder = run_dir / creating.LOG_DIR
    if not folder.is_dir():
        if not create:
            raise StoreError(f"no log in {str(run_dir)!r}: create the run first (`rollout` or `learn`)")
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        creating.create(run_dir, map_size)
    locks = hold_open(run_dir, readonly=readonly)
    try:
        env = Environment(folder, readonly=readonly, map_size=map_size, sync=sync)
        try:
            _settle_in(env, locks, role)
        except BaseException:
            env.close()
            raise
    except BaseException:
        locks.release_all()
        raise
    return Log(run_dir, env, locks, role)


def _settle_in(env: Environment, locks: Locks, role: Role) -> None:
    """Take the lock that goes with the role; bring an older log up to this release."""
    if role == "learner":
        locks.take(LEARNER)
    if env.versions == THIS_RELEASE:
        return
    if not env.readonly:
        rebuild_views(env)
    elif env.versions.projections < PROJECTION_VERSION:
        raise StoreError(
            f"the views of {str(env.path)!r} are of an older release ({env.versions}): open the log once for "
            "writing, or run `rebuild`"
        )
