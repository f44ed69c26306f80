"""The fold from a group's records to its trees and trajectories."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays import pack_logprobs, pack_tokens
from core.errors import FoldError
from core.events import Answered, ChosenLeaf, GroupEvent, NodesChosen, Observed, Outcome, ToolCalled
from core.growing import Growing
from core.ids import parse_node
from core.tree import Tree, fold_group, members, trajectories, trajectory
from tests.building import Script, asked, bush, chains, sampled, scored_leaves
from tests.strategies import group_records

Records = list[tuple[int, GroupEvent]]


def test_a_chain_of_two_turns() -> None:
    """Turn, call, observation, turn, answer and reward stand where they belong."""
    script = Script().turn("0.0.0", None, [4, 5]).see("0.0.0", [6]).turn("0.0.1", "0.0.0", [7])
    group = script.end("0.0.1", 1.0).refer("0.0.0", [-0.3, -0.4]).score("0.0.0", 0.5, scope="node").group()
    tree = group.trees[1]
    first, last = tree.nodes.values()
    assert (group.uid, list(group.trees)) == ("000001.0", [1])
    assert (first.node, first.parent, first.turn) == ("0.0.0", None, 0)
    assert (last.node, last.parent, last.turn) == ("0.0.1", "0.0.0", 1)
    assert first.tool_call is not None
    assert first.tool_call.call_id == "call-0.0.0"
    assert first.observation is not None
    assert first.observation.tokens == pack_tokens([6])
    assert first.reference is not None
    assert first.reference.logprobs == pack_logprobs([-0.3, -0.4])
    assert first.node_reward is not None
    assert first.node_reward.value == 0.5
    assert first.reward is None
    assert last.reward is not None
    assert tree.leaves() == (last,)
    ended = trajectory(group, 1, "0.0.1")
    assert ended.path == (first, last)
    assert (ended.outcome, ended.reward, ended.is_void) == (Outcome.ANSWERED, 1.0, False)
    assert ended.tree_uid == "000001.0/t1"


def test_a_tree_of_four_leaves() -> None:
    """Branches share the nodes above them; children, leaves and paths come in node order."""
    group = bush((1.0, 0.0, 0.5, -0.1)).group()
    tree = group.trees[1]
    assert list(tree.nodes) == ["0.0.0", "0.0.1", "1.0.1", "1.1.1", "2.0.0"]
    assert [node.node for node in tree.children(None)] == ["0.0.0", "2.0.0"]
    assert [node.node for node in tree.children(tree.nodes["0.0.0"].node)] == ["0.0.1", "1.0.1", "1.1.1"]
    assert [[node.node for node in ended.path] for ended in trajectories(group)] == [
        ["0.0.0", "0.0.1"],
        ["0.0.0", "1.0.1"],
        ["0.0.0", "1.1.1"],
        ["2.0.0"],
    ]
    assert [event.round for event in tree.expansions] == [1, 2]


def test_node_order_is_by_number() -> None:
    """The tenth expansion stands after the second, though its text sorts before it."""
    script = Script().turn("0.0.0", None, [4]).end("0.0.0", 1.0).expand(1, [None] * 11)
    for expansion in (10, 2):
        script.turn(f"1.{expansion}.0", None, [5]).end(f"1.{expansion}.0", 0.0)
    group = script.group()
    assert list(group.trees[1].nodes) == ["0.0.0", "1.2.0", "1.10.0"]
    chosen = [ChosenLeaf(tree=1, leaf=leaf) for leaf in ("1.10.0", "1.2.0")]
    assert [member.leaf for member in members(group, chosen)] == ["1.2.0", "1.10.0"]


def test_a_void_end_may_name_a_turn_that_was_never_sampled() -> None:
    """An engine fault before the first token leaves an end without a turn; it is no leaf."""
    group = (
        Script()
        .end("0.0.0", tree=2, outcome=Outcome.VOID_ENGINE)
        .turn("0.0.0", None, [4])
        .end("0.0.0", 1.0)
        .group()
    )
    assert list(group.trees[2].unborn) == ["0.0.0"]
    assert group.trees[2].leaves() == ()
    assert [ended.tree for ended in trajectories(group)] == [1]


def test_a_void_end_does_not_keep_its_node_from_being_expanded() -> None:
    """What was observed before a fault may be continued by another branch, before or after the fault."""
    script = Script().turn("0.0.0", None, [4]).see("0.0.0", [5]).expand(1, ["0.0.0"])
    script.end("0.0.0", outcome=Outcome.CANCELLED).turn("1.0.1", "0.0.0", [6]).end("1.0.1", 1.0)
    late = Script().turn("0.0.0", None, [4]).see("0.0.0", [5]).expand(1, ["0.0.0"])
    late.turn("1.0.1", "0.0.0", [6]).end("1.0.1", 1.0).end("0.0.0", outcome=Outcome.CANCELLED)
    assert script.group() == late.group()
    assert [ended.is_void for ended in trajectories(script.group())] == [True, False]


@given(st.data())
def test_any_interleaving_of_trees_gives_the_same_group(data: st.DataObject) -> None:
    """Only the order inside each tree matters."""
    records = data.draw(group_records())
    streams: dict[int, Records] = {}
    for record in records:
        streams.setdefault(record[0], []).append(record)
    order = data.draw(st.permutations([tree for tree, _ in records]))
    mixed = [streams[tree].pop(0) for tree in order]
    assert fold_group(mixed) == fold_group(records)


@given(st.data())
def test_folding_in_two_parts_is_folding_at_once(data: st.DataObject) -> None:
    """fold(a + b) == fold(b, onto=fold(a)), wherever the cut is."""
    records = data.draw(group_records())
    cut = data.draw(st.integers(1, len(records)))
    assert fold_group(records[cut:], onto=fold_group(records[:cut])) == fold_group(records)


@given(group_records())
def test_nodes_stand_in_node_order_and_paths_lead_to_the_root(records: Records) -> None:
    """Every generated group keeps the two orders that everything else builds on."""
    group = fold_group(records)
    assert list(group.trees) == sorted(group.trees)
    for tree in group.trees.values():
        assert list(tree.nodes) == sorted(tree.nodes, key=parse_node)
    for ended in trajectories(group):
        assert [node.turn for node in ended.path] == list(range(len(ended.path)))
        assert [node.parent for node in ended.path] == [None, *(node.node for node in ended.path[:-1])]


def test_order_of_arrival_inside_a_tree_does_not_matter() -> None:
    """Two branches that grow side by side give the same tree whichever answers first."""

    def grow(order: tuple[int, int]) -> Script:
        script = Script().turn("0.0.0", None, [4]).see("0.0.0", [5]).expand(1, ["0.0.0", "0.0.0"])
        for branch in order:
            script.turn(f"1.{branch}.1", "0.0.0", [6 + branch]).end(f"1.{branch}.1", float(branch))
        return script

    assert grow((0, 1)).group() == grow((1, 0)).group()


ONE = Script().turn("0.0.0", None, [4, 5])
SEEN = Script().turn("0.0.0", None, [4, 5]).see("0.0.0", [6])


def more(script: Script, *steps: Callable[[Script], Any]) -> Records:
    """Return a copy of a script's records with more steps."""
    copy = Script()
    copy.records = list(script.records)
    for step in steps:
        step(copy)
    return copy.records


