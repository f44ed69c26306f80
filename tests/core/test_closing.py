"""The closing rule and the choice of members."""

import pytest

from core.choice import draw, subset
from core.closing import Close, GiveUp, choose_members, close_or_give_up, most_members, tree_count
from core.events import Answered, ChosenLeaf, GroupEvent, Outcome, Plan
from tests.rollout.support import asked, chosen, ended, folded, sampled, step, tree_plan


def void(leaf: str, outcome: Outcome = Outcome.VOID_TOOL, detail: str = "search timed out") -> Answered:
    """Return a void end."""
    return Answered(leaf=leaf, outcome=outcome, answer=None, text="", detail=detail)


def leaf(node: str = "0.0.0", value: float = 1.0) -> list[GroupEvent]:
    """Return a trajectory of one turn, scored."""
    return [sampled(node, None), *ended(node, value)]


BROAD = [*step("0.0.0", None), sampled("0.0.1", "0.0.0"), *ended("0.0.1"), chosen(1, "0.0.0", "0.0.0", None)]
BROAD += [
    sampled("1.0.1", "0.0.0"),
    *ended("1.0.1", 0.0),
    sampled("1.1.1", "0.0.0"),
    *ended("1.1.1", None, Outcome.VOID_TOOL),
]
BROAD += [sampled("1.2.0", None), *ended("1.2.0", 0.5)]


def test_all_scored_chains_are_members() -> None:
    """Chain mode keeps every non-void leaf, in tree order."""
    group = folded(
        asked(Plan(mode="chain", group_size=3)), [leaf(), [sampled("0.0.0", None), void("0.0.0")], leaf()]
    )
    assert choose_members(group, 0) == (ChosenLeaf(tree=1, leaf="0.0.0"), ChosenLeaf(tree=3, leaf="0.0.0"))
    assert isinstance(close_or_give_up(group, 0), Close)


@pytest.mark.parametrize("k", [1, 2])
def test_k_of_a_trees_leaves_are_drawn(k: int) -> None:
    """K of the three non-void leaves, by (run seed, uid, tree, "leaves"), in node order."""
    group = folded(asked(tree_plan(n=3, k=k)), [BROAD])
    leaves = ("0.0.1", "1.0.1", "1.2.0")
    expected = [leaves[place] for place in subset(draw(4, "000000.0", 1, "leaves", count=3), k)]
    assert [choice.leaf for choice in choose_members(group, 4)] == expected


def test_k_larger_than_the_tree_takes_all() -> None:
    """Fewer leaves than K: all non-void ones."""
    group = folded(asked(tree_plan(n=3, k=9)), [BROAD])
    assert [choice.leaf for choice in choose_members(group, 4)] == ["0.0.1", "1.0.1", "1.2.0"]


def test_choice_varies_with_the_seed() -> None:
    """Over many run seeds every leaf is chosen at times."""
    group = folded(asked(tree_plan(n=3, k=1)), [BROAD])
    assert {choose_members(group, seed)[0].leaf for seed in range(40)} == {"0.0.1", "1.0.1", "1.2.0"}


def test_all_void_is_given_up_with_its_cause() -> None:
    """Nothing to train on, and the reason says why."""
    group = folded(asked(), [[void("0.0.0", Outcome.VOID_ENGINE, "no capacity")], [void("0.0.0")]])
    assert close_or_give_up(group, 0) == GiveUp("all_void: void_engine (no capacity)")


def test_too_few_members_are_given_up() -> None:
    """One member where two are asked for; unfinished trajectories do not count."""
    group = folded(asked(), [leaf(), step("0.0.0", None)])
    assert close_or_give_up(group, 0) == GiveUp("too_few_members: 1, expected at least 2")
    nothing = folded(asked(), [step("0.0.0", None)])
    assert close_or_give_up(nothing, 0) == GiveUp("too_few_members: 0, expected at least 2")


def test_a_late_group_closes_with_what_has_ended() -> None:
    """The rule serves a deadline as well: open trajectories are left out."""
    group = folded(asked(Plan(mode="chain", group_size=3)), [leaf(), step("0.0.0", None), leaf()])
    assert close_or_give_up(group, 0) == Close(
        (ChosenLeaf(tree=1, leaf="0.0.0"), ChosenLeaf(tree=3, leaf="0.0.0"))
    )


def test_counts_of_a_plan() -> None:
    """Chains: G trees of one member; trees: M, and at most L·N + 1 leaves of which K are kept."""
    assert (tree_count(Plan(mode="chain", group_size=8)), most_members(Plan(mode="chain", group_size=8))) == (
        8,
        8,
    )
    assert (tree_count(tree_plan(m=2)), most_members(tree_plan(m=2, n=2, l=1, k=3))) == (2, 6)
    assert most_members(tree_plan(m=2, n=2, l=0, k=3)) == 2
