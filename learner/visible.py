"""Owns what a person sees of text that models and search results wrote: nothing in it acts or hides.

Control characters (a terminal obeys them), direction controls (they reorder what is read) and invisible
characters (instructions are hidden in them) become their code point in brackets.
"""

from typing import Final

HIDDEN_RANGES: Final = (
    (0x00, 0x08),
    (0x0B, 0x1F),
    (0x7F, 0x9F),
    (0xAD, 0xAD),
    (0x61C, 0x61C),
    (0x180E, 0x180E),
    (0x200B, 0x200B),
    (0x200E, 0x200F),
    (0x2028, 0x202E),
    (0x2060, 0x206F),
    (0xD800, 0xDFFF),
    (0xFEFF, 0xFEFF),
    (0xFFF9, 0xFFFB),
    (0xE0000, 0xE007F),
)
"""Code points that are never shown as themselves, both ends included. Tab and line feed are; so are the
joiners U+200C and U+200D, which scripts and emoji need. page_text.js has the same ranges (tested)."""

_NAMES: Final = {
    point: f"⟨U+{point:04X}⟩" for first, last in HIDDEN_RANGES for point in range(first, last + 1)
}


def visible(text: str) -> str:
    """Return `text` with every control, direction and invisible character as `⟨U+XXXX⟩`."""
    return text.translate(_NAMES)


def one_line(text: str, limit: int) -> str:
    """Return at most `limit` visible characters of `text` on one line, with … where it goes on."""
    head = text[: limit + 1].replace("\n", "⏎").replace("\t", " ")
    shown = visible(head)
    return shown if len(shown) <= limit and len(text) <= limit else shown[: limit - 1] + "…"
