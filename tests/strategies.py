"""Owns the hypothesis strategies of the project's values: single events of every kind, and whole groups."""

from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from core.arrays import pack_logprobs, pack_tokens
from core.events import (
    AdamParams,
    Answered,
    CheckpointSaved,
    ChosenLeaf,
    Evaluated,
    GoalSet,
    GroupAborted,
    GroupAdopted,
    GroupAsked,
    GroupClosed,
    GroupDropped,
    GroupEvent,
    GroupOpened,
    NodesChosen,
    Observed,
    Outcome,
    Plan,
    PlanEvidence,
    PlannedGroup,
    PolicyPublished,
    QuestionResult,
    Recovered,
    ReferenceScored,
    Rewarded,
    RunOpened,
    SamplingParams,
    StepCommitted,
    StepPlanned,
    ToolCalled,
    TurnSampled,
)
from core.ids import make_node, make_uid, parse_node
from core.tree import Trajectory, fold_group, members
from tests.building import Script, scored_leaves

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
"""Any text that UTF-8 can hold."""
NAMES = st.text("abcdefgh_-./:", min_size=1, max_size=12)
COUNTS = st.integers(0, 2**40)
SMALL = st.integers(0, 9)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TIMES = st.floats(0, 4e9)
DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8).map(pack_tokens)
LOGPROBS = st.lists(st.floats(-50, 0, width=32), max_size=8).map(pack_logprobs)
UIDS = st.builds(make_uid, st.integers(0, 2**40), st.integers(0, 99))
NODES = st.builds(make_node, SMALL, SMALL, SMALL)
PARENTS = st.none() | NODES
NUMBERS = st.dictionaries(NAMES, FLOATS, max_size=3)
STRINGS = st.dictionaries(NAMES, TEXTS, max_size=3)

CHOSEN = st.builds(ChosenLeaf, tree=st.integers(1, 9), leaf=NODES)
PLANS = st.builds(Plan, mode=st.sampled_from(["chain", "tree"]), group_size=SMALL, m=SMALL, k=SMALL)
PARAMS = st.builds(SamplingParams, temperature=FLOATS, top_k=st.integers(-1, 50), max_turns=SMALL)
ADAM = st.builds(AdamParams, learning_rate=FLOATS, grad_clip_norm=FLOATS)

