"""Owns the views as typed rows over any store of keys and bodies, with their changes kept aside."""

from collections.abc import Callable

import msgspec

from core.ids import parse_uid
from store import keys
from store.ports import GroupFate
from store.rows import FATES, Counters, GroupEntry, OpenEntry, PolicyEntry, StepEntry

_encode = msgspec.msgpack.Encoder().encode
decode_group = msgspec.msgpack.Decoder(GroupEntry).decode
decode_open = msgspec.msgpack.Decoder(OpenEntry).decode
decode_step = msgspec.msgpack.Decoder(StepEntry).decode
decode_policy = msgspec.msgpack.Decoder(PolicyEntry).decode
decode_counters = msgspec.msgpack.Decoder(Counters).decode


class Views:
    """Rows as typed values over `read` (key -> body or None), with changes kept aside."""

    def __init__(self, read: Callable[[bytes], bytes | None]) -> None:
        self._read = read
        self._counters: Counters | None = None
        self.changes: dict[bytes, bytes | None] = {}
        """What `apply` changed: key -> body, None for a row that is gone."""

    def _get(self, key: bytes) -> bytes | None:
        return self.changes[key] if key in self.changes else self._read(key)

    def counters(self) -> Counters:
        """Return the run's counters."""
        if self._counters is None:
            body = self._get(keys.STATE_VIEW)
            self._counters = Counters() if body is None else decode_counters(body)
        return self._counters

    def set_counters(self, counters: Counters) -> None:
        """Replace the run's counters."""
        self._counters = counters
        self.changes[keys.STATE_VIEW] = _encode(counters)

    def group(self, uid: str) -> GroupEntry | None:
        """Return a group's row."""
        return self.group_at(*parse_uid(uid))

    def group_at(self, ticket: int, attempt: int) -> GroupEntry | None:
        """Return the row of an attempt at a ticket."""
        body = self._get(keys.group_view_key(keys.GROUP_VIEW, ticket, attempt))
        return None if body is None else decode_group(body)

    def set_group(self, uid: str, entry: GroupEntry) -> None:
        """Write a group's row, and its place among the open ones."""
        ticket, attempt = parse_uid(uid)
        self.changes[keys.group_view_key(keys.GROUP_VIEW, ticket, attempt)] = _encode(entry)
        open_key = keys.group_view_key(keys.OPEN_VIEW, ticket, attempt)
        is_open = entry.fate == FATES.index(GroupFate.OPEN)
        self.changes[open_key] = _encode(OpenEntry(entry.owner, entry.worker)) if is_open else None

    def open_entry(self, uid: str) -> OpenEntry | None:
        """Return owner and worker of a group if it is open."""
        body = self._get(keys.group_view_key(keys.OPEN_VIEW, *parse_uid(uid)))
        return None if body is None else decode_open(body)

    def reopen(self, ticket: int) -> int | None:
        """Return the aborted attempt after which a ticket is to be opened again."""
        body = self._get(keys.view_key(keys.REOPEN_VIEW, ticket))
        return None if body is None else int.from_bytes(body, "big")

    def set_attempt(self, kind: bytes, ticket: int, attempt: int | None) -> None:
        """Enter a ticket's attempt among the pending ones or those to open again, or take it out."""
        key = keys.view_key(kind, ticket)
        self.changes[key] = None if attempt is None else attempt.to_bytes(2, "big")

    def step(self, step: int) -> StepEntry | None:
        """Return a step's row."""
        body = self._get(keys.view_key(keys.STEP_VIEW, step))
        return None if body is None else decode_step(body)

    def set_step(self, step: int, entry: StepEntry) -> None:
        """Write a step's row."""
        self.changes[keys.view_key(keys.STEP_VIEW, step)] = _encode(entry)

    def set_policy(self, version: int, entry: PolicyEntry) -> None:
        """Write a policy version's row."""
        self.changes[keys.view_key(keys.POLICY_VIEW, version)] = _encode(entry)
