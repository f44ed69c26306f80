"""Owns hand-made groups for tests: a script of turns that reads like the trajectory it makes."""

from collections.abc import Sequence
from typing import Any, Self

from core.arrays import pack_logprobs, pack_tokens
from core.events import (
    Answered,
    ChosenLeaf,
    GroupAsked,
    GroupEvent,
    NodesChosen,
    Observed,
    Outcome,
    Plan,
    ReferenceScored,
    Rewarded,
    SamplingParams,
    ToolCalled,
    TurnSampled,
)
from core.ids import make_uid, parse_node
from core.tree import Group, fold_group, trajectories


def asked(ticket: int = 1, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> GroupAsked:
    """Return a group event with plain values."""
    fields: dict[str, Any] = {
        "uid": make_uid(ticket, changes.get("attempt", 0)),
        "ticket": ticket,
        "attempt": 0,
        "example_id": f"example-{ticket}",
        "question": "who?",
        "references": ("she",),
        "data_source": "made",
        "prompt": pack_tokens(prompt),
        "plan": Plan(mode="chain", group_size=2),
        "policy_version": 0,
        "weights_uri": "",
        "params": SamplingParams(),
    }
    return GroupAsked(**(fields | changes))


def sampled(node: str, parent: str | None, tokens: Sequence[int], logprobs: Sequence[float]) -> TurnSampled:
    """Return a sample event; the turn is the node's depth."""
    return TurnSampled(
        node=node,
        parent=parent,
        turn=parse_node(node).depth,
        tokens=pack_tokens(tokens),
        sampled_logprobs=pack_logprobs(logprobs),
        text=" ".join(map(str, tokens)),
        stop_reason="stop",
        seed=7,
        sample_index=0,
        policy_version=0,
    )


class Script:
    """Records of one group, written down in order."""

    def __init__(self, ticket: int = 1, prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> None:
        self.asked = asked(ticket, prompt, **changes)
        self.records: list[tuple[int, GroupEvent]] = [(0, self.asked)]

    def turn(
        self,
        node: str,
        parent: str | None,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None = None,
        *,
        tree: int = 1,
    ) -> Self:
        """Sample a turn; logprobs are -0.1 a token unless given."""
        values = [-0.1] * len(tokens) if logprobs is None else logprobs
        return self.add(tree, sampled(node, parent, tokens, values))

    def see(
        self, node: str, tokens: Sequence[int], *, tree: int = 1, reset: Sequence[int] | None = None
    ) -> Self:
        """Call the search tool from a turn and observe tokens."""
        self.add(tree, ToolCalled(node=node, call_id=f"call-{node}", tool="search", arguments={"query": "q"}))
        return self.add(
            tree,
            Observed(
                node=node,
                content="found",
                tokens=pack_tokens(tokens),
                prompt_reset=None if reset is None else pack_tokens(reset),
                call_id=f"call-{node}",
                status="success",
            ),
        )

    def end(
        self, node: str, reward: float | None = None, *, tree: int = 1, outcome: Outcome = Outcome.ANSWERED
    ) -> Self:
        """End a trajectory and, with a reward, score it."""
        self.add(tree, Answered(leaf=node, outcome=outcome, answer="she", text="Answer: she"))
        if reward is not None:
            self.score(node, reward, tree=tree)
        return self

    def score(self, node: str, value: float, *, tree: int = 1, scope: str = "leaf") -> Self:
        """Score a leaf or a node."""
        return self.add(
            tree,
            Rewarded(
                node=node, value=value, scorer="made", scorer_version="1", source_digest="d", scope=scope
            ),
        )

    def refer(self, node: str, logprobs: Sequence[float], *, tree: int = 1) -> Self:
        """Score a turn with the base model."""
        return self.add(tree, ReferenceScored(node=node, logprobs=pack_logprobs(logprobs), base_model="base"))

    def expand(self, round_: int, nodes: Sequence[str | None], *, tree: int = 1) -> Self:
        """Choose nodes for expansion."""
        return self.add(tree, NodesChosen(round=round_, nodes=tuple(nodes), policy="random"))

    def add(self, tree: int, event: GroupEvent) -> Self:
        """Write one event down."""
        self.records.append((tree, event))
        return self

    def group(self) -> Group:
        """Return the folded group."""
        return fold_group(self.records)

    def scored(self) -> tuple[Group, tuple[ChosenLeaf, ...]]:
        """Return the folded group with every scored leaf chosen."""
        group = self.group()
        return group, scored_leaves(group)


def scored_leaves(group: Group) -> tuple[ChosenLeaf, ...]:
    """Return every scored leaf as a member."""
    return tuple(
        ChosenLeaf(tree=ended.tree, leaf=ended.leaf)
        for ended in trajectories(group)
        if ended.reward is not None
    )


def chains(
    rewards: Sequence[float], *, ticket: int = 1, tokens: Sequence[int] = (4, 5), **changes: Any
) -> Script:
    """Return a group of one-turn trajectories, one tree each, with these rewards."""
    script = Script(ticket, **changes)
    for tree, reward in enumerate(rewards, start=1):
        script.turn("0.0.0", None, tokens, tree=tree).end("0.0.0", reward, tree=tree)
    return script


def bush(rewards: tuple[float, float, float, float], *, ticket: int = 1) -> Script:
    """Return one tree of four leaves: two first turns, the first continued three ways.

    Leaves in node order: 0.0.1 and 1.0.1, 1.1.1 below 0.0.0, then 2.0.0 on its own.
    """
    script = Script(ticket, plan=Plan(mode="tree", m=1, n=2, l=2, k=4))
    script.turn("0.0.0", None, [10, 11]).see("0.0.0", [12]).turn("0.0.1", "0.0.0", [13])
    script.end("0.0.1", rewards[0]).expand(1, ["0.0.0", "0.0.0"])
    script.turn("1.0.1", "0.0.0", [14, 15]).end("1.0.1", rewards[1])
    script.turn("1.1.1", "0.0.0", [16]).end("1.1.1", rewards[2])
    script.expand(2, [None]).turn("2.0.0", None, [17]).end("2.0.0", rewards[3])
    return script
