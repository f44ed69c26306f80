r"""Scorers of your own: plain functions from an ended trajectory to a number or a Score.

    python cli.py rollout --run runs/x --set reward.scorer=examples.scorers:character_overlap \\
        --allow-code examples.scorers:character_overlap

A scorer must be a pure function of the trajectory: `replay --rescore` calls it again and compares. Its
module's source is part of its identity.
"""

import unicodedata
from collections import Counter

from core.tree import Trajectory
from rollout.reward import NodeScore, Score

TEXT_WEIGHT = 0.5
"""What the overlap of a text without an answer counts for."""


def character_overlap(trajectory: Trajectory) -> Score:
    """Return how many characters the answer shares with the closest reference, 0..1.

    A graded score for policies that never answer exactly: it tells bad answers apart, so that groups of them
    still carry a signal. Where no answer could be extracted the raw final text is compared instead, at half
    its worth, so that keeping to the format pays as well.
    """
    ended, references = trajectory.ended, trajectory.group.asked.references
    said = ended.text if ended.answer is None else ended.answer
    overlap = max((_overlap(said, reference) for reference in references), default=0.0)
    value = overlap if ended.answer is not None else TEXT_WEIGHT * overlap
    return Score(value, {"overlap": overlap, "format": float(ended.answer is not None)})


def reference_found(trajectory: Trajectory) -> Score:
    """Return 1 for an answer that holds a reference, and the same per turn for what its search brought up.

    The values of turns are dense process signals: they are recorded as rewards of scope "node".
    """
    references = [reference.casefold() for reference in trajectory.group.asked.references]
    turns = tuple(
        NodeScore(turn.node, float(_holds(turn.observation.content, references)))
        for turn in trajectory.path
        if turn.observation is not None
    )
    return Score(float(_holds(trajectory.ended.answer or "", references)), nodes=turns)


def _holds(text: str, references: list[str]) -> bool:
    return any(reference in text.casefold() for reference in references)


def _overlap(said: str, reference: str) -> float:
    """Return the F1 of two texts as bags of characters; case, spaces and Unicode forms do not matter."""
    one, other = _characters(said), _characters(reference)
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 0.0


def _characters(text: str) -> Counter[str]:
    folded = unicodedata.normalize("NFC", text).casefold()
    return Counter(c for c in folded if not c.isspace())
