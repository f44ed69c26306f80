"""Builds recorded groups by hand: short token lists, explicit node ids."""

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import msgspec

from core.arrays import pack_logprobs, pack_tokens
from core.events import (
    Answered,
    GroupAsked,
    GroupEvent,
    NodesChosen,
    Observed,
    Outcome,
    Plan,
    Rewarded,
    SamplingParams,
    ToolCalled,
    TurnSampled,
)
from core.ids import make_uid, parse_node
from core.nodes import Tree
from core.tree import Group, fold_group
from store.ports import StreamWrite

Records = list[tuple[int, GroupEvent]]

CHAIN = Plan(mode="chain", group_size=2)


def tree_plan(m: int = 1, n: int = 2, l: int = 1, k: int = 3, expand: str = "random") -> Plan:  # noqa: E741
    """Return a tree plan."""
    return Plan(mode="tree", m=m, n=n, l=l, k=k, expand=expand)


def asked(plan: Plan = CHAIN, *, ticket: int = 0, attempt: int = 0, **params: object) -> GroupAsked:
    """Return what is asked: a prompt of five tokens."""
    return GroupAsked(
        uid=make_uid(ticket, attempt),
        ticket=ticket,
        attempt=attempt,
        example_id=f"q{ticket}",
        question="Who?",
        references=("Ada",),
        data_source="nq",
        prompt=pack_tokens([1, 2, 3, 4, 5]),
        plan=plan,
        policy_version=0,
        weights_uri="",
        params=SamplingParams(**params),  # type: ignore[arg-type]
    )


def sampled(
    node: str,
    parent: str | None,
    text: str = "call",
    *,
    tokens: int = 2,
    logprob: float = -0.5,
    stop: str = "stop",
) -> TurnSampled:
    """Return a turn of `tokens` tokens, each with the same logprob."""
    return TurnSampled(
        node=node,
        parent=parent,
        turn=parse_node(node).depth,
        tokens=pack_tokens(list(range(10, 10 + tokens))),
        sampled_logprobs=pack_logprobs([logprob] * tokens),
        text=text,
        stop_reason=stop,
        seed=0,
        sample_index=0,
        policy_version=0,
    )


def called(node: str, tool: str = "search") -> ToolCalled:
    """Return a tool call."""
    return ToolCalled(node=node, call_id=f"c/{node}", tool=tool, arguments={"query": "q"})


def observed(node: str, *, tokens: int = 3, ok: bool = True) -> Observed:
    """Return an observation of `tokens` tokens."""
    return Observed(
        node=node,
        content="text",
        tokens=pack_tokens([7] * tokens),
        ok=ok,
        status="success" if ok else "error",
    )


def step(node: str, parent: str | None, **turn: object) -> list[GroupEvent]:
    """Return a whole agent step: turn, call, observation."""
    return [sampled(node, parent, **turn), called(node), observed(node)]  # type: ignore[arg-type]


def ended(leaf: str, value: float | None = 1.0, outcome: Outcome = Outcome.ANSWERED) -> list[GroupEvent]:
    """Return an end and, unless `value` is None, its reward."""
    events: list[GroupEvent] = [Answered(leaf=leaf, outcome=outcome, answer=None, text="")]
    if value is not None:
        events.append(
            Rewarded(node=leaf, value=value, scorer="em_format", scorer_version="1", source_digest="d")
        )
    return events


def chosen(round_: int, *nodes: str | None) -> NodesChosen:
    """Return one round's choice."""
    return NodesChosen(round=round_, nodes=nodes, policy="random")


def folded(question: GroupAsked, trees: Sequence[Sequence[GroupEvent]]) -> Group:
    """Return the group of these events, tree numbers from 1."""
    records: Records = [(0, question)]
    records += [(index, event) for index, events in enumerate(trees, 1) for event in events]
    return fold_group(records)


class CrashError(Exception):
    """Raised by a Recorder in the place of a crash."""


class Recorder:
    """Records in memory, and a crash after as many writes as it is told."""

    def __init__(self, records: Records = (), writes_left: int | None = None) -> None:  # type: ignore[assignment]
        self.records = list(records)
        self.writes = 0
        self._left = writes_left

    async def write(self, writes: Sequence[StreamWrite]) -> None:
        """Take all the writes, or crash before any of them."""
        if self._left == 0:
            raise CrashError
        self._left = None if self._left is None else self._left - 1
        self.writes += 1
        await anyio.lowlevel.checkpoint()
        for write in writes:
            stream = [event for tree, event in self.records if tree == write.tree]
            assert write.expect == len(stream), "a writer always knows where its stream ends"
            self.records += [(write.tree, event) for event in write.events]


def timeless(group: Group) -> Group:
    """Return the group without what a clock said."""
    return group._replace(
        asked=msgspec.structs.replace(group.asked, at=0.0),
        trees={index: _timeless_tree(tree) for index, tree in group.trees.items()},
    )


def _timeless_tree(tree: Tree) -> Tree:
    nodes = {
        name: node._replace(
            sample=msgspec.structs.replace(node.sample, seconds=0.0),
            observation=node.observation and msgspec.structs.replace(node.observation, latency=0.0),
        )
        for name, node in tree.nodes.items()
    }
    return msgspec.structs.replace(tree, nodes=nodes)
