"""Owns text → token ids where some of the text is data: data can never become a protocol token.

Every added token of the tokenizer counts as one, special or not (`<|im_end|>`, `<tool_call>`, ...). Where
its string stands in untrusted text, the text is cut after the string's first character and the pieces are
encoded apart, so that it is spelt out by plain tokens. All other text is encoded as if in one piece.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from core.arrays import Int32
from core.errors import ConfigError

Message = Mapping[str, object]


class AddedToken(Protocol):
    """What is asked of one of the tokenizer's added tokens."""

    content: str
    normalized: bool


class Tokenizer(Protocol):
    """What is asked of a tokenizer (a transformers PreTrainedTokenizer)."""

    eos_token: str | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """The added tokens by id."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tools: Sequence[Message] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        enable_thinking: bool,
    ) -> str:
        """Return a conversation as text."""
        ...


class Piece(NamedTuple):
    """A stretch of text: ours (trusted: protocol tokens in it are meant) or data."""

    text: str
    trusted: bool = False
    soft: bool = False
    """May be shortened where there is too much of it."""


class Encoder:
    """Encodes pieces with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.added_tokens_decoder.values()
        for token in added:
            if len(token.content) < 2 or token.normalized:
                raise ConfigError(
                    f"this tokenizer's added token {token.content!r} cannot be kept out of retrieved text: "
                    "expected two characters or more and no normalisation; use another base model"
                )
        strings = sorted((token.content for token in added), key=len, reverse=True)
        alternatives = "|".join(map(re.escape, strings))
        self._added = re.compile(f"(?=({alternatives}))" if strings else r"(?!)")
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"<Encoder of {type(self._tokenizer).__name__}>"

    def encode(self, pieces: Iterable[Piece]) -> Int32:
        """Return the ids of the pieces joined, int32 [n]; no token is added at either end."""
        pieces = [Piece(_sound(piece.text), piece.trusted) for piece in pieces]
        text = "".join(piece.text for piece in pieces)
        places = [0, *self._cuts(pieces, text), len(text)]
        ids: list[int] = []
        for start, end in pairwise(places):
            if end > start:
                ids += self._tokenizer.encode(text[start:end], add_special_tokens=False)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, tokens: Int32 | Sequence[int]) -> str:
        """Return the text of tokens without special tokens; bytes of half a character become U+FFFD."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    def _cuts(self, pieces: Sequence[Piece], text: str) -> list[int]:
        """Return where to cut so that an added token's string survives only inside trusted text."""
        runs = _trusted_runs(pieces)
        starts = [run.start for run in runs]
        cuts: set[int] = set()
        for match in self._added.finditer(text):
            start, end = match.start(), match.start() + len(match.group(1))
            run = bisect_right(starts, start) - 1
            trusted_end = runs[run].stop if run >= 0 else 0
            if trusted_end <= start:
                cuts.add(start + 1)
            elif trusted_end < end:
                cuts.add(trusted_end)
        return sorted(cuts)


def _trusted_runs(pieces: Sequence[Piece]) -> list[range]:
    """Return where trusted text stands, neighbours joined."""
    runs: list[range] = []
    place = 0
    for piece in pieces:
        end = place + len(piece.text)
        if piece.trusted and runs and runs[-1].stop == place:
            runs[-1] = range(runs[-1].start, end)
        elif piece.trusted:
            runs.append(range(place, end))
        place = end
    return runs


def _sound(text: str) -> str:
    """Return the text with half surrogate pairs replaced: no encoder takes them."""
    return text.encode("utf-8", "replace").decode() if any("\ud800" <= c <= "\udfff" for c in text) else text
