"""Texts of single tokens, and text made visible."""

import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from learner.pieces import Pieces
from learner.visible import HIDDEN_RANGES, one_line, visible
from tests.learner.told import encode, tokenizer

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
QWEN = Path(__file__).parents[3] / "shared" / "tokenizers" / "qwen3"


@given(TEXTS)
def test_the_texts_of_tokens_join_to_the_text(text: str) -> None:
    """Token by token nothing is lost or added, characters of several tokens included."""
    assert "".join(Pieces(tokenizer()).texts(encode(text))) == text


def test_a_character_of_several_tokens_stands_at_the_first() -> None:
    """The other tokens of the character are empty, and their bytes are known."""
    pieces = Pieces(tokenizer())
    ids = encode("🙂")
    assert pieces.texts(ids) == ["🙂", "", "", ""]
    assert b"".join(pieces.piece(token).raw for token in ids) == "🙂".encode()


def test_bytes_that_are_no_character_are_shown_in_hex() -> None:
    """A cut character is not a replacement mark; it is its bytes."""
    ids = encode("🙂")
    assert Pieces(tokenizer()).texts([*ids[:2], *encode("a"), ids[3]]) == ["\\xf0", "\\x9f", "a", "\\x82"]


def test_control_tokens_and_unknown_ids_are_told_apart() -> None:
    """Special tokens keep their name; an id that the tokenizer lacks is named by its number."""
    pieces = Pieces(tokenizer())
    [end] = encode("<|im_end|>")
    assert pieces.piece(end).kind == "special"
    assert pieces.piece(end).text == "<|im_end|>"
    assert pieces.piece(2_000_000_000).kind == "unknown"
    assert "2000000000" in pieces.piece(2_000_000_000).text


@pytest.mark.parametrize("text", ["Hello wörld 你好 🙂 𠜎\n\tcode", "  leading, trailing  ", "e\u0301"])
def test_a_published_tokenizer_is_read_alike(text: str) -> None:
    """Qwen3's tokens join to the text as well (it normalises to NFC before it encodes)."""
    if not QWEN.exists():
        pytest.skip("the shared Qwen3 tokenizer is not here")
    published = AutoTokenizer.from_pretrained(QWEN, local_files_only=True)
    ids = published.encode(text, add_special_tokens=False)
    assert "".join(Pieces(published).texts(ids)) == unicodedata.normalize("NFC", text)


@given(st.text())
def test_visible_text_hides_nothing(text: str) -> None:
    """No control, direction or invisible character is left; everything else stands as it was."""
    shown = visible(text)
    assert not any(low <= ord(letter) <= high for letter in shown for low, high in HIDDEN_RANGES)
    plain = [letter for letter in text if not any(low <= ord(letter) <= high for low, high in HIDDEN_RANGES)]
    assert [letter for letter in plain if letter not in "⟨⟩"] == [
        letter for letter in visible("".join(plain)) if letter not in "⟨⟩"
    ]


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("a\nb\tc", 9, "a⏎b c"),
        ("abcdef", 6, "abcdef"),
        ("abcdefg", 6, "abcde…"),
        ("\x1b[31m", 20, "⟨U+001B⟩[31m"),
        ("x" * 10**6, 3, "xx…"),
    ],
)
def test_one_line_is_short_and_says_that_it_goes_on(text: str, limit: int, shown: str) -> None:
    """Line breaks are marked, the length is bounded, and … stands for the rest."""
    assert one_line(text, limit) == shown


def test_long_runs_of_broken_characters_take_no_time() -> None:
    """Thousands of bytes that never make a character are read once, not once per byte."""
    ids = encode("🙂")
    pieces = Pieces(tokenizer())
    start = time.perf_counter()
    texts = pieces.texts([ids[0], ids[1], ids[2]] * 20_000)
    assert time.perf_counter() - start < 5
    assert texts[:3] == ["\\xf0", "\\x9f", "\\x99"]
