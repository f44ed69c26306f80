"""Owns the byte layout of every key: fixed lengths, big-endian, so that key order is the order of things.

A record's identity is its key. Group records: ticket u64, attempt u16, tree u16, index u32, so that one
group is one contiguous scan and one tree is one. Journal records: index u64. Bundles: ticket u64,
attempt u16, part u16. Views: one letter for the kind, then the numbers.
"""

import functools
import struct
from enum import Enum
from typing import Any, NamedTuple

from core.errors import LogDamaged, StoreError
from core.ids import parse_uid


class Table(bytes, Enum):
    """The tables of a log; the value is the table's name on disk and part of each record's checksum.

    Being bytes, a member is hashed in C: tables are looked up several times per record.
    """

    META = b"meta"
    JOURNAL = b"journal"
    GROUPS = b"groups"
    BUNDLES = b"bundles"
    VIEWS = b"views"
    CACHE = b"cache"


MAX_ATTEMPT = 0xFFFF
MAX_TREE = 0xFFFF
MAX_INDEX = 0xFFFFFFFF
LONGEST = 511
"""Bytes of the longest key that LMDB takes."""

_JOURNAL = struct.Struct(">Q")
_GROUP = struct.Struct(">QHHI")
_PREFIX = struct.Struct(">QH")
_BUNDLE = struct.Struct(">QHH")
_TICKET_VIEW = struct.Struct(">cQ")
_GROUP_VIEW = struct.Struct(">cQH")

STATE_VIEW = b"s"
"""Key of the one row of counters."""
GROUP_VIEW, OPEN_VIEW = b"g", b"o"
"""Kinds of views by (ticket, attempt): each group's row; owner and worker of the open ones."""
PENDING_VIEW, REOPEN_VIEW, STEP_VIEW, POLICY_VIEW = b"p", b"r", b"t", b"v"
"""Kinds of views by one number: tickets without a fate, tickets to open again, steps, policy versions."""


class GroupKey(NamedTuple):
    """The numbers inside the key of a group's record."""

    ticket: int
    attempt: int
    tree: int
    position: int


def journal_key(index: int) -> bytes:
    """Return the key of journal record `index`; raises StoreError when there can be none."""
    return _packed(_JOURNAL, index)


def parse_journal_key(key: bytes) -> int:
    """Return the position inside a journal key; raises LogDamaged on another length."""
    return int(_parsed(_JOURNAL, key)[0])


@functools.lru_cache(maxsize=4096)
def group_prefix(uid: str) -> bytes:
    """Return the 10 bytes with which all keys of a group start.

    Raises FoldError on a malformed uid, StoreError on one with numbers that no group can have.
    """
    return _packed(_PREFIX, *parse_uid(uid))


def group_key(prefix: bytes, tree: int, index: int) -> bytes:
    """Return the key of record `index` of tree `tree` in the group with this prefix."""
    return prefix + tree.to_bytes(2, "big") + index.to_bytes(4, "big")


def parse_group_key(key: bytes) -> GroupKey:
    """Return the numbers inside a group record's key; raises LogDamaged on another length."""
    return GroupKey(*_parsed(_GROUP, key))


def bundle_key(prefix: bytes, part: int) -> bytes:
    """Return the key of part `part` of a group's bundle."""
    return prefix + part.to_bytes(2, "big")


def parse_bundle_key(key: bytes) -> tuple[int, int, int]:
    """Return ticket, attempt and part; raises LogDamaged on another length."""
    ticket, attempt, part = _parsed(_BUNDLE, key)
    return ticket, attempt, part


def after(prefix: bytes) -> bytes:
    """Return a key above every key that starts with `prefix`: the smallest, where there is one."""
    number = int.from_bytes(prefix, "big") + 1
    if number >> 8 * len(prefix):
        return b"\xff" * LONGEST
    return number.to_bytes(len(prefix), "big")


def view_key(kind: bytes, number: int) -> bytes:
    """Return the key of a view row by one number (a ticket, a step or a policy version).

    Raises StoreError when there can be none.
    """
    return _packed(_TICKET_VIEW, kind, number)


def group_view_key(kind: bytes, ticket: int, attempt: int) -> bytes:
    """Return the key of a view row by ticket and attempt; raises StoreError when there can be none."""
    return _packed(_GROUP_VIEW, kind, ticket, attempt)


def parse_view_number(key: bytes) -> int:
    """Return the number inside a key made by `view_key`; raises LogDamaged on another length."""
    return int(_parsed(_TICKET_VIEW, key)[1])


def parse_group_view(key: bytes) -> tuple[int, int]:
    """Return ticket and attempt inside a key made by `group_view_key`."""
    _, ticket, attempt = _parsed(_GROUP_VIEW, key)
    return ticket, attempt


def _packed(layout: struct.Struct, *parts: bytes | int) -> bytes:
    try:
        return layout.pack(*parts)
    except struct.error as exc:
        numbers = ", ".join(str(part) for part in parts if isinstance(part, int))
        raise StoreError(f"nothing in a log has the number {numbers}: {exc}") from exc


def _parsed(layout: struct.Struct, key: bytes) -> tuple[Any, ...]:
    if len(key) != layout.size:
        raise LogDamaged(f"a key of {len(key)} bytes, expected {layout.size}: {key.hex()}; run `verify`")
    return layout.unpack(key)
