"""Scripted trajectories over plain English, so that the base model keeps to the protocol on real text.

A question quotes some words of a sentence of english.txt; the script searches for them, sees that
sentence among others, and answers with the words that follow.
"""

from pathlib import Path

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


class TextWriter:
    """Writes scripts over the sentences of a text file, one a line."""

    def __init__(self, path: Path, rates: ScriptRates) -> None:
        self.sentences = path.read_text(encoding="utf-8").splitlines()
        self.rates = rates

    def __repr__(self) -> str:
        return f"TextWriter({len(self.sentences)} sentences)"

    def write(self, rng: np.random.Generator) -> Script:
        """Play one trajectory of a single search."""
        words = pick(rng, self.sentences).split()
        start = int(rng.integers(1, len(words) - 6))
        middle = start + int(rng.integers(2, 5))
        stop = middle + int(rng.integers(1, 3))
        quoted, answer = " ".join(words[start:middle]), " ".join(words[middle:stop])
        found = [" ".join(words), *(pick(rng, self.sentences) for _ in range(TOP_K - 1))]
        rng.shuffle(found)
        asked = pick(rng, ("What", "Who", "Which", "When did", "Where", "In what year"))
        question = f"{asked} {quoted}?"
        final = state_answer(rng, self.rates, answer, pick(rng, words))
        turns = [Turn(quoted, render_results(found), ()), Turn(None, None, final)]
        return Script(question, turns)
