"""Reads reported real-world inputs and loads the real tokenizers; tests skip where they are not at hand."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
SHARED = ROOT / ".." / "shared"
EMBEDDED = ROOT / "engine" / "embedded" / "base"
Reported = dict[str, Any]
"""A reported input with its right value."""

HOTPOT = SHARED / "data" / "hotpotqa-100"


def cases(kind: str, *only: str) -> list[object]:
    """Return the reported inputs of a kind (those whose name starts with one of `only`) as parameters."""
    folder = SHARED / "cases" / kind
    paths = sorted(folder.glob("*.json"))
    if only:
        paths = [path for path in paths if path.name.startswith(only)]
    if not paths:
        reason = f"no cases in {folder}: the shared folder is not beside the project"
        return [pytest.param(None, id="absent", marks=pytest.mark.skip(reason=reason))]
    return [pytest.param(json.loads(path.read_text()), id=path.stem) for path in paths]


def case(kind: str, name: str) -> Reported:
    """Return one reported input."""
    path = SHARED / "cases" / kind / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"no {path}: the shared folder is not beside the project")
    return json.loads(path.read_text())


@functools.cache
def _load(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer called qwen3.5, qwen3 or embedded."""
    folder = EMBEDDED if name == "embedded" else SHARED / "tokenizers" / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no tokenizer in {folder}")
    return _load(folder)


def hotpot() -> Path:
    """Return the folder of real questions and passages."""
    if not HOTPOT.is_dir():
        pytest.skip(f"no {HOTPOT}: the shared folder is not beside the project")
    return HOTPOT
