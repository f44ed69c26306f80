"""Owns the identifiers: uid, tree_uid and node id, their text forms and their order."""

import functools
import re
from typing import NamedTuple, NewType

from core.errors import FoldError

Uid = NewType("Uid", str)
"""`<ticket:06d>.<attempt>`: one attempt at one ticket, thus one group."""

TreeUid = NewType("TreeUid", str)
"""`<uid>/t<m>`, trees from 1; tree 0 is the group's own stream."""

NodeId = NewType("NodeId", str)
"""`<round>.<expansion>.<depth>`: where in its tree a turn stands, whenever it arrived."""

_NODE = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
"""Without leading zeros, so that no two texts name one node."""

GROUP_STREAM = 0
"""The tree number under which the group's own records (the `group` event) are kept."""


class UidParts(NamedTuple):
    """The numbers inside a uid."""

    ticket: int
    attempt: int


class NodeParts(NamedTuple):
    """The numbers inside a node id; tuple order is node order."""

    round: int
    expansion: int
    depth: int


def make_uid(ticket: int, attempt: int) -> Uid:
    """Return the uid of attempt `attempt` (from 0) at ticket `ticket` (from 0)."""
    return Uid(f"{ticket:06d}.{attempt}")


def parse_uid(uid: str) -> UidParts:
    """Return the numbers inside `uid`; raises FoldError when it is not one."""
    ticket, _, attempt = uid.partition(".")
    if not (ticket.isdecimal() and attempt.isdecimal()):
        raise FoldError(f"not a uid: {uid!r}, expected <ticket>.<attempt> such as 000123.0")
    return UidParts(int(ticket), int(attempt))


def make_tree_uid(uid: str, tree: int) -> TreeUid:
    """Return the tree_uid of tree `tree` (from 1) of group `uid`."""
    return TreeUid(f"{uid}/t{tree}")


def make_node(round_: int, expansion: int, depth: int) -> NodeId:
    """Return the node id of the turn at `depth` (from 0, counted from the root) of one expansion."""
    return NodeId(f"{round_}.{expansion}.{depth}")


@functools.lru_cache(4096)
def parse_node(node: str) -> NodeParts:
    """Return the numbers inside `node`, which sort in node order; raises FoldError if malformed."""
    parts = _NODE.fullmatch(node)
    if parts is None:
        raise FoldError(f"not a node id: {node!r}, expected <round>.<expansion>.<depth> such as 0.0.1")
    return NodeParts(int(parts[1]), int(parts[2]), int(parts[3]))
