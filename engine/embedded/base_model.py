"""The immutable base model: its files, its sizes and its fingerprint."""

import hashlib
import json
from pathlib import Path
from typing import Final, Self

import numpy as np
from tokenizers import Tokenizer

from engine.embedded.calls import InputError
from engine.embedded.model import ModelConfig, Weights
from engine.embedded.spelling import EOS, token_bytes

BASE_FOLDER: Final = Path(__file__).parent / "base"
"""The base model that ships with the package."""
WEIGHTS_FILE: Final = "weights.npz"
CONFIG_FILE: Final = "model.json"
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class BaseModel:
    """Weights, sizes and tokenizer of a base model; shared by all runs, never changed.

    fingerprint is the SHA-256 of the sizes, the stored weights and the tokenizer files.
    """

    def __init__(self, folder: Path, config: ModelConfig, weights: Weights) -> None:
        self.folder = folder
        self.config = config
        self.weights = weights
        self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILES[0]))
        self.token_bytes = token_bytes(self.tokenizer)
        self.eos = self.tokenizer.encode(EOS).ids[0]
        self.fingerprint = _fingerprint(folder, config, weights)
        if len(self.token_bytes) != config.vocab_size:
            raise ValueError(
                f"{folder} holds a tokenizer of {len(self.token_bytes)} tokens and a model of "
                f"{config.vocab_size}: rebuild it with `engine pretrain`"
            )

    @classmethod
    def load(cls, folder: Path = BASE_FOLDER) -> Self:
        """Read a model folder. Raises OSError or ValueError if it is missing or damaged."""
        config = ModelConfig(**json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
        with np.load(folder / WEIGHTS_FILE, allow_pickle=False) as stored:
            weights = {name: stored[name].astype(np.float32) for name in stored.files}
        return cls(folder, config, weights)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def context(self) -> int:
        """Longest sequence in tokens, prompt and continuation together."""
        return self.config.context

    def __repr__(self) -> str:
        return f"BaseModel({self.folder.name}, {self.vocab_size} tokens, {self.fingerprint[:12]})"

    def check_tokens(self, tokens: np.ndarray, what: str) -> None:
        """Raise InputError unless `tokens` is a non-empty row of ids that fits the context."""
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind != "i":
            raise InputError(f"{what} must be a non-empty row of token ids, got {tokens!r}")
        if tokens.size > self.context:
            raise InputError(f"{what} has {tokens.size} tokens; the context holds {self.context}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise InputError(f"{what} holds token id {wrong}; ids go from 0 to {self.vocab_size - 1}")


def save_weights(folder: Path, config: ModelConfig, weights: Weights) -> None:
    """Write weights as float16 and the sizes; the tokenizer files are written elsewhere."""
    stored = {name: x.astype(np.float16) for name, x in sorted(weights.items())}
    with (folder / WEIGHTS_FILE).open("wb") as file:
        np.savez(file, **stored)  # type: ignore[arg-type]  # numpy types the flag allow_pickle here
    text = json.dumps(config._asdict(), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def _fingerprint(folder: Path, config: ModelConfig, weights: Weights) -> str:
    digest = hashlib.sha256(json.dumps(config._asdict(), sort_keys=True).encode())
    for name in TOKENIZER_FILES:
        digest.update((folder / name).read_bytes())
    return weights_digest(weights, digest.digest())


def weights_digest(weights: Weights, prefix: bytes = b"") -> str:
    """SHA-256 hex over `prefix` and all arrays in the order of their names."""
    digest = hashlib.sha256(prefix)
    for name, x in sorted(weights.items()):
        digest.update(f"{name} {x.dtype.str} {x.shape}\n".encode())
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()
