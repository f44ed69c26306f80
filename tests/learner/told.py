"""Owns made-up runs that read like real ones: questions, searches and answers in the shipped tokenizer's tokens."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer

import engine.embedded
from core.arrays import pack_logprobs, pack_tokens
from core.config import LearnerSettings
from core.events import (
    VOID_OUTCOMES,
    Answered,
    GroupAsked,
    NodesChosen,
    Observed,
    Outcome,
    Plan,
    ReferenceScored,
    Rewarded,
    SamplingParams,
    StepCommitted,
    ToolCalled,
    TurnSampled,
)
from core.ids import make_node, make_uid
from core.tree import GroupEvent, fold_group
from learner.batch import PlanContext, Recipe, Taken, plan_event, recipe_from_learner
from learner.page.model import HeldOut, RunFacts
from learner.page.steps import RunSource, StepSource
from learner.rebuild import derive
from tests.building import scored_leaves

OPENING = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
CALL = "<tool_call>\n<function=search>\n<parameter=query>\n{query}\n</parameter>\n</function>\n</tool_call><|im_end|>"
RESULT = (
    "\n<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
COUNTRIES = ("Zorvia", "Belmark", "Karsund", "Ostland", "Valdora", "Nemria", "Tulvany", "Grimsel")
CITIES = ("Melk", "Tarsin", "Bexley", "Corvo", "Dunmar", "Eskil", "Farrow", "Gorlan")
PEOPLE = ("Orla", "Bram", "Celia", "Dario", "Edith", "Faisal", "Greta", "Hugo")


@cache
def tokenizer() -> Any:
    """Return the embedded engine's tokenizer."""
    folder = Path(engine.embedded.__file__).parent / "base"
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def encode(text: str) -> list[int]:
    """Return the token ids of a text."""
    return list(tokenizer().encode(text, add_special_tokens=False))


class Texts(NamedTuple):
    """What the people and the search engine of a made-up group say; tests put hostile texts here."""

    question: str = "Who is the mayor of the capital of Zorvia?"
    references: tuple[str, ...] = ("Orla",)
    source: str = "two-hop"
    query: str = "capital of Zorvia"
    content: str = (
        "[1] The capital of Zorvia is Melk.\n[2] The ruler of Zorvia is Bram.\n[3] The emblem is a heron."
    )
    thought: str = ""
    answer: str = "Orla"
    error: str = ""


class Teller:
    """Tells one group: trees of turns that search, observe and answer, with logprobs and rewards by chance."""

    def __init__(self, ticket: int, texts: Texts, plan: Plan, seed: int = 0) -> None:
        self.rng = np.random.default_rng([seed, ticket])
        self.texts = texts
        self.plan = plan
        self.uid = make_uid(ticket, 0)
        asked = GroupAsked(
            uid=self.uid,
            ticket=ticket,
            attempt=0,
            example_id=f"example-{ticket}",
            question=texts.question,
            references=texts.references,
            data_source=texts.source,
            prompt=pack_tokens(encode(OPENING.format(question=texts.question))),
            plan=plan,
            policy_version=0,
            weights_uri="",
            params=SamplingParams(),
            protocol="qwen3_5",
        )
        self.records: list[tuple[int, GroupEvent]] = [(0, asked)]

    def sample(self, tree: int, node: str, parent: str | None, text: str, *, reference: bool = False) -> None:
        """Sample a turn of this text."""
        tokens = encode(text)
        logprobs = -self.rng.exponential(0.35, len(tokens)) * (self.rng.random(len(tokens)) < 0.7)
        self.records.append(
            (
                tree,
                TurnSampled(
                    node=node,
                    parent=parent,
                    turn=int(node.split(".")[2]),
                    tokens=pack_tokens(tokens),
                    sampled_logprobs=pack_logprobs(logprobs.tolist()),
                    text=text,
                    stop_reason="stop",
                    seed=int(self.rng.integers(2**31)),
                    sample_index=tree - 1,
                    policy_version=0,
                ),
            )
        )
        if reference:
            values = pack_logprobs((logprobs - 0.25).tolist())
            self.records.append((tree, ReferenceScored(node=node, logprobs=values, base_model="base")))

    def search(self, tree: int, node: str, parent: str | None, query: str, content: str, **seen: Any) -> None:
        """Sample a search and observe its result."""
        self.sample(tree, node, parent, self.texts.thought + CALL.format(query=query))
        self.records += [
            (tree, ToolCalled(node=node, call_id=f"c-{node}", tool="search", arguments={"query": query})),
            (
                tree,
                Observed(
                    node=node,
                    content=content,
                    tokens=pack_tokens(encode(RESULT.format(content=content))),
                    status="success",
                    latency=0.012,
                    backend="local",
                    call_id=f"c-{node}",
                    document_ids=("d1", "d2", "d3"),
                    error=self.texts.error,
                    **seen,
                ),
            ),
        ]

    def end(self, tree: int, node: str, parent: str | None, outcome: Outcome = Outcome.ANSWERED) -> None:
        """Sample a last turn that is right, wrong or not well formed."""
        right = bool(self.rng.random() < 0.45)
        answer = self.texts.answer if right else str(self.rng.choice(PEOPLE[1:]))
        text = f"Answer: {answer}" if outcome is Outcome.ANSWERED else answer
        self.sample(tree, node, parent, text + "<|im_end|>")
        given = answer if outcome is Outcome.ANSWERED else None
        self.records.append((tree, Answered(leaf=node, outcome=outcome, answer=given, text=text)))
        if outcome not in VOID_OUTCOMES:
            self.score(tree, node, (1.0 if right else 0.0) if given is not None else -0.1)

    def finish(self, tree: int, node: str, value: float) -> None:
        """End a trajectory at a turn that was sampled, with this reward."""
        ended = Answered(leaf=node, outcome=Outcome.ANSWERED, answer=self.texts.answer, text="")
        self.records.append((tree, ended))
        self.score(tree, node, value)

    def score(self, tree: int, node: str, value: float) -> None:
        """Score a leaf."""
        components = {"exact_match": float(value == 1.0), "format": float(value >= 0)}
        self.records.append(
            (
                tree,
                Rewarded(
                    node=node,
                    value=value,
                    scorer="em_format",
                    scorer_version="1",
                    source_digest="d",
                    components=components,
                ),
            )
        )

    def chain(self, tree: int) -> None:
        """Tell one trajectory from the root."""
        self.branch(tree, 0, 0, None, 0)

    def branch(self, tree: int, round_: int, expansion: int, parent: str | None, depth: int) -> None:
        """Tell one branch from a node to its end."""
        last = depth + int(self.rng.integers(0 if depth else 1, 3))
        for at in range(depth, last):
            node = make_node(round_, expansion, at)
            self.search(tree, node, parent, self.texts.query, self.texts.content)
            parent = node
        chance = self.rng.random()
        outcome = (
            Outcome.ANSWERED if chance < 0.85 else Outcome.BAD_FORMAT if chance < 0.95 else Outcome.VOID_TOOL
        )
        self.end(tree, make_node(round_, expansion, last), parent, outcome)

    def tree(self, tree: int) -> None:
        """Tell a whole tree: an initial chain, then rounds of expansions from nodes that may be continued."""
        self.chain(tree)
        for round_ in range(1, self.plan.l + 1):
            group = fold_group(self.records).trees[tree]
            open_nodes = [None, *(node.node for node in group.nodes.values() if node.observation is not None)]
            chosen = [open_nodes[int(self.rng.integers(len(open_nodes)))] for _ in range(self.plan.n)]
            self.records.append((tree, NodesChosen(round=round_, nodes=tuple(chosen), policy="random")))
            for expansion, start in enumerate(chosen):
                depth = 0 if start is None else int(start.split(".")[2]) + 1
                self.branch(tree, round_, expansion, start, depth)

    def taken(self) -> Taken:
        """Return the closed group."""
        group = fold_group(self.records)
        return Taken(group, scored_leaves(group), "00" * 32, b"", 0)


