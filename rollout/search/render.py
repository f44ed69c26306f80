"""Owns how passages are shown to the policy, as frames (ours) around data.

A passage without title is `[1] contents`; one with a title is a small form of title, content, source, URL.
"""

from collections.abc import Sequence

from rollout.encoding import Piece
from rollout.observations import Block, plain_block
from rollout.search.base import Passage

NO_RESULTS = "No results found."


def show(passages: Sequence[Passage]) -> tuple[Block, ...]:
    """Return one block per passage, numbered from 1; a notice where there is none."""
    if not passages:
        return (plain_block(NO_RESULTS),)
    return tuple(_block(passage, number) for number, passage in enumerate(passages, start=1))


def _block(passage: Passage, number: int) -> Block:
    head = f"[{number}]" if number == 1 else f"\n[{number}]"
    if not passage.title:
        return (Piece(head, trusted=True), Piece(f" {passage.content}", soft=True))
    pieces = [
        Piece(f"{head} Title: ", trusted=True),
        Piece(passage.title),
        Piece("\n    Content: ", trusted=True),
        Piece(passage.content, soft=True),
    ]
    for label, value in (("Source", passage.source), ("URL", passage.url)):
        if value:
            pieces += [Piece(f"\n    {label}: ", trusted=True), Piece(value)]
    return tuple(pieces)
