"""Segments of a path, the next prompt, and what stands where."""

import math

import numpy as np
import pytest
from hypothesis import given

from core.arrays import view_tokens
from core.errors import FoldError
from core.events import GroupEvent
from core.ids import NodeId
from core.segments import Segment, next_prompt, segments
from core.tree import fold_group, trajectories, trajectory
from tests.building import Script, bush
from tests.strategies import group_records


def test_one_segment_is_the_concatenation_of_its_path() -> None:
    """Prompt, turn, observation, turn; the leaf's own observation is left out."""
    script = Script(prompt=[1, 2]).turn("0.0.0", None, [4, 5], [-0.5, -1.5]).see("0.0.0", [6, 7])
    script.turn("0.0.1", "0.0.0", [8], [-2.0]).see("0.0.1", [9]).end("0.0.1", 1.0)
    (segment,) = segments(trajectory(script.group(), 1, "0.0.1"))
    assert segment.tokens.tolist() == [1, 2, 4, 5, 6, 7, 8]
    assert segment.sampled.tolist() == [False, False, True, True, False, False, True]
    assert segment.logprobs.tolist() == [0.0, 0.0, -0.5, -1.5, 0.0, 0.0, -2.0]
    assert segment.node_index.tolist() == [-1, -1, 0, 0, -1, -1, 1]
    assert [segment.tokens.dtype.str, segment.logprobs.dtype.str] == ["<i4", "<f4"]
    assert segment.turns == ((2, 4, 0), (6, 7, 1))


def test_a_prompt_reset_opens_a_segment() -> None:
    """The rewritten prompt opens it; the sampled token inside it is given, not sampled, there."""
    script = Script(prompt=[1]).turn("0.0.0", None, [4]).see("0.0.0", [5], reset=[1, 4, 9])
    script.turn("0.0.1", "0.0.0", [8]).see("0.0.1", [6]).turn("0.0.2", "0.0.1", [7]).end("0.0.2", 1.0)
    first, second = segments(trajectory(script.group(), 1, "0.0.2"))
    assert first.tokens.tolist() == [1, 4]
    assert first.node_index.tolist() == [-1, 0]
    assert second.tokens.tolist() == [1, 4, 9, 8, 6, 7]
    assert second.node_index.tolist() == [-1, -1, -1, 1, -1, 2]


def test_the_next_prompt_is_the_whole_context() -> None:
    """Before the first turn the prompt; then everything so far and the observation; after a reset only that."""
    script = Script(prompt=[1, 2]).turn("0.0.0", None, [4]).see("0.0.0", [5, 6])
    script.turn("0.0.1", "0.0.0", [7]).see("0.0.1", [8], reset=[3, 3]).turn("0.0.2", "0.0.1", [9])
    script.see("0.0.2", [10])
    group = script.group()
    assert next_prompt(group, 1, None).tolist() == [1, 2]
    assert next_prompt(group, 1, NodeId("0.0.0")).tolist() == [1, 2, 4, 5, 6]
    assert next_prompt(group, 1, NodeId("0.0.1")).tolist() == [3, 3]
    assert next_prompt(group, 1, NodeId("0.0.2")).tolist() == [3, 3, 9, 10]


def test_there_is_no_next_prompt_without_an_observation() -> None:
    """A turn that got no answer cannot be gone on from."""
    group = bush((1.0, 0.0, 0.5, -0.5)).group()
    with pytest.raises(FoldError, match=r"node '2.0.0' has no observation to go on from"):
        next_prompt(group, 1, NodeId("2.0.0"))
    with pytest.raises(FoldError, match=r"no node '5.0.0'"):
        next_prompt(group, 1, NodeId("5.0.0"))


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_logprob_that_is_not_finite_is_named(bad: float) -> None:
    """It is found before it could reach the trainer: which turn, which token."""
    script = Script().turn("0.0.0", None, [4]).see("0.0.0", [5]).turn("0.0.1", "0.0.0", [6, 7], [-0.1, bad])
    ended = trajectory(script.end("0.0.1", 1.0).group(), 1, "0.0.1")
    with pytest.raises(FoldError, match=r"000001.0/t1 node '0.0.1': logprob of token 1 is (nan|-inf)"):
        segments(ended)


def walk(records: list[tuple[int, GroupEvent]], segment: Segment, leaf: str, tree: int) -> list[int]:
    """Return the sampled tokens of a segment's turns, looked up in the records one by one."""
    group = fold_group(records)
    path = group.trees[tree].path(NodeId(leaf))
    found = []
    for index in sorted(set(segment.node_index.tolist()) - {-1}):
        found += view_tokens(path[index].sample.tokens).tolist()
    return found


@given(group_records())
def test_every_sampled_token_is_in_one_segment_once(records: list[tuple[int, GroupEvent]]) -> None:
    """Segments have equal lengths inside, hold all sampled tokens of the path, and zero where given."""
    for ended in trajectories(fold_group(records)):
        parts = segments(ended)
        for part in parts:
            assert len({len(part.tokens), len(part.logprobs), len(part.sampled), len(part.node_index)}) == 1
            assert not part.sampled[0]
            assert part.sampled.tolist() == (part.node_index >= 0).tolist()
            assert not part.logprobs[~part.sampled].any()
            assert part.tokens[part.sampled].tolist() == walk(records, part, ended.leaf, ended.tree)
        sampled = np.concatenate([part.tokens[part.sampled] for part in parts])
        assert sampled.tobytes() == b"".join(node.sample.tokens for node in ended.path)
        logprobs = np.concatenate([part.logprobs[part.sampled] for part in parts])
        assert logprobs.tobytes() == b"".join(node.sample.sampled_logprobs for node in ended.path)


@given(group_records())
def test_a_turns_prompt_is_what_stands_before_it(records: list[tuple[int, GroupEvent]]) -> None:
    """The prompt that a turn was sampled from is exactly its segment up to the turn."""
    group = fold_group(records)
    for ended in trajectories(group):
        for part in segments(ended):
            for index in sorted(set(part.node_index.tolist()) - {-1}):
                before = part.tokens[: int(np.argmax(part.node_index == index))]
                parent = ended.path[index].parent
                assert next_prompt(group, ended.tree, parent).tolist() == before.tolist()
