"""Owns what a row of a published question set means, in any of the shapes that are about.

A row becomes an Example or is dropped for a stated reason; nothing about it raises.
"""

import hashlib
import math
import unicodedata
from collections.abc import Mapping
from typing import NamedTuple

from rollout.data import Example

QUESTION_FIELDS = ("question", "query", "problem")
ANSWER_FIELDS = ("golden_answers", "answers", "answer", "target", "reward_model", "ground_truth")
ID_FIELDS = ("id", "qid", "_id", "question_id")
SOURCE_FIELDS = ("data_source", "source", "dataset")
FIELDS = (*QUESTION_FIELDS, *ANSWER_FIELDS, *ID_FIELDS, *SOURCE_FIELDS)
"""All columns that are ever looked at."""

INSIDE_ANSWERS = ("ground_truth", "target", "value", "text", "aliases")
"""Where answers stand inside an object."""
MAX_NESTING = 4


class Dropped(NamedTuple):
    """A row that cannot be used."""

    reason: str


def read_row(row: object, default_source: str) -> Example | Dropped:
    """Return the row's example; its id is "" where the row has none."""
    if not isinstance(row, Mapping):
        return Dropped("not an object")
    question = _first_text(row, QUESTION_FIELDS)
    if not question:
        return Dropped("no question")
    for field in ANSWER_FIELDS:
        answers = tuple(dict.fromkeys(_answers(row.get(field), MAX_NESTING)))
        if answers:
            source = _first_text(row, SOURCE_FIELDS) or default_source
            return Example(_first_text(row, ID_FIELDS), question, answers, source)
    return Dropped("no answer")


def content_id(example: Example) -> str:
    """Return an id made of source and question: the same wherever the row stands in its file."""
    return f"{example.data_source}-{content_hash(example).hex()}"


def content_hash(example: Example) -> bytes:
    """Return 8 bytes that stand for source and question."""
    question = unicodedata.normalize("NFC", example.question)
    return hashlib.sha256(f"{example.data_source}\0{question}".encode()).digest()[:8]


def _first_text(row: Mapping[object, object], fields: tuple[str, ...]) -> str:
    """Return the first field that says something, "" if none does; numbers count as text."""
    for field in fields:
        value = row.get(field)
        text = value.strip() if isinstance(value, str) else "".join(_answers(value, 0))
        if text:
            return text
    return ""


def _answers(value: object, nesting: int) -> list[str]:
    """Return the usable texts of a value: null, NaN, booleans and blank text are none."""
    inside: list[object]
    match value:
        case None | bool():
            return []
        case str():
            return [text] if (text := value.strip()) else []
        case int():
            return [str(value)]
        case float():
            return [str(value)] if math.isfinite(value) else []
        case Mapping():
            inside = [value.get(field) for field in INSIDE_ANSWERS]
        case _:
            listed = value.tolist() if hasattr(value, "tolist") else value
            inside = list(listed) if isinstance(listed, list | tuple) else []
    if nesting == 0:
        return []
    return [text for item in inside for text in _answers(item, nesting - 1)]