_FIELDS: dict[type, dict[str, SearchStrategy[Any]]] = {
    GroupAsked: {
        "uid": UIDS,
        "ticket": COUNTS,
        "attempt": SMALL,
        "example_id": TEXTS,
        "question": TEXTS,
        "references": st.lists(TEXTS, max_size=3).map(tuple),
        "data_source": TEXTS,
        "prompt": TOKENS,
        "plan": PLANS,
        "policy_version": COUNTS,
        "weights_uri": TEXTS,
        "params": PARAMS,
        "protocol": NAMES,
        "source": TEXTS,
        "at": TIMES,
    },
    TurnSampled: {
        "node": NODES,
        "parent": PARENTS,
        "turn": SMALL,
        "tokens": TOKENS,
        "sampled_logprobs": LOGPROBS,
        "text": TEXTS,
        "stop_reason": st.sampled_from(["stop", "length"]),
        "seed": st.integers(0, 2**31 - 1),
        "sample_index": SMALL,
        "policy_version": COUNTS,
        "request": SMALL,
        "seconds": TIMES,
    },
    ToolCalled: {
        "node": NODES,
        "call_id": NAMES,
        "tool": NAMES,
        "arguments": st.dictionaries(
            TEXTS, TEXTS | st.integers(-(2**63), 2**63 - 1) | FLOATS | st.booleans() | st.none(), max_size=3
        ),
    },
    Observed: {
        "node": NODES,
        "content": TEXTS,
        "tokens": TOKENS,
        "prompt_reset": st.none() | TOKENS,
        "ok": st.booleans(),
        "error": TEXTS,
        "status": NAMES,
        "latency": TIMES,
        "backend": NAMES,
        "cached": st.booleans(),
        "truncated": st.booleans(),
        "call_id": NAMES,
        "document_ids": st.lists(TEXTS, max_size=3).map(tuple),
    },
    Answered: {
        "leaf": NODES,
        "outcome": st.sampled_from(Outcome),
        "answer": st.none() | TEXTS,
        "text": TEXTS,
        "detail": TEXTS,
    },
    Rewarded: {
        "node": NODES,
        "value": FLOATS,
        "scorer": NAMES,
        "scorer_version": NAMES,
        "source_digest": DIGESTS,
        "components": NUMBERS,
        "scope": st.sampled_from(["leaf", "node"]),
    },
    NodesChosen: {
        "round": SMALL,
        "nodes": st.lists(PARENTS, max_size=3).map(tuple),
        "policy": NAMES,
        "candidates": st.lists(PARENTS, max_size=3).map(tuple),
        "scores": st.lists(FLOATS, max_size=3).map(tuple),
    },
    ReferenceScored: {"node": NODES, "logprobs": LOGPROBS, "base_model": NAMES},
    RunOpened: {
        "schema": SMALL,
        "config": st.dictionaries(NAMES, NUMBERS | TEXTS | st.integers(-9, 9), max_size=3),
        "config_digest": DIGESTS,
        "fingerprints": STRINGS,
        "base_model": TEXTS,
        "seed": st.integers(-(2**63), 2**63 - 1),
        "run_id": NAMES,
        "weights_uri": TEXTS,
        "at": TIMES,
    },
    GoalSet: {"max_steps": COUNTS, "at": TIMES},
    GroupOpened: {
        "uid": UIDS,
        "ticket": COUNTS,
        "attempt": SMALL,
        "owner": COUNTS,
        "worker": NAMES,
        "policy_version": COUNTS,
        "weights_uri": TEXTS,
        "committed_steps": COUNTS,
        "at": TIMES,
    },
    GroupAdopted: {"uid": UIDS, "owner": COUNTS, "worker": NAMES, "at": TIMES},
    GroupClosed: {
        "uid": UIDS,
        "chosen": st.lists(CHOSEN, max_size=3).map(tuple),
        "records": COUNTS,
        "digest": DIGESTS,
        "tokens_sampled": COUNTS,
        "search_calls": COUNTS,
        "at": TIMES,
    },
    GroupAborted: {
        "uid": UIDS,
        "reason": TEXTS,
        "final": st.booleans(),
        "records": COUNTS,
        "tokens_sampled": COUNTS,
        "search_calls": COUNTS,
        "at": TIMES,
    },
    GroupDropped: {"uid": UIDS, "reason": TEXTS, "at": TIMES},
    StepPlanned: {
        "step": COUNTS,
        "groups": st.lists(
            st.builds(PlannedGroup, uid=UIDS, digest=DIGESTS, marks=st.binary(max_size=8)), max_size=3
        ).map(tuple),
        "estimator": NAMES,
        "estimator_params": st.dictionaries(NAMES, FLOATS | TEXTS | st.booleans(), max_size=3),
        "shaping": NAMES,
        "shaping_params": NUMBERS,
        "prefix_weight": NAMES,
        "kl_beta": FLOATS,
        "loss": NAMES,
        "loss_config": NUMBERS,
        "adam": ADAM,
        "members": COUNTS,
        "micro_batches": st.lists(st.lists(SMALL, max_size=3).map(tuple), max_size=3).map(tuple),
        "datum_digests": st.lists(DIGESTS, max_size=3).map(tuple),
        "batch_digest": DIGESTS,
        "policy_version": COUNTS,
        "fingerprints": STRINGS,
        "packing": st.dictionaries(NAMES, COUNTS, max_size=3),
        "reduction": NAMES,
        "evidence": st.none()
        | st.builds(PlanEvidence, keys=st.lists(TEXTS, max_size=2).map(tuple), tokens=st.binary(max_size=16)),
        "at": TIMES,
    },
    StepCommitted: {
        "step": COUNTS,
        "skipped": st.booleans(),
        "policy_version": COUNTS,
        "trainer_metrics": NUMBERS,
        "rollout_metrics": NUMBERS,
        "seconds": NUMBERS,
        "engine_digest": DIGESTS | st.just(""),
        "tokens_trained": COUNTS,
        "at": TIMES,
    },
    PolicyPublished: {"policy_version": COUNTS, "weights_uri": TEXTS, "step": COUNTS, "at": TIMES},
    CheckpointSaved: {
        "step": COUNTS,
        "state_uri": TEXTS,
        "weights_uri": TEXTS,
        "training_run": NAMES,
        "at": TIMES,
    },
    Recovered: {
        "restored_uri": TEXTS,
        "restored_step": COUNTS,
        "resent_steps": st.lists(COUNTS, max_size=3).map(tuple),
        "tokens_trained": COUNTS,
        "training_run": NAMES,
        "at": TIMES,
    },
    Evaluated: {
        "weights_uri": TEXTS,
        "policy_version": COUNTS,
        "set_digest": DIGESTS,
        "settings": st.dictionaries(NAMES, FLOATS | TEXTS | st.integers(-9, 9) | st.booleans(), max_size=3),
        "results": st.lists(
            st.builds(
                QuestionResult,
                example_id=TEXTS,
                data_source=TEXTS,
                samples=SMALL,
                exact_match=FLOATS,
                format=FLOATS,
                answer=st.none() | TEXTS,
            ),
            max_size=2,
        ).map(tuple),
        "summary": NUMBERS,
        "name": NAMES,
        "at": TIMES,
    },
}

