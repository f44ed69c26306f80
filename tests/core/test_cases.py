"""The collected advantage and token cases, where they are at hand."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from core.advantage import LeafTable, estimate
from core.datum import build_datum
from core.errors import RewardError
from core.segments import segments
from core.tree import trajectory
from tests.building import Script

CASES = Path(__file__).parents[2] / ".." / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no collected cases at {CASES}")

OUR_NAMES = {
    "mean": "group_mean",
    "grpo": "grpo",
    "rloo": "rloo",
    "tree": "tree",
    "tree_2norm": "tree_2norm",
    "tree_inner": "tree_intra",
}
"""The cases' names of estimators, and ours."""

WITH_ONE_LIST = [
    "01-eight-three-right",
    "03-all-eight-bad-format",
    "05-one-against-seven",
    "06-group-of-one",
    "10-biased-or-unbiased-std",
    "11-where-epsilon-stands",
    "13-tree-with-one-leaf",
    "15-order-of-tree-2norm",
    "16-incomplete-group",
    "18-same-index-in-two-sources",
]


def load(kind: str, name: str) -> dict[str, Any]:
    """Return one case."""
    loaded: dict[str, Any] = json.loads((CASES / kind / f"{name}.json").read_text())
    return loaded


def flat_table(rewards: list[float], uid: list[Any], tree: list[Any] | None = None) -> LeafTable:
    """Return a table of one-turn trajectories; without trees every leaf is its own."""
    count = len(rewards)
    trees = list(range(count)) if tree is None else [sorted(set(tree)).index(name) for name in tree]
    return LeafTable(
        rewards=np.array(rewards, dtype=np.float64),
        uid=np.array([sorted(set(uid)).index(name) for name in uid]),
        tree=np.array(trees),
        path_starts=np.arange(count + 1),
        path_nodes=np.arange(count),
        node_parent=np.full(count, -1),
    )


def table_of(case: dict[str, Any]) -> LeafTable:
    """Return a case's table; a question is named by its source and its index."""
    given = case["input"]
    uid = given.get("uid") or [f"{row['data_source']}:{row['index']}" for row in given.get("rows", [])]
    return flat_table(given["rewards"], uid, given.get("tree_uid"))


@pytest.mark.parametrize("name", WITH_ONE_LIST)
def test_raw_singletons_give_the_cases_values(name: str) -> None:
    """With `raw` every estimator gives the 50-digit values of the case within 1e-9."""
    case = load("d-advantage", name)
    compared = 0
    for theirs, ours in OUR_NAMES.items():
        if theirs in case["expected"]:
            found = estimate(ours, table_of(case), singleton="raw")
            expected = [float(value) for value in case["expected"][theirs]]
            np.testing.assert_allclose(found.leaf, expected, rtol=0, atol=1e-9)
            compared += 1
    assert compared >= 3


ZERO_TWINS: dict[str, dict[str, list[float]]] = {
    "06-group-of-one": {name: [0.0] for name in OUR_NAMES.values()},
    "13-tree-with-one-leaf": {
        # Leaf 0, alone in its tree, keeps only what the question says of it.
        "tree": [0.86602390378703672, -1.4433731729783945, 2.0207224421697523, -1.4433731729783945],
        "tree_2norm": [0.0, -0.57734969183893393, 1.1546993836778679, -0.57734969183893393],
        "tree_intra": [0.0, -0.57734926919135781, 1.1546985383827156, -0.57734926919135781],
    },
}


