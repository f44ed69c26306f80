"""Owns how numbers and token ids travel inside the page: in base64, as page_data.js reads them."""

import base64
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from core.arrays import Int32, Int64
from learner.pieces import Piece, Pieces

GROUP_BITS: Final = 7
MAX_BYTES: Final = 5
"""Seven bits a byte: enough for 2^35 different tokens."""


class VocabularyBlock(msgspec.Struct, frozen=True):
    """The token texts of the page, by their number on the page."""

    ids: list[int]
    texts: list[str]
    special: list[int]
    """Numbers of the chat format's control tokens."""
    bytes: list[int]
    """Numbers of tokens that are part of a character; their text is hex."""
    unknown: list[int]
    """Numbers of ids that the tokenizer does not know."""


class Vocabulary:
    """Numbers the tokens of one page in order of first use, so that frequent ones are short."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._numbers: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Vocabulary of {len(self._numbers)} tokens>"

    def pack(self, tokens: Int32) -> str:
        """Return base64 of the tokens' page numbers as variable-length integers (LEB128)."""
        distinct, first, inverse = np.unique(tokens, return_index=True, return_inverse=True)
        for position in np.argsort(first).tolist():
            self._numbers.setdefault(int(distinct[position]), len(self._numbers))
        numbers = np.array([self._numbers[int(token)] for token in distinct], dtype=np.int64)
        return pack_integers(numbers[inverse])

    def block(self) -> VocabularyBlock:
        """Return the texts of all tokens that were packed."""
        pieces = [self._pieces.piece(token) for token in self._numbers]
        return VocabularyBlock(
            ids=list(self._numbers),
            texts=[piece.text for piece in pieces],
            special=_numbers_of(pieces, "special"),
            bytes=_numbers_of(pieces, "bytes"),
            unknown=_numbers_of(pieces, "unknown"),
        )


def pack_integers(values: Int64) -> str:
    """Return base64 of int64 [n], each >= 0, as LEB128: seven bits a byte, low ones first."""
    shifts = np.arange(MAX_BYTES) * GROUP_BITS
    groups = (values[:, None] >> shifts) & 0x7F
    more = (values[:, None] >> (shifts + GROUP_BITS)) > 0
    used = np.ones_like(more)
    used[:, 1:] = more[:, :-1]
    packed = (groups | (more.astype(np.int64) << GROUP_BITS))[used].astype(np.uint8)
    return base64.b64encode(packed.tobytes()).decode()


def pack_floats(raw: bytes) -> str:
    """Return base64 of float32 little-endian bytes, as events hold them."""
    return base64.b64encode(raw).decode()


def _numbers_of(pieces: Iterable[Piece], kind: str) -> list[int]:
    return [number for number, piece in enumerate(pieces) if piece.kind == kind]