def _changed(event: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(event, **changes)


def _seen(node: str, tokens: list[int]) -> Observed:
    return Observed(node=node, content="", tokens=pack_tokens(tokens))


CONTRADICTIONS: dict[str, tuple[Records, str]] = {
    "nothing asked": ([(1, sampled("0.0.0", None, [1], [0.0]))], "no group record"),
    "asked twice": ([*ONE.records, (0, asked())], "expected one, in stream 0"),
    "asked inside a tree": ([(1, asked())], "expected one, in stream 0"),
    "turn in stream 0": ([(0, asked()), (0, sampled("0.0.0", None, [1], [0.0]))], "TurnSampled in stream 0"),
    "uid of another ticket": ([(0, asked(uid="000002.0"))], "of ticket 1, attempt 0: expected '000001.0'"),
    "malformed uid": ([(0, asked(uid="two"))], "uid 'two' of ticket 1"),
    "empty prompt": ([(0, asked(prompt=()))], "prompt of 0 bytes"),
    "cut prompt": ([(0, _changed(asked(), prompt=b"abc"))], "prompt of 3 bytes"),
    "malformed node": (
        more(ONE, lambda s: s.add(1, _changed(sampled("0.0.0", None, [1], [0.0]), node="x"))),
        "not a node id: 'x'",
    ),
    "sampled twice": (more(ONE, lambda s: s.turn("0.0.0", None, [1])), "sampled twice"),
    "sampled after its void end": (
        more(
            Script(),
            lambda s: s.end("0.0.0", outcome=Outcome.CANCELLED),
            lambda s: s.turn("0.0.0", None, [1]),
        ),
        "after its end",
    ),
    "unequal lengths": (
        more(Script(), lambda s: s.turn("0.0.0", None, [1, 2], [0.0])),
        "8 bytes of tokens and 4",
    ),
    "cut tokens": (
        more(
            Script(),
            lambda s: s.add(
                1, _changed(sampled("0.0.0", None, [1], [0.0]), tokens=b"abc", sampled_logprobs=b"abc")
            ),
        ),
        "3 bytes of tokens and 3",
    ),
    "orphan": (more(ONE, lambda s: s.turn("0.0.1", "0.0.9", [1])), "an orphan: parent '0.0.9'"),
    "orphan in another tree": (more(SEEN, lambda s: s.turn("0.0.1", "0.0.0", [1], tree=2)), "an orphan"),
    "parent unobserved": (more(ONE, lambda s: s.turn("0.0.1", "0.0.0", [1])), "nothing to go on from"),
    "parent's observation is empty": (
        more(ONE, lambda s: s.see("0.0.0", []), lambda s: s.turn("0.0.1", "0.0.0", [1])),
        "nothing to go on from",
    ),
    "parent ended": (
        more(SEEN, lambda s: s.end("0.0.0"), lambda s: s.turn("0.0.1", "0.0.0", [1])),
        "or has ended",
    ),
    "depth is not the turn": (
        more(SEEN, lambda s: s.turn("0.0.2", "0.0.0", [1])),
        "turn 2 below parent '0.0.0'",
    ),
    "deep first turn": (more(Script(), lambda s: s.turn("0.0.1", None, [1])), "turn 1 below parent None"),
    "round not chosen": (more(SEEN, lambda s: s.turn("1.0.1", "0.0.0", [1])), "round 1 chose []"),
    "another node chosen": (
        more(SEEN, lambda s: s.expand(1, [None]), lambda s: s.turn("1.0.1", "0.0.0", [1])),
        "starts from '0.0.0', but round 1 chose [None]",
    ),
    "expansion beyond the choice": (
        more(SEEN, lambda s: s.expand(1, ["0.0.0"]), lambda s: s.turn("1.1.1", "0.0.0", [1])),
        "round 1 chose ['0.0.0']",
    ),
    "second chain in a tree": (more(ONE, lambda s: s.turn("0.1.0", None, [1])), "round 0 chose [None]"),
    "call of no turn": (
        more(ONE, lambda s: s.see("0.0.5", [1])),
        "ToolCalled for a turn that was not sampled",
    ),
    "call after call": (more(SEEN, lambda s: s.see("0.0.0", [1])), "a tool call after"),
    "call after the end": (
        more(ONE, lambda s: s.end("0.0.0"), lambda s: s.see("0.0.0", [1])),
        "a tool call after",
    ),
    "observation twice": (more(SEEN, lambda s: s.add(1, _seen("0.0.0", [1]))), "an observation after"),
    "observation after the end": (
        more(ONE, lambda s: s.end("0.0.0"), lambda s: s.add(1, _seen("0.0.0", [1]))),
        "an observation after",
    ),
    "cut observation": (
        more(ONE, lambda s: s.add(1, Observed(node="0.0.0", content="", tokens=b"abc"))),
        "3 bytes",
    ),
    "empty reset": (more(ONE, lambda s: s.see("0.0.0", [1], reset=[])), "prompt_reset of 0 bytes"),
    "cut reset": (
        more(ONE, lambda s: s.add(1, Observed(node="0.0.0", content="", tokens=b"", prompt_reset=b"a"))),
        "prompt_reset of 1 bytes",
    ),
    "observation of no call": (
        more(ONE, lambda s: s.add(1, Observed(node="0.0.0", content="", tokens=b"", call_id="c9"))),
        "call 'c9', expected ''",
    ),
    "ended twice": (more(ONE, lambda s: s.end("0.0.0"), lambda s: s.end("0.0.0")), "ended twice"),
    "unborn ended twice": (
        more(
            Script(),
            lambda s: s.end("0.0.0", outcome=Outcome.CANCELLED),
            lambda s: s.end("0.0.0", outcome=Outcome.CANCELLED),
        ),
        "ended twice",
    ),
    "answer of no turn": (more(ONE, lambda s: s.end("0.0.1")), "Answered for a turn that was not sampled"),
    "answered after it went on": (
        more(SEEN, lambda s: s.turn("0.0.1", "0.0.0", [1]), lambda s: s.end("0.0.0")),
        "after it was continued",
    ),
    "scored before its end": (more(ONE, lambda s: s.score("0.0.0", 1.0)), "has not ended, or ended void"),
    "void scored": (
        more(ONE, lambda s: s.end("0.0.0", 1.0, outcome=Outcome.VOID_TOOL)),
        "has not ended, or ended void",
    ),
    "scored twice": (
        more(ONE, lambda s: s.end("0.0.0", 1.0), lambda s: s.score("0.0.0", 1.0)),
        "scored twice",
    ),
    "node scored twice": (
        more(ONE, *[lambda s: s.score("0.0.0", 1.0, scope="node")] * 2),
        "scored twice as a node",
    ),
    "reward of another scope": (more(ONE, lambda s: s.score("0.0.0", 1.0, scope="tree")), "scope 'tree'"),
    "reference twice": (more(ONE, *[lambda s: s.refer("0.0.0", [0.0, 0.0])] * 2), "reference logprobs twice"),
    "short reference": (more(ONE, lambda s: s.refer("0.0.0", [0.0])), "not one per sampled token"),
    "round twice": (more(SEEN, *[lambda s: s.expand(1, [None])] * 2), "round 1 after round 1"),
    "round 0 chosen": (more(SEEN, lambda s: s.expand(0, [None])), "round 0 after round 0"),
    "unequal scores": (
        more(SEEN, lambda s: s.add(1, NodesChosen(round=1, nodes=(), policy="p", scores=(1.0,)))),
        "1 scores for 0 candidates",
    ),
    "unknown node chosen": (more(SEEN, lambda s: s.expand(1, ["0.0.7"])), "NodesChosen for a turn"),
    "unobserved node chosen": (more(ONE, lambda s: s.expand(1, ["0.0.0"])), "nothing to go on from"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_refused(name: str) -> None:
    """Events that contradict each other raise FoldError, which names the place and the rule."""
    records, message = CONTRADICTIONS[name]
    with pytest.raises(FoldError) as caught:
        fold_group(records)
    assert message in str(caught.value)


def test_a_group_keeps_to_one_policy_version() -> None:
    """A turn sampled from other weights than the group's is refused."""
    with pytest.raises(FoldError, match=r"policy version 0, but group 000001.0 is pinned to 4"):
        Script(policy_version=4).turn("0.0.0", None, [1]).group()


def test_an_unknown_event_is_a_bug() -> None:
    """What is no tree event at all is not silently skipped."""
    with pytest.raises(AssertionError):
        Growing(Tree(1, {}, (), {})).add(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([ChosenLeaf(tree=9, leaf="0.0.0")], "has no tree 9, it has"),
        ([ChosenLeaf(tree=1, leaf="0.0.9")], "no node '0.0.9'"),
        ([ChosenLeaf(tree=3, leaf="0.0.0")], "has not ended, so it is no leaf"),
        ([ChosenLeaf(tree=4, leaf="0.0.0")], "was not scored"),
        ([ChosenLeaf(tree=5, leaf="0.0.0")], "ended as 'void_tool': a void trajectory is no member"),
        ([ChosenLeaf(tree=1, leaf="0.0.0")] * 2, "is chosen twice"),
    ],
)
def test_who_cannot_be_a_member(chosen: list[ChosenLeaf], message: str) -> None:
    """Only ended, scored, non-void leaves are members, each once."""
    script = chains([1.0, 0.0]).turn("0.0.0", None, [4], tree=3)
    script.turn("0.0.0", None, [4], tree=4).end("0.0.0", tree=4)
    script.turn("0.0.0", None, [4], tree=5).end("0.0.0", tree=5, outcome=Outcome.VOID_TOOL)
    with pytest.raises(FoldError, match=message):
        members(script.group(), chosen)


def test_members_come_in_tree_and_node_order() -> None:
    """The order in which leaves were chosen does not matter."""
    group, chosen = chains([1.0, 0.0, 0.5]).scored()
    assert members(group, chosen[::-1]) == members(group, chosen)
    assert [member.tree for member in members(group, chosen)] == [1, 2, 3]
    assert scored_leaves(group) == chosen


def test_values_keep_their_types() -> None:
    """Calls and ends that the fold keeps are the events themselves."""
    ended = trajectory(bush((1.0, 0.0, 0.5, -0.1)).group(), 1, "2.0.0")
    assert isinstance(ended.ended, Answered)
    assert all(isinstance(node.tool_call, ToolCalled | None) for node in ended.path)
