"""Scripted trajectories over arbitrary text, so that the base model keeps to the protocol on real questions.

Sentences are made of common English words, invented names and numbers. A question holds some words that
stand in one of the passages; the script searches for them and answers with the words that follow there.
"""

import re
from pathlib import Path
from typing import Final

import numpy as np

from engine.embedded.scripts import (
    TOP_K,
    Script,
    ScriptRates,
    Turn,
    pick,
    render_results,
    state_answer,
)

QUESTION_WORDS: Final = ("What", "Who", "Which", "When", "Where", "In what year", "How many", "Are")
MARKS: Final = ("", "", "", "", "", "", ",", ".")
LETTERS: Final = "eeetaoinshrdlucmfwypvbgkqjxz"
INVENTED_SHARE: Final = 0.25
NUMBER_SHARE: Final = 0.05
SEEN_WEIGHT: Final = 0.01
"""Random words cannot be predicted: hardly worth a gradient."""


class TextWriter:
    """Writes scripts from the words of a text file."""

    def __init__(self, path: Path, rates: ScriptRates) -> None:
        self.words = re.findall(r"[\w'-]+", path.read_text(encoding="utf-8"))
        self.rates = rates

    def __repr__(self) -> str:
        return f"TextWriter({len(self.words)} words)"

    def _word(self, rng: np.random.Generator) -> str:
        roll = float(rng.random())
        if roll < NUMBER_SHARE:
            return str(int(rng.integers(1, 2030)))
        if roll < NUMBER_SHARE + INVENTED_SHARE:
            letters = [pick(rng, LETTERS) for _ in range(int(rng.integers(2, 9)))]
            return "".join(letters).capitalize()
        return pick(rng, self.words)

    def _text(self, rng: np.random.Generator, shortest: int, longest: int) -> list[str]:
        """Return random words, some with a comma or full stop behind them."""
        count = int(rng.integers(shortest, longest + 1))
        return [self._word(rng) + pick(rng, MARKS) for _ in range(count)]

    def _passage(self, rng: np.random.Generator, words: list[str]) -> str:
        title = f'"{" ".join(self._text(rng, 1, 3))}"\n' if rng.random() < 0.5 else ""
        return title + " ".join(words)

    def write(self, rng: np.random.Generator) -> Script:
        """Play one trajectory of a single search."""
        asked = self._text(rng, 5, 20)
        length = int(rng.integers(2, 5))
        start = int(rng.integers(0, len(asked) - length + 1))
        quoted = asked[start : start + length]
        answer = " ".join(self._text(rng, 1, 2)).strip(",.")
        told = [*self._text(rng, 3, 15), *quoted, answer, *self._text(rng, 3, 15)]
        found = [self._passage(rng, told)]
        found += [self._passage(rng, self._text(rng, 8, 30)) for _ in range(TOP_K - 1)]
        rng.shuffle(found)
        question = f"{pick(rng, QUESTION_WORDS)} {' '.join(asked)}?"
        final = state_answer(rng, self.rates, answer, self._word(rng))
        turns = [Turn(" ".join(quoted), render_results(found), ()), Turn(None, None, final)]
        return Script(question, turns, SEEN_WEIGHT)
