"""Owns question files: reading them, with every fault named by its line."""

from pathlib import Path

import msgspec

from core.errors import DataError


class Example(msgspec.Struct, frozen=True):
    """One question with its accepted answers."""

    id: str
    question: str
    answers: tuple[str, ...]
    data_source: str = ""


def load_examples(path: Path) -> list[Example]:
    """Return the questions of a JSONL file, in order; other fields are ignored.

    Raises DataError naming the line: no such file, no UTF-8, malformed JSON, a missing or mistyped field, a
    blank question, no answer, an id that stands twice; or a file without questions.
    """
    decoder = msgspec.json.Decoder(Example)
    examples: list[Example] = []
    lines_by_id: dict[str, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            example = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} line {number}: {error}; expected "
                '{"id": ..., "question": ..., "answers": [...], "data_source": ...}'
            ) from error
        _check(example, f"{path} line {number}")
        first = lines_by_id.setdefault(example.id, number)
        if first != number:
            raise DataError(f"{path} line {number}: id {example.id!r} stands on line {first} already")
        examples.append(example)
    if not examples:
        raise DataError(f"{path}: no questions in it, expected one JSON object per line")
    return examples


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(
            f"cannot read the questions file {str(path)!r}: {reason}; give a JSONL file"
        ) from error


def _check(example: Example, where: str) -> None:
    if not example.id:
        raise DataError(f"{where}: the id is empty; `prepare` makes ids from the content")
    if not example.question.strip():
        raise DataError(f"{where}: the question is blank")
    if not any(answer.strip() for answer in example.answers):
        raise DataError(f"{where}: no answer in 'answers', expected at least one")
