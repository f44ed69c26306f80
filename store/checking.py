"""Owns what an event must satisfy before it is written to a group; the fold's own rules are core's."""

from collections.abc import Sequence

import numpy as np

from core.arrays import LOGPROB_DTYPE, TOKEN_DTYPE, view_logprobs, view_tokens
from core.errors import StoreError
from core.events import GroupAsked, GroupEvent, Observed, ReferenceScored, TurnSampled
from core.ids import GROUP_STREAM
from store.keys import MAX_TREE
from store.ports import StreamWrite


def check_writes(uid: str, writes: Sequence[StreamWrite]) -> None:
    """Raise StoreError, naming the node and the rule, when a record must not be stored.

    All logprobs are looked at together, because a single look costs more than a turn's numbers; only where
    something seems wrong are the records looked at one by one. Negative ids are left to `pack_tokens`.
    """
    tokens: list[bytes] = []
    logprobs: list[bytes] = []
    good = True
    for tree, _, events in writes:
        good = good and 0 <= tree <= MAX_TREE
        for event in events:
            match event:
                case TurnSampled():
                    good = good and len(event.tokens) == len(event.sampled_logprobs)
                    tokens.append(event.tokens)
                    logprobs.append(event.sampled_logprobs)
                case Observed():
                    tokens += (event.tokens, event.prompt_reset or b"")
                case GroupAsked():
                    good = good and tree == GROUP_STREAM and event.uid == uid
                    tokens.append(event.prompt)
                case ReferenceScored():
                    logprobs.append(event.logprobs)
                case _:
                    pass
    if not (good and _numbers_are_good(tokens, logprobs)):
        raise StoreError(_problems(uid, writes)[0])


def _numbers_are_good(tokens: Sequence[bytes], logprobs: Sequence[bytes]) -> bool:
    for raw in (*tokens, *logprobs):
        if len(raw) & 3:
            return False
    joined = b"".join(logprobs)
    if not joined:
        return True
    values = view_logprobs(joined)
    # A NaN fails the first.
    return bool(np.maximum.reduce(values) <= 0) and bool(np.minimum.reduce(values) > -np.inf)


def _problems(uid: str, writes: Sequence[StreamWrite]) -> list[str]:
    """Return what is wrong with the records, one by one."""
    found: list[str] = []
    for tree, _, events in writes:
        if not 0 <= tree <= MAX_TREE:
            found.append(f"tree {tree!r} of group {uid}, expected 0 to {MAX_TREE}")
        for event in events:
            problem = problem_of(uid, tree, event)
            if problem:
                found.append(f"a record of group {uid}, tree {tree} is refused: {problem}")
    return found


def problem_of(uid: str, tree: int, event: GroupEvent) -> str:
    """Return what is wrong with a record, in words, or ""."""
    match event:
        case GroupAsked():
            if tree != GROUP_STREAM or event.uid != uid:
                return f"`group` of {event.uid!r}, expected that of {uid!r} in stream {GROUP_STREAM}"
            return _tokens_problem("prompt", event.prompt)
        case TurnSampled():
            return _tokens_problem(f"tokens of node {event.node}", event.tokens) or _logprobs_problem(
                f"sampled_logprobs of node {event.node}", event.sampled_logprobs, len(event.tokens)
            )
        case Observed():
            return _tokens_problem(f"tokens of node {event.node}", event.tokens) or _tokens_problem(
                f"prompt_reset of node {event.node}", event.prompt_reset or b""
            )
        case ReferenceScored():
            return _logprobs_problem(f"logprobs of node {event.node}", event.logprobs, None)
        case _:
            return ""


def _tokens_problem(what: str, raw: bytes) -> str:
    if len(raw) % TOKEN_DTYPE.itemsize:
        return f"{what} have {len(raw)} bytes, expected a multiple of {TOKEN_DTYPE.itemsize}"
    lowest = view_tokens(raw).min(initial=0)
    return f"{what} hold the negative id {lowest}" if lowest < 0 else ""


def _logprobs_problem(what: str, raw: bytes, token_bytes: int | None) -> str:
    if len(raw) % LOGPROB_DTYPE.itemsize or (token_bytes is not None and len(raw) != token_bytes):
        expected = "a multiple of 4" if token_bytes is None else f"{token_bytes}, one logprob per token"
        return f"{what} have {len(raw)} bytes, expected {expected}"
    values = view_logprobs(raw)
    good = np.isfinite(values) & (values <= 0)
    if not good.all():
        offset = int(np.argmin(good))
        return f"{what} hold {float(values[offset])!r} at offset {offset}, expected finite numbers <= 0"
    return ""
