"""Owns access keys: where they come from, and which one is used next. Keys are never shown."""

from collections.abc import Mapping
from pathlib import Path

from core.errors import ConfigError
from rollout.search.timer import Timer

KEYS_VARIABLE = "ZHIHU_SEARCH_KEYS"
REST_SECONDS = 5.0
"""How long a key rests after a refusal that names no time."""


class KeyRing:
    """Keys in turn: a rate-limited one rests, a refused one is not used again."""

    def __init__(self, keys: tuple[str, ...], timer: Timer) -> None:
        self._keys = keys
        self._timer = timer
        self._next = 0
        self._resting: dict[int, float] = {}
        self._refused: set[int] = set()

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._keys)} keys, {len(self._refused)} refused>"

    def __len__(self) -> int:
        return len(self._keys)

    def take(self) -> int | None:
        """Return the number of the key to use next, None if none may be used now."""
        for _ in self._keys:
            index, self._next = self._next, (self._next + 1) % len(self._keys)
            if index not in self._refused and self._resting.get(index, 0.0) <= self._timer.monotonic():
                return index
        return None

    def key(self, index: int) -> str:
        """Return a key itself, for a request header only."""
        return self._keys[index]

    def rest(self, index: int, seconds: float | None) -> None:
        """Leave a key alone for a while."""
        rest = REST_SECONDS if seconds is None else seconds
        self._resting[index] = self._timer.monotonic() + rest

    def refuse(self, index: int) -> None:
        """Never use a key again."""
        self._refused.add(index)

    @property
    def all_refused(self) -> bool:
        """Whether no key can ever be used."""
        return len(self._refused) == len(self._keys)

    def wait(self) -> float:
        """Return the seconds until a key may be used."""
        now = self._timer.monotonic()
        usable = (i for i in range(len(self._keys)) if i not in self._refused)
        return min((max(self._resting.get(i, now) - now, 0.0) for i in usable), default=0.0)


def find_keys(environ: Mapping[str, str], dotenv: Path) -> tuple[str, ...]:
    """Return the keys of the environment or of a `.env` file, separated by commas or line breaks.

    Raises ConfigError when there is none, or one that cannot stand in a request; it never shows a key.
    """
    said = environ.get(KEYS_VARIABLE, "") or _from_file(dotenv)
    keys = tuple(dict.fromkeys(key.strip() for key in said.replace("\n", ",").split(",") if key.strip()))
    if not keys:
        raise ConfigError(
            f"search back-end 'zhihu' needs a key: set {KEYS_VARIABLE}=key1,key2 in the environment "
            f"or in the file {dotenv}"
        )
    for number, key in enumerate(keys, start=1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"key {number} of {len(keys)} in {KEYS_VARIABLE} holds a blank or a character that is no "
                "printable ASCII; copy it again"
            )
    return keys


def _from_file(dotenv: Path) -> str:
    try:
        lines = dotenv.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    for line in lines:
        name, _, value = line.strip().removeprefix("export ").partition("=")
        if name.strip() == KEYS_VARIABLE:
            return _unquoted(value.strip())
    return ""


def _unquoted(value: str) -> str:
    """Return a value without its quotes, or, where it has none, without a comment after it."""
    if value[:1] in ("'", '"'):
        return value[1:].partition(value[0])[0]
    return value.partition(" #")[0]
