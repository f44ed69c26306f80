"""How a group grows, decided from hand-made records."""

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
import pytest

from core.arrays import Float64
from core.choice import draw
from core.errors import ConfigError
from core.events import Answered, NodesChosen, Outcome, Plan
from core.ids import NodeId
from core.nodes import Tree
from core.tree import Group
from rollout.expand import Expansion, choose_random
from rollout.seeds import request_seed
from rollout.trees import (
    Growth,
    Place,
    Policy,
    Request,
    branch_tips,
    candidates,
    continuation,
    first_request,
    next_in_tree,
)
from tests.rollout.support import (
    CHAIN,
    asked,
    called,
    chosen,
    ended,
    folded,
    observed,
    sampled,
    step,
    tree_plan,
)


def finished(group: Group, tree: int, tip: NodeId) -> bool:
    """Tell whether a branch has ended."""
    return group.trees[tree].nodes[tip].answer is not None


RANDOM = Policy(7, choose_random, finished)

CHAIN_OF_THREE = [*step("0.0.0", None), *step("0.0.1", "0.0.0"), sampled("0.0.2", "0.0.1"), *ended("0.0.2")]


def test_first_turn_of_all_chains_is_one_request() -> None:
    """The first request has one child per trajectory and belongs to no tree."""
    request = first_request(asked(CHAIN))
    assert request == Request(0, None, (Place(1, "0.0.0"), Place(2, "0.0.0")), 0)
    assert request.seed(7, "000000.0") == request_seed(7, "000000.0", 0, None, 0)


def test_continuation_is_the_next_turn_of_the_same_branch() -> None:
    """A tip goes on below itself, whatever its round."""
    group = folded(asked(tree_plan()), [[*CHAIN_OF_THREE, chosen(1, "0.0.1", None), *step("1.1.0", None)]])
    assert continuation(group.trees[1], "1.1.0") == Request(1, "1.1.0", (Place(1, "1.1.1"),), 0)


def test_open_chain_has_one_tip_and_an_ended_one_nothing() -> None:
    """A chain never expands."""
    group = folded(asked(CHAIN), [[*step("0.0.0", None)], CHAIN_OF_THREE])
    assert next_in_tree(RANDOM, group, 1) == Growth((), ("0.0.0",))
    assert next_in_tree(RANDOM, group, 2) is None


def test_candidates_are_root_and_observed_nodes_with_a_generation_left() -> None:
    """The leaf is none, and neither is a node whose next turn the limits forbid."""
    whole = folded(asked(tree_plan()), [CHAIN_OF_THREE])
    assert candidates(whole, whole.trees[1]) == (None, "0.0.0", "0.0.1")
    short = folded(asked(tree_plan(), max_turns=2), [CHAIN_OF_THREE])
    assert candidates(short, short.trees[1]) == (None, "0.0.0")
    # After 0.0.1 the prompt has 5 + 2 × (2 + 3) = 15 tokens.
    tight = folded(asked(tree_plan(), max_trajectory_tokens=15), [CHAIN_OF_THREE])
    assert candidates(tight, tight.trees[1]) == (None, "0.0.0")


def test_void_observation_is_no_candidate() -> None:
    """A node whose tool failed leads nowhere."""
    events = [
        *step("0.0.0", None),
        sampled("0.0.1", "0.0.0"),
        called("0.0.1"),
        observed("0.0.1", tokens=0, ok=False),
        *ended("0.0.1", None, Outcome.VOID_TOOL),
    ]
    group = folded(asked(tree_plan()), [events])
    assert candidates(group, group.trees[1]) == (None, "0.0.0")


def test_root_that_answers_at_once_is_expanded_from_the_root() -> None:
    """Only the root can be chosen, as often as there are expansions, in one request."""
    events = [sampled("0.0.0", None, "Answer: x"), *ended("0.0.0")]
    group = folded(asked(tree_plan(n=3)), [events])
    choice = next_in_tree(RANDOM, group, 1)
    assert isinstance(choice, NodesChosen)
    assert choice.nodes == (None, None, None)
    assert choice.candidates == (None,)
    grown = folded(asked(tree_plan(n=3)), [[*events, choice]])
    places = (Place(1, "1.0.0"), Place(1, "1.1.0"), Place(1, "1.2.0"))
    assert next_in_tree(RANDOM, grown, 1) == Growth((Request(1, None, places, 1),), ())


def test_choice_is_the_seeded_draw_over_sorted_candidates() -> None:
    """The round's nodes follow from run seed, uid, tree and round alone."""
    group = folded(asked(tree_plan(n=4)), [CHAIN_OF_THREE])
    choice = next_in_tree(RANDOM, group, 1)
    draws = draw(7, "000000.0", 1, 1, count=7)
    expected = tuple((None, "0.0.0", "0.0.1")[int(value * 3)] for value in draws[:4])
    assert choice == NodesChosen(
        round=1, nodes=expected, policy="random", candidates=(None, "0.0.0", "0.0.1"), scores=()
    )


def test_expansions_of_one_node_share_one_request() -> None:
    """Two choices of one node are two samples of one request; ordinals count earlier requests of a parent."""
    events = [*CHAIN_OF_THREE, chosen(1, "0.0.1", None, "0.0.1")]
    group = folded(asked(tree_plan(n=3)), [events])
    growth = next_in_tree(RANDOM, group, 1)
    assert growth == Growth(
        (
            Request(1, "0.0.1", (Place(1, "1.0.2"), Place(1, "1.2.2")), 1),
            Request(1, None, (Place(1, "1.1.0"),), 1),
        ),
        (),
    )


