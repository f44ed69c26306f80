"""Owns what the environment says as text: results in their frames, and how many of them fit.

Results are kept whole while they fit. If the first alone is too long, its content is cut at a token
boundary inside the intact frame.
"""

from collections.abc import Sequence
from typing import NamedTuple

from core.arrays import Int32
from rollout.encoding import Encoder, Piece

Block = tuple[Piece, ...]
"""One result: frame pieces (trusted) around data."""

CUT_TRIES = 16
"""How far back to look for a cut whose text is spelt by exactly the first tokens of the whole."""


class Fitted(NamedTuple):
    """The content of an observation."""

    pieces: Block
    content: str
    truncated: bool
    """The first result alone was too long, so it was cut."""
    kept: int
    """Results shown."""


def plain_block(text: str) -> Block:
    """Return a message of data alone."""
    return (Piece(text, soft=True),)


def text_of(pieces: Sequence[Piece]) -> str:
    """Return the pieces joined."""
    return "".join(piece.text for piece in pieces)


def strip_pieces(pieces: Sequence[Piece]) -> Block:
    """Return the pieces without white space at either end: chat templates trim message content."""
    kept = list(pieces)
    while kept and not (first := kept[0].text.lstrip()):
        kept.pop(0)
    if kept:
        kept[0] = kept[0]._replace(text=first)
    while kept and not (last := kept[-1].text.rstrip()):
        kept.pop()
    if kept:
        kept[-1] = kept[-1]._replace(text=last)
    return tuple(kept)


def fit(encoder: Encoder, blocks: Sequence[Block], max_tokens: int) -> Fitted:
    """Return as many leading blocks as fit into `max_tokens` tokens, at least the first, cut if need be."""
    for count in range(len(blocks), 0, -1):
        pieces = strip_pieces([piece for block in blocks[:count] for piece in block])
        if len(encoder.encode(pieces)) <= max_tokens:
            return Fitted(pieces, text_of(pieces), truncated=False, kept=count)
    if not blocks:
        return Fitted((), "", truncated=False, kept=0)
    pieces = _cut_first(encoder, blocks[0], max_tokens)
    return Fitted(pieces, text_of(pieces), truncated=True, kept=1)


def _cut_first(encoder: Encoder, block: Block, max_tokens: int) -> Block:
    """Shorten the soft piece of a block; where even an empty one is too much, the whole block as data."""
    place = next((i for i, piece in enumerate(block) if piece.soft), None)
    if place is not None:
        before, soft, after = block[:place], block[place], block[place + 1 :]
        whole = encoder.encode((soft,))
        for count in _lengths(encoder, (*before, *after), whole, max_tokens):
            shorter = soft._replace(text=_head(encoder, soft.text, whole, count))
            pieces = strip_pieces((*before, shorter, *after))
            if len(encoder.encode(pieces)) <= max_tokens:
                return pieces
    text = text_of(block)
    whole = encoder.encode(plain_block(text))
    for count in range(min(max_tokens, len(whole)), 0, -1):
        pieces = strip_pieces(plain_block(_head(encoder, text, whole, count)))
        if len(encoder.encode(pieces)) <= max_tokens:
            return pieces
    return ()


def _lengths(encoder: Encoder, frame: Block, whole: Int32, max_tokens: int) -> range:
    """Return how many content tokens to try, most first."""
    room = max_tokens - len(encoder.encode(frame)) + 2  # joints may save a token on either side
    return range(min(room, len(whole)), -1, -1)


def _head(encoder: Encoder, text: str, whole: Int32, count: int) -> str:
    """Return the longest head of `text` that its first `count` tokens spell in whole characters."""
    for fewer in range(count, max(count - CUT_TRIES, 0), -1):
        head = encoder.decode(whole[:fewer])
        if text.startswith(head):
            return head
    return text[: len(encoder.decode(whole[:count]).rstrip("\ufffd"))]
