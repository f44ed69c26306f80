"""The generated world: facts about invented places and people, and questions over them.

A world is drawn from a seed: four kinds of entities, nine relations, one fact per (entity,
relation). Questions chain one to three relations; those of a split are held out from the others,
while the corpus (all facts) is shared, because an agent is meant to search it. Pretraining draws
many other worlds over the same names, so that nothing about any one world can be remembered.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np


def _names(text: str) -> tuple[str, ...]:
    """Split a list of names, each of which is one token of the shipped tokenizer."""
    return tuple(text.split())


COUNTRIES: Final = _names(
    "Zorvia Belmark Karsund Ostland Valdora Nemria Tulvany Grimsel Pasqualand Erevan Lothia Miraval "
    "Quorland Sarnia Thessal Umbria Wexland Yldrin Cathria Dornia Fenland Halvard Isteria Jorvik"
)
CITIES: Final = _names(
    "Melk Tarsin Bexley Corvo Dunmar Eskil Farrow Gorlan Hestia Ivrea Jasko Kelmet Lunden Morven "
    "Narva Orsk Pella Quillon Ravik Solane Tiverne Ulmen Vasto Wendel Xanten Yarrow Zelten Ambry "
    "Brisk Calder Drava Elsin Fermo Glaston Hollin Inver"
)
PEOPLE: Final = _names(
    "Orla Bram Celia Dario Edith Faisal Greta Hugo Ines Joren Katya Liam Mirela Noor Oskar Petra "
    "Quentin Rosa Stefan Tilda Ursula Viktor Wanda Xavier Yusuf Zara Anton Bella Conrad Delia Emil "
    "Fiona Gustav Helga Igor Jana Kurt Leona Marta Nils"
)
ANIMALS: Final = _names(
    "heron otter badger falcon lynx stork beaver raven marten hedgehog weasel crane ferret lizard swan "
    "tortoise"
)


class Relation(NamedTuple):
    """A functional relation: every entity of `domain` has exactly one value in `codomain`."""

    name: str
    domain: str
    codomain: str


ENTITIES: Final = {"country": COUNTRIES, "city": CITIES, "person": PEOPLE, "animal": ANIMALS}
RELATIONS: Final = (
    Relation("capital", "country", "city"),
    Relation("ruler", "country", "person"),
    Relation("emblem", "country", "animal"),
    Relation("mayor", "city", "person"),
    Relation("founder", "city", "person"),
    Relation("province", "city", "country"),
    Relation("birthplace", "person", "city"),
    Relation("homeland", "person", "country"),
    Relation("pet", "person", "animal"),
)
"""No relation stays within one kind: "the twin of Melk is Orsk" and its inverse hold the same words, and
neither BM25 nor so small a model tells them apart."""
SPLITS: Final = ("test", "dev", "train")
HELD_OUT: Final = 64
"""Questions of each number of hops in each of test and dev."""
TRAIN_SIZES: Final = {1: 172, 2: 340, 3: 340}


class Question(NamedTuple):
    """A chain of relations that starts at an entity; `chain` is in the order of the hops."""

    start: str
    chain: tuple[Relation, ...]

    @property
    def text(self) -> str:
        """The question in English: the last hop is named first."""
        word = "Who" if self.chain[-1].codomain == "person" else "What"
        hops = " of ".join(f"the {relation.name}" for relation in reversed(self.chain))
        return f"{word} is {hops} of {self.start}?"


class World:
    """All facts of one world.

    `values[(relation name, entity)]` is the entity that the relation maps to.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.Generator(np.random.Philox(key=seed))
        self.values: dict[tuple[str, str], str] = {}
        for relation in RELATIONS:
            names = ENTITIES[relation.codomain]
            for entity in ENTITIES[relation.domain]:
                self.values[relation.name, entity] = names[int(rng.integers(len(names)))]

    def __repr__(self) -> str:
        return f"World({len(self.values)} facts)"

    def answer(self, question: Question) -> str:
        """Follow the chain."""
        entity = question.start
        for relation in question.chain:
            entity = self.values[relation.name, entity]
        return entity

    def passages(self) -> list[str]:
        """One plain sentence per fact, in a fixed order."""
        return [f"The {name} of {entity} is {value}." for (name, entity), value in self.values.items()]


def all_questions(hops: int) -> list[Question]:
    """Every well-typed chain of `hops` relations from every entity, in a fixed order."""
    chains: list[tuple[Relation, ...]] = [(relation,) for relation in RELATIONS]
    for _ in range(hops - 1):
        chains = [
            (*chain, relation)
            for chain in chains
            for relation in RELATIONS
            if relation.domain == chain[-1].codomain
        ]
    return [Question(start, chain) for chain in chains for start in ENTITIES[chain[0].domain]]


def split_questions(seed: int) -> dict[tuple[str, int], list[Question]]:
    """Shuffle the questions of each number of hops and cut them into test, dev and train."""
    rng = np.random.Generator(np.random.Philox(key=seed + 1))
    splits: dict[tuple[str, int], list[Question]] = {}
    for hops, train_size in TRAIN_SIZES.items():
        questions = all_questions(hops)
        order = [questions[i] for i in rng.permutation(len(questions))]
        splits["test", hops] = order[:HELD_OUT]
        splits["dev", hops] = order[HELD_OUT : 2 * HELD_OUT]
        splits["train", hops] = order[2 * HELD_OUT :][:train_size]
    return splits


class WorldFiles(NamedTuple):
    """What write_world wrote."""

    corpus: Path
    questions: dict[str, Path]
    """By split: train, dev, test (one and two hops), and the same with `_3hop`."""


def _write_lines(path: Path, rows: Iterable[dict[str, object]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def _question_rows(world: World, split: str, questions: Sequence[Question]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for index, question in enumerate(questions):
        hops = len(question.chain)
        rows.append(
            {
                "id": f"world_{split}_{hops}hop_{index:03d}",
                "question": question.text,
                "answers": [world.answer(question)],
                "data_source": f"world_{hops}hop",
            }
        )
    return rows


def write_world(out: Path, seed: int) -> WorldFiles:
    """Write the corpus and the question files of world `seed` into the folder `out`.

    corpus.jsonl holds {"id", "contents"} per fact; train/dev/test.jsonl hold {"id", "question",
    "answers", "data_source"} of one- and two-hop questions, {split}_3hop.jsonl those of three.
    """
    out.mkdir(parents=True, exist_ok=True)
    world = World(seed)
    corpus = out / "corpus.jsonl"
    passages = world.passages()
    _write_lines(corpus, ({"id": str(i), "contents": text} for i, text in enumerate(passages)))
    splits = split_questions(seed)
    paths: dict[str, Path] = {}
    for split in SPLITS:
        easy = [row for n in (1, 2) for row in _question_rows(world, split, splits[split, n])]
        files = {split: easy, f"{split}_3hop": _question_rows(world, split, splits[split, 3])}
        for name, rows in files.items():
            paths[name] = out / f"{name}.jsonl"
            _write_lines(paths[name], rows)
    return WorldFiles(corpus, paths)