GROUP_EVENT_TYPES = (
    GroupAsked,
    TurnSampled,
    ToolCalled,
    Observed,
    Answered,
    Rewarded,
    NodesChosen,
    ReferenceScored,
)
JOURNAL_EVENT_TYPES = tuple(kind for kind in _FIELDS if kind not in GROUP_EVENT_TYPES)


def events_of(kind: type) -> SearchStrategy[Any]:
    """Return a strategy for events of one type; values are well typed, not consistent with each other."""
    return st.builds(kind, **_FIELDS[kind])


def group_events() -> SearchStrategy[Any]:
    """Return a strategy for single events of a group's streams."""
    return st.one_of([events_of(kind) for kind in GROUP_EVENT_TYPES])


def journal_events() -> SearchStrategy[Any]:
    """Return a strategy for single journal events."""
    return st.one_of([events_of(kind) for kind in JOURNAL_EVENT_TYPES])


class GroupShape(NamedTuple):
    """What a generated group may hold."""

    mode: str = "any"
    """"chain", "tree" or "any"."""
    voids: bool = True
    resets: bool = True
    references: bool = False
    plain: bool = False
    """Every turn and observation is the same token: quick to draw, where only shape and rewards matter."""


ANY_SHAPE = GroupShape()
PLAIN = GroupShape(plain=True, resets=False)
IDS = st.integers(0, 99)
"""Small token ids."""
REWARDS = st.sampled_from([1.0, 0.0, -0.1, 0.2, 0.35]) | st.floats(-1, 1)


class _Grove(NamedTuple):
    """One tree while it is drawn."""

    draw: st.DrawFn
    script: Script
    tree: int
    shape: GroupShape
    open_nodes: list[str | None]
    """Nodes that may be expanded."""


@st.composite
def group_records(
    draw: st.DrawFn, ticket: int = 1, shape: GroupShape = ANY_SHAPE
) -> list[tuple[int, GroupEvent]]:
    """Draw the records of one whole, consistent, scored group, trees after each other."""
    mode = draw(st.sampled_from(["chain", "tree"])) if shape.mode == "any" else shape.mode
    trees = draw(st.integers(1, 4))
    plan = Plan(mode=mode, group_size=trees, m=trees, n=2, l=2, k=3)
    script = Script(ticket, draw(st.lists(IDS, min_size=1, max_size=4)), plan=plan)
    for tree in range(1, trees + 1):
        grove = _Grove(draw, script, tree, shape, [None])
        _draw_branch(grove, (0, 0), None)
        rounds = draw(st.integers(0, 2)) if mode == "tree" else 0
        for round_ in range(1, rounds + 1):
            starts = draw(st.lists(st.sampled_from(grove.open_nodes), min_size=1, max_size=2))
            script.expand(round_, starts, tree=tree)
            for expansion, start in enumerate(starts):
                _draw_branch(grove, (round_, expansion), start)
    return script.records


def _draw_branch(grove: _Grove, place: tuple[int, int], parent: str | None) -> None:
    draw, script, tree = grove.draw, grove.script, grove.tree
    depth = 0 if parent is None else parse_node(parent).depth + 1
    node = make_node(*place, depth)
    for more in reversed(range(draw(st.integers(1, 3)))):
        tokens = [7] if grove.shape.plain else draw(st.lists(IDS, min_size=1, max_size=4))
        logprobs = [-0.5] if grove.shape.plain else [draw(st.floats(-9, 0, width=32)) for _ in tokens]
        script.turn(node, parent, tokens, logprobs, tree=tree)
        if grove.shape.references:
            script.refer(node, [value - 0.5 for value in logprobs], tree=tree)
        if more:
            rare = grove.shape.resets and draw(st.integers(0, 5)) == 0
            reset = draw(st.lists(IDS, min_size=1, max_size=5)) if rare else None
            seen = [8] if grove.shape.plain else draw(st.lists(IDS, min_size=1, max_size=4))
            script.see(node, seen, tree=tree, reset=reset)
            grove.open_nodes.append(node)
            parent, depth = node, depth + 1
            node = make_node(*place, depth)
    if grove.shape.voids and draw(st.integers(0, 5)) == 0:
        script.end(node, tree=tree, outcome=Outcome.VOID_TOOL)
    else:
        outcome = draw(st.sampled_from([Outcome.ANSWERED, Outcome.BAD_FORMAT]))
        script.end(node, draw(REWARDS), tree=tree, outcome=outcome)


@st.composite
def steps(draw: st.DrawFn, shape: GroupShape = PLAIN) -> tuple[Trajectory, ...]:
    """Draw the members of a step of one to three groups, in training order."""
    count = draw(st.integers(1, 3))
    groups = [fold_group(draw(group_records(ticket, shape))) for ticket in range(1, count + 1)]
    return tuple(member for group in groups for member in members(group, scored_leaves(group)))
