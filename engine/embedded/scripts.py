"""Scripted trajectories for pretraining: an agent that searches, reads and answers, imperfectly.

A script follows a question's chain with one search per hop. On purpose it errs at random: it asks
for the wrong relation or entity, reads the wrong fact, stops after one hop, or breaks the answer
format. What it does most often is right, so reinforcement learning has something to sharpen.
Results come from random worlds, so the only way to predict an answer is to read it.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from engine.embedded.world import CITIES, ENTITIES, RELATIONS, Question, Relation, World

TOP_K: Final = 3
NO_RESULTS: Final = "No results found."
"""Content of an observation when a search finds nothing."""


class ScriptRates(NamedTuple):
    """How often a script errs."""

    wrong_relation: float = 0.09
    wrong_entity: float = 0.07
    entity_only: float = 0.06
    misread: float = 0.20
    early_stop: float = 0.55
    retry: float = 0.30
    bad_format: float = 0.18
    nothing_found: float = 0.04
    shuffled: float = 0.50


class Statement(NamedTuple):
    """A line of a final turn; marked as the answer in the protocol's form, or plain text."""

    text: str
    marked: bool


class Turn(NamedTuple):
    """One generation: a search, answered by an observation, or the final statements."""

    query: str | None
    observation: str | None
    final: tuple[Statement, ...]


class Script(NamedTuple):
    """A whole trajectory."""

    question: str
    turns: list[Turn]
    seen_weight: float = 0.1
    """Loss weight of tokens that the agent reads but does not write."""


class Index:
    """BM25 over a world's facts.

    All facts have the same length and no word twice, so a score is the sum of the inverse document
    frequencies of the query's words; ties are broken at random.
    """

    def __init__(self, world: World) -> None:
        self.passages = world.passages()
        self.postings: dict[str, list[int]] = {}
        for number, passage in enumerate(self.passages):
            for word in set(passage.rstrip(".").lower().split()):
                self.postings.setdefault(word, []).append(number)

    @cached_property
    def _scores(self) -> dict[str, float]:
        n = len(self.passages)
        return {
            word: float(np.log(1 + (n - len(hits) + 0.5) / (len(hits) + 0.5)))
            for word, hits in self.postings.items()
        }

    def search(self, query: str, rng: np.random.Generator) -> list[str]:
        """Return the best TOP_K passages."""
        scores = rng.random(len(self.passages)) * 1e-6
        for word in set(query.lower().split()):
            scores[self.postings.get(word, [])] += self._scores.get(word, 0.0)
        best = np.argsort(-scores, kind="stable")[:TOP_K]
        return [self.passages[i] for i in best]


def render_results(passages: list[str]) -> str:
    """Search results as the agent sees them."""
    if not passages:
        return NO_RESULTS
    return "\n".join(f"[{i}] {text}" for i, text in enumerate(passages, start=1))


def pick(rng: np.random.Generator, names: Sequence[str]) -> str:
    """Draw one of the names."""
    return names[int(rng.integers(len(names)))]


def state_answer(
    rng: np.random.Generator, rates: ScriptRates, answer: str, other: str
) -> tuple[Statement, ...]:
    """State the answer, at times without its form, in a sentence, or twice."""
    good = Statement(answer, marked=True)
    if rng.random() >= rates.bad_format:
        return (good,)
    match int(rng.integers(3)):
        case 0:
            return (Statement(answer, marked=False),)
        case 1:
            return (Statement(f"The answer is {answer}.", marked=False),)
        case _:
            return good, Statement(other, marked=True)


class ScriptWriter:
    """Writes scripts over one world."""

    def __init__(self, world: World, rates: ScriptRates) -> None:
        self.world = world
        self.index = Index(world)
        self.rates = rates

    def __repr__(self) -> str:
        return f"ScriptWriter({self.world!r})"

    def _query(self, rng: np.random.Generator, relation: Relation, entity: str) -> str:
        rates, roll = self.rates, float(rng.random())
        if roll < rates.wrong_relation:
            others = [r.name for r in RELATIONS if r.name != relation.name]
            return f"{pick(rng, others)} of {entity}"
        roll -= rates.wrong_relation
        if roll < rates.wrong_entity:
            return f"{relation.name} of {pick(rng, ENTITIES[relation.domain])}"
        roll -= rates.wrong_entity
        if roll < rates.entity_only:
            return entity
        return f"{relation.name} of {entity}"

    def _search(self, rng: np.random.Generator, query: str) -> list[str]:
        if rng.random() < self.rates.nothing_found:
            return []
        found = self.index.search(query, rng)
        if rng.random() < self.rates.shuffled:
            rng.shuffle(found)
        return found

    def _read(self, rng: np.random.Generator, found: list[str], relation: Relation, entity: str) -> str:
        """Choose the entity that the script takes from the results for `relation` of `entity`."""
        value = self.world.values[relation.name, entity]
        if f"The {relation.name} of {entity} is {value}." in found:
            if rng.random() >= self.rates.misread:
                return value
        elif not found:
            return pick(rng, ENTITIES[relation.codomain])
        return pick(rng, [text.rstrip(".").split()[-1] for text in found])

    def write(self, rng: np.random.Generator, question: Question) -> Script:
        """Play one imperfect trajectory."""
        turns: list[Turn] = []
        entity, remaining = question.start, list(question.chain)
        while remaining:
            relation = remaining[0]
            if entity not in ENTITIES[relation.domain]:
                break  # a misread fact led to a place where the chain cannot go on
            query = self._query(rng, relation, entity)
            found = self._search(rng, query)
            turns.append(Turn(query, render_results(found), ()))
            wanted = f"The {relation.name} of {entity} is "
            seen = any(text.startswith(wanted) for text in found)
            if not seen and len(turns) < 4 and rng.random() < self.rates.retry:
                continue
            entity = self._read(rng, found, relation, entity)
            remaining.pop(0)
            if remaining and rng.random() < self.rates.early_stop:
                break
        turns.append(Turn(None, None, state_answer(rng, self.rates, entity, pick(rng, CITIES))))
        return Script(question.text, turns)