@pytest.mark.parametrize("name", WITH_ONE_LIST)
def test_zero_singletons_differ_only_in_sets_of_one(name: str) -> None:
    """The `zero` twin of every case: sets of one are worth 0, all other values stay."""
    case = load("d-advantage", name)
    for theirs, ours in OUR_NAMES.items():
        if theirs in case["expected"]:
            expected = ZERO_TWINS.get(name, {}).get(ours) or [float(v) for v in case["expected"][theirs]]
            found = estimate(ours, table_of(case), singleton="zero")
            np.testing.assert_allclose(found.leaf, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("singleton", ["zero", "raw"])
@pytest.mark.parametrize("ours", OUR_NAMES.values())
def test_equal_rewards_give_exactly_zero(ours: str, singleton: Literal["zero", "raw"]) -> None:
    """Eight times −0.1: not −1.4e-17, but 0, so that the group is seen to carry no signal.

    Every leaf is in the same tree, so that no set of one is involved.
    """
    case = load("d-advantage", "03-all-eight-bad-format")
    table = flat_table(case["input"]["rewards"], case["input"]["uid"], ["t"] * 8)
    found = estimate(ours, table, singleton=singleton)
    assert not found.leaf.any()
    assert not found.entries.any()


def test_a_reward_that_is_not_a_number_is_refused_by_name() -> None:
    """NaN never becomes an advantage: it is an error at the reward."""
    case = load("d-advantage", "08-one-valid-reward-left")
    rewards = [float(value) for value in case["input"]["rewards"]]
    table = flat_table(rewards, case["input"]["uid"])._replace(names=("a", "b", "c", "d"))
    with pytest.raises(RewardError, match=r"leaf a: reward nan, expected a finite number"):
        estimate("grpo", table)


def test_one_valid_reward_left_is_a_group_of_one() -> None:
    """When the others ended void, the singleton rule applies to what is left."""
    case = load("d-advantage", "08-one-valid-reward-left")
    for theirs, values in case["expected"]["if_dropped"].items():
        table = flat_table([1.0], ["p"])
        raw = estimate(OUR_NAMES[theirs], table, singleton="raw")
        np.testing.assert_allclose(raw.leaf, [float(value) for value in values], rtol=0, atol=1e-9)
        assert estimate(OUR_NAMES[theirs], table).leaf.tolist() == [0.0]


def scripted(turns: list[dict[str, Any]]) -> Script:
    """Return the trajectory of recorded turns: what a prompt adds to its predecessor was observed.

    A prompt that does not extend its predecessor opens a new segment.
    """
    script = Script(prompt=turns[0]["prompt_ids"])
    for index, turn in enumerate(turns):
        parent = None if index == 0 else f"0.0.{index - 1}"
        if index:
            before = turns[index - 1]["prompt_ids"] + turns[index - 1]["completion_ids"]
            prompt = turn["prompt_ids"]
            assert parent is not None
            if prompt[: len(before)] == before:
                script.see(parent, prompt[len(before) :])
            else:
                script.see(parent, [], reset=prompt)
        script.turn(f"0.0.{index}", parent, turn["completion_ids"], turn["logprobs"])
    return script.end(f"0.0.{len(turns) - 1}", 1.0)


def test_two_turns_with_an_observation_between() -> None:
    """The exact arrays after the shift: prompt and observation places carry zero."""
    case = load("c-tokens", "15-two-turn-row-with-observation")
    script = scripted(case["input"]["turns"])
    (segment,) = segments(trajectory(script.group(), 1, "0.0.1"))
    datum = build_datum(segment, np.where(segment.sampled, case["input"]["advantage"], 0.0))
    expected = case["expected"]
    assert datum.inputs.tolist() == expected["model_input"]
    assert datum.targets.tolist() == expected["target_tokens"]
    assert datum.logprobs.tolist() == np.float32(expected["logprobs"]).tolist()
    assert datum.advantages.tolist() == expected["advantages"]


def test_a_completion_of_one_token_is_trained() -> None:
    """A lone end token is trained: the whole sequence is shifted, not the completion."""
    case = load("c-tokens", "13-single-token-completion")
    given = case["input"]
    script = scripted([given])
    (segment,) = segments(trajectory(script.group(), 1, "0.0.0"))
    datum = build_datum(segment, np.full(4, given["advantage"]))
    assert {name: values.tolist() for name, values in datum._asdict().items()} == {
        "inputs": case["expected"]["model_input"],
        "targets": case["expected"]["target_tokens"],
        "logprobs": case["expected"]["logprobs"],
        "advantages": case["expected"]["advantages"],
    }


def test_a_prompt_that_is_no_extension_opens_a_second_segment() -> None:
    """Never one row of 8 inputs: two rows, each with the logprobs of its own tokens."""
    case = load("c-tokens", "16-second-prompt-not-an-extension")
    first, second = segments(trajectory(scripted(case["input"]["turns"]).group(), 1, "0.0.1"))
    assert first.tokens.tolist() == [1, 2, 3, 4, 5]
    assert first.sampled.tolist() == [False] * 3 + [True] * 2
    assert second.tokens.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert second.sampled.tolist() == [False] * 7 + [True]
    assert second.logprobs.tolist() == np.float32([0.0] * 7 + [-0.3]).tolist()