def test_round_goes_on_where_it_stood() -> None:
    """With one request answered, what is left is its open branch and the other request."""
    events = [*CHAIN_OF_THREE, chosen(1, "0.0.1", None, "0.0.1")]
    events += [sampled("1.0.2", "0.0.1"), *ended("1.0.2"), sampled("1.2.2", "0.0.1")]
    group = folded(asked(tree_plan(n=3)), [events])
    assert next_in_tree(RANDOM, group, 1) == Growth((Request(1, None, (Place(1, "1.1.0"),), 1),), ("1.2.2",))


def test_second_round_waits_for_the_first_and_counts_its_requests() -> None:
    """The next choice comes when every branch of the round has ended."""
    first = [*CHAIN_OF_THREE, chosen(1, "0.0.1", None)]
    first += [sampled("1.0.2", "0.0.1"), *ended("1.0.2"), sampled("1.1.0", None)]
    plan = tree_plan(n=2, l=2)
    assert next_in_tree(RANDOM, folded(asked(plan), [first]), 1) == Growth((), ("1.1.0",))
    done = [*first, *ended("1.1.0")]
    choice = next_in_tree(RANDOM, folded(asked(plan), [done]), 1)
    assert isinstance(choice, NodesChosen)
    assert choice.round == 2
    second = [*done, chosen(2, None, "0.0.1")]
    assert next_in_tree(RANDOM, folded(asked(plan), [second]), 1) == Growth(
        (Request(1, None, (Place(1, "2.0.0"),), 2), Request(1, "0.0.1", (Place(1, "2.1.2"),), 2)), ()
    )


@pytest.mark.parametrize("plan", [tree_plan(n=2, l=0), tree_plan(n=0, l=2)])
def test_no_rounds_and_no_nodes_leave_a_chain(plan: Plan) -> None:
    """L = 0 and N = 0 are chains."""
    assert next_in_tree(RANDOM, folded(asked(plan), [CHAIN_OF_THREE]), 1) is None


def test_void_turn_ends_its_branch_only() -> None:
    """A branch whose next turn could not be sampled is over; the round's others go on."""
    void = Answered(leaf="1.0.2", outcome=Outcome.VOID_ENGINE, answer=None, text="", detail="busy")
    events = [*CHAIN_OF_THREE, chosen(1, "0.0.1", None), void, *step("1.1.0", None)]
    group = folded(asked(tree_plan(l=2)), [events])
    assert next_in_tree(RANDOM, group, 1) == Growth((), ("1.1.0",))
    assert branch_tips(group.trees[1]) == ("0.0.2", "1.1.0")


def test_tree_whose_first_turn_is_void_is_not_expanded() -> None:
    """Without a first turn there is nothing to expand."""
    void = Answered(leaf="0.0.0", outcome=Outcome.VOID_ENGINE, answer=None, text="")
    assert next_in_tree(RANDOM, folded(asked(tree_plan()), [[void]]), 1) is None


def test_branch_voided_in_the_middle_has_no_tip() -> None:
    """The turn before an unsampled one is no tip any more."""
    void = Answered(leaf="0.0.1", outcome=Outcome.VOID_ENGINE, answer=None, text="")
    group = folded(asked(tree_plan()), [[*step("0.0.0", None), void]])
    assert branch_tips(group.trees[1]) == ()
    choice = next_in_tree(RANDOM, group, 1)
    assert isinstance(choice, NodesChosen)
    assert choice.candidates == (None, "0.0.0")


def test_user_policy_that_breaks_its_word_is_refused() -> None:
    """A choice outside the candidates, or too few, is an error that shows both."""

    def outside(tree: Tree, among: Sequence[NodeId | None], count: int, draws: Float64) -> Expansion:
        return Expansion((NodeId("0.0.2"),) * count)

    group = folded(asked(tree_plan()), [CHAIN_OF_THREE])
    with pytest.raises(ConfigError, match=r"0\.0\.2.*expected 2 of the candidates"):
        next_in_tree(Policy(7, outside, finished), group, 1)


def test_policies_see_draws_for_expansions_and_candidates() -> None:
    """A policy gets one draw per expansion and one per candidate, all in [0, 1)."""
    seen: list[tuple[int, int, Float64]] = []

    def policy(tree: Tree, among: Sequence[NodeId | None], count: int, draws: Float64) -> Expansion:
        seen.append((count, len(among), draws))
        return Expansion((None,) * count, (0.0,) * len(among))

    group = folded(asked(tree_plan(n=5)), [CHAIN_OF_THREE])
    choice = next_in_tree(Policy(7, policy, finished), group, 1)
    assert isinstance(choice, NodesChosen)
    assert choice.scores == (0.0, 0.0, 0.0)
    ((count, among, draws),) = seen
    assert (count, among, len(draws)) == (5, 3, 8)
    assert np.all((draws >= 0) & (draws < 1))


def test_a_choice_is_recorded_as_plain_names() -> None:
    """A user's policy may pick with numpy: what is recorded can be stored and read back."""

    def pick(tree: Tree, among: Sequence[NodeId | None], count: int, draws: Float64) -> Expansion:
        return Expansion((cast("NodeId", np.str_("0.0.1")), None))

    choice = next_in_tree(Policy(7, pick, finished), folded(asked(tree_plan()), [CHAIN_OF_THREE]), 1)
    assert isinstance(choice, NodesChosen)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(choice), type=NodesChosen) == choice
    assert [type(node) for node in choice.nodes] == [str, type(None)]
