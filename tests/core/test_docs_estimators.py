"""The example in docs/estimators.md is run as it stands there."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from core.advantage import ESTIMATORS, Estimator, estimate, leaf_table
from core.tree import members
from tests.building import bush, chains

TEXT = (Path(__file__).parents[2] / "docs" / "estimators.md").read_text()


def documented() -> Estimator:
    """Return the function that the page defines."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    function: Estimator = names["other_trees"]
    return function


def test_the_example_is_a_working_estimator() -> None:
    """Against the other tree's mean: 1, 0, 0.5, −0.5 beside a tree of one leaf with 0.75."""
    script = bush((1.0, 0.0, 0.5, -0.5))
    script.turn("0.0.0", None, [4], tree=2).end("0.0.0", 0.75, tree=2)
    group, chosen = script.scored()
    found = estimate("mine:other_trees", leaf_table(members(group, chosen)), user=documented())
    assert found.leaf.tolist() == [0.25, -0.75, -0.25, -1.25, 0.5]


def test_the_example_keeps_the_two_rules() -> None:
    """Equal rewards, and a tree without another beside it, give exactly 0."""
    equal, lone = chains([-0.1] * 8).scored(), bush((1.0, 0.0, 0.5, -0.5)).scored()
    for group, chosen in (equal, lone):
        found = estimate("mine:other_trees", leaf_table(members(group, chosen)), user=documented())
        assert not found.leaf.any()


def test_the_page_names_every_estimator() -> None:
    """What can be chosen is documented."""
    assert all(f"| `{name}`" in TEXT for name in ESTIMATORS)


def test_the_pages_tree_is_right() -> None:
    """The numbers of the drawing are what `node` gives."""
    group, chosen = bush((1.0, 0.0, 0.5, -0.5)).scored()
    table = leaf_table(members(group, chosen))
    assert np.mean(table.rewards) == 0.25
    assert estimate("node", table).entries.tolist() == [0.25, 0.5, 0.25, -0.5, 0.25, 0.0, -0.75]
