"""Owns the text of single tokens: what each id stands for, and raw bytes where it is part of a character."""

import codecs
import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol

REPLACEMENT: Final = "\ufffd"
_DECODER: Final = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """The ids that control the chat format."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of ids."""
        ...

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """Return an id as the vocabulary spells it; None when there is no such id."""
        ...


class Piece(NamedTuple):
    """One token id as a person reads it."""

    kind: Literal["text", "special", "bytes", "unknown"]
    text: str
    """The text; of a "bytes" piece, its bytes in hex."""
    raw: bytes = b""
    """Of a "bytes" piece: part of a character."""


class Pieces:
    """The pieces of one tokenizer, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._known: dict[int, Piece] = {}

    def __repr__(self) -> str:
        return f"<Pieces of {type(self._tokenizer).__name__}, {len(self._known)} looked up>"

    def piece(self, token: int) -> Piece:
        """Return what a token id stands for."""
        if token not in self._known:
            self._known[token] = self._look_up(token)
        return self._known[token]

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Return one text per token; a character spread over tokens stands at the first of them."""
        pieces = [self.piece(token) for token in tokens]
        texts = [piece.text if piece.kind != "bytes" else _hex(piece.raw) for piece in pieces]
        start = 0
        while start < len(pieces):
            stop = start + 1
            if pieces[start].kind == "bytes":
                while stop < len(pieces) and pieces[stop].kind == "bytes":
                    stop += 1
                _join_characters(pieces, texts, start, stop)
            start = stop
        return texts

    def _look_up(self, token: int) -> Piece:
        try:
            spelled = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, OverflowError):
            spelled = None
        if spelled is None:
            return Piece("unknown", f"token {token}")
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if token in self._special:
            return Piece("special", text)
        raw = _raw_bytes(spelled) if REPLACEMENT in text else None
        if raw is not None:
            return Piece("bytes", raw.hex(), raw)
        lost_space = spelled.startswith("▁") and not text.startswith(" ")
        return Piece("text", f" {text}" if lost_space else text)


def _join_characters(pieces: Sequence[Piece], texts: list[str], start: int, stop: int) -> None:
    """Put whole characters made of the byte pieces start..stop-1 at the first piece of each."""
    first = start
    while first < stop:
        decoder = _DECODER()
        text = ""
        for last in range(first, stop):
            try:
                text += decoder.decode(pieces[last].raw)
            except UnicodeDecodeError:
                break
            if not decoder.getstate()[0]:
                texts[first] = text
                texts[first + 1 : last + 1] = [""] * (last - first)
                first = last
                break
        first += 1


def _hex(raw: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in raw)


def _byte_letters() -> dict[str, int]:
    """Return the letter → byte table of byte-level BPE (GPT-2's bytes_to_unicode)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_LETTERS: Final = _byte_letters()


def _raw_bytes(spelled: str) -> bytes | None:
    """Return the bytes that a vocabulary entry spells, None when it does not spell bytes."""
    if found := _BYTE_TOKEN.fullmatch(spelled):
        return bytes.fromhex(found[1])
    if all(letter in _LETTERS for letter in spelled):
        return bytes(_LETTERS[letter] for letter in spelled)
    return None