CHAINS = Plan(mode="chain", group_size=8)
TREES = Plan(mode="tree", m=3, n=2, l=2, k=5)


def told_group(ticket: int, plan: Plan = CHAINS, texts: Texts | None = None, seed: int = 0) -> Taken:
    """Return one made-up group; without texts, a question of the ticket's own."""
    teller = Teller(ticket, texts or question_of(ticket), plan, seed)
    for tree in range(1, (plan.m if plan.mode == "tree" else plan.group_size) + 1):
        (teller.tree if plan.mode == "tree" else teller.chain)(tree)
    return teller.taken()


def question_of(ticket: int) -> Texts:
    """Return the texts of one question of a small world."""
    country, city, person = COUNTRIES[ticket % 8], CITIES[ticket // 8 % 8], PEOPLE[ticket * 5 % 8]
    return Texts(
        question=f"Who is the mayor of the capital of {country}?",
        references=(person,),
        source=("one-hop", "two-hop")[ticket % 2],
        query=f"capital of {country}",
        content=f"[1] The capital of {country} is {city}.\n[2] The ruler of {country} is {PEOPLE[0]}.",
        answer=person,
    )


def told_step(step: int, taken: Sequence[Taken], **learner: Any) -> StepSource:
    """Return a planned and committed step made of these groups."""
    recipe: Recipe = recipe_from_learner(LearnerSettings(**learner), 1e-3)
    rebuilt = derive(list(taken), recipe)
    planned = plan_event(taken, rebuilt.batch, rebuilt.digests, recipe, PlanContext(step, step, {}, 0.0))
    rewards = rebuilt.batch.table.rewards
    committed = StepCommitted(
        step=step,
        skipped=False,
        policy_version=step + 1,
        rollout_metrics={
            "reward/mean": float(rewards.mean()),
            "reward/correct": float((rewards == 1.0).mean()),
            "reward/format": float((rewards >= 0).mean()),
        },
    )
    match = rebuilt.batch_digest == planned.batch_digest
    return StepSource(planned, committed, rebuilt.taken, rebuilt, match)


def told_run(steps: Sequence[StepSource], evals: Sequence[HeldOut] = ()) -> RunSource:
    """Return the run that these steps belong to."""
    facts = RunFacts(
        run_id="1f0c5e7a9b3d",
        base_model="tiny",
        facts=[("estimator", "group_mean")],
        evals=list(evals),
        books=[("trained", 8)],
        steps_planned=len(steps),
    )
    return RunSource(
        facts,
        {one.planned.step: one.planned.members for one in steps},
        {one.planned.step: one.committed for one in steps if one.committed is not None},
    )


Maker = Callable[[int], Taken]


def told_steps(count: int, groups: int, maker: Maker = told_group, **learner: Any) -> list[StepSource]:
    """Return several steps of several groups each, tickets in order."""
    return [
        told_step(step, [maker(step * groups + number) for number in range(groups)], **learner)
        for step in range(count)
    ]
