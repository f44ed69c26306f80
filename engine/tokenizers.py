"""Owns finding a run's tokenizer without an engine: audits spell tokens where that is possible offline."""

from pathlib import Path
from typing import Any

from core.config import EngineSettings

EMBEDDED_BASE = Path(__file__).resolve().parent / "embedded" / "base"


def offline_tokenizer(settings: EngineSettings) -> Any | None:
    """Return the base model's tokenizer from this machine's files, None where it is not at hand."""
    # transformers takes a second to import, and most audits never spell a token.
    from transformers import AutoTokenizer  # noqa: PLC0415

    where = str(EMBEDDED_BASE) if settings.kind == "embedded" else settings.base_model
    try:
        return AutoTokenizer.from_pretrained(where, local_files_only=True)
    except (OSError, ValueError):
        return None
