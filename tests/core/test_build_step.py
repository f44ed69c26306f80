"""From whole groups to datums: an oracle of plain lists, laws, and seeded bugs that it must catch."""

import math
import struct
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.advantage import estimate
from core.arrays import Float64
from core.batch import (
    BatchSettings,
    StepBatch,
    build_step,
    plan_fields,
    settings_from_learner,
    settings_from_plan,
)
from core.config import LearnerSettings, PackingSettings
from core.datum import DatumArrays, build_datum
from core.digests import datum_digest
from core.errors import EstimatorError, FoldError
from core.events import (
    AdamParams,
    ChosenLeaf,
    GroupAsked,
    GroupEvent,
    Observed,
    ReferenceScored,
    Rewarded,
    StepPlanned,
    TurnSampled,
)
from core.segments import Segment, segments
from core.tree import Group, fold_group, trajectory
from tests.building import Script, bush, chains, scored_leaves
from tests.strategies import GroupShape, group_records

Records = list[tuple[int, GroupEvent]]
Chosen = tuple[ChosenLeaf, ...]

FEW = PackingSettings(max_datums=2, max_datum_tokens=100, max_padded_tokens=60)
"""Small limits, so that even small steps have several micro-batches."""


class Token(NamedTuple):
    """One token of a trajectory, as the oracle sees it."""

    id: int
    node: str | None
    """None: given."""
    place: int
    """Position in its turn."""
    logprob: float
    gap: float
    """Sampled minus reference logprob."""


def floats(raw: bytes) -> list[float]:
    """Return stored float32 numbers."""
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def ints(raw: bytes) -> list[int]:
    """Return stored int32 numbers."""
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


class Told(NamedTuple):
    """What the records of one tree say, by kind and node."""

    prompt: list[int]
    samples: dict[str, TurnSampled]
    seen: dict[str, Observed]
    reference: dict[str, ReferenceScored]
    rewards: dict[str, float]


def tell(records: Records, tree: int) -> Told:
    """Sort one tree's records by kind."""
    told = Told([], {}, {}, {}, {})
    for stream, event in records:
        match event:
            case GroupAsked():
                told.prompt.extend(ints(event.prompt))
            case TurnSampled() if stream == tree:
                told.samples[event.node] = event
            case Observed() if stream == tree:
                told.seen[event.node] = event
            case ReferenceScored() if stream == tree:
                told.reference[event.node] = event
            case Rewarded() if stream == tree and event.scope == "leaf":
                told.rewards[event.node] = event.value
            case _:
                pass
    return told


def token_rows(told: Told, leaf: str) -> list[list[Token]]:
    """Return the token rows of one trajectory: one per stretch without a rewritten prompt."""
    nodes = [leaf]
    while (parent := told.samples[nodes[0]].parent) is not None:
        nodes.insert(0, parent)
    rows = [[Token(token, None, 0, 0.0, 0.0) for token in told.prompt]]
    for before, node in zip([None, *nodes], nodes, strict=False):
        if before is not None:
            seen = told.seen[before]
            if seen.prompt_reset is None:
                rows[-1] += [Token(token, None, 0, 0.0, 0.0) for token in ints(seen.tokens)]
            else:
                rows.append([Token(token, None, 0, 0.0, 0.0) for token in ints(seen.prompt_reset)])
        sample = told.samples[node]
        logprobs = floats(sample.sampled_logprobs)
        reference = floats(told.reference[node].logprobs) if node in told.reference else logprobs
        for place, token in enumerate(ints(sample.tokens)):
            rows[-1].append(Token(token, node, place, logprobs[place], logprobs[place] - reference[place]))
    return rows


class Step(NamedTuple):
    """The records of a step, and who its members are."""

    groups: list[tuple[Records, Chosen]]

    def folded(self) -> list[tuple[Group, Chosen]]:
        """Return what build_step takes."""
        return [(fold_group(records), chosen) for records, chosen in self.groups]


Key = tuple[str, int, str, int]


def expected_datums(step: Step, settings: BatchSettings) -> dict[Key, list[tuple[float, ...]]]:
    """Return per datum its rows (input, target, logprob, unscaled advantage), estimator group_mean.

    Written from the definition alone: one token at a time, without core.
    """
    result: dict[Key, list[tuple[float, ...]]] = {}
    for records, chosen in step.groups:
        uid = records[0][1].uid  # type: ignore[union-attr]
        members = [(leaf.tree, leaf.leaf, tell(records, leaf.tree)) for leaf in chosen]
        rewards = [told.rewards[leaf] for _, leaf, told in members]
        equal = len(set(rewards)) <= 1
        mean = math.fsum(rewards) / max(len(rewards), 1)
        sharers: dict[tuple[int, str], list[int]] = defaultdict(list)
        rows_of = [token_rows(told, leaf) for _, leaf, told in members]
        for index, rows in enumerate(rows_of):
            for node in {token.node for row in rows for token in row if token.node}:
                sharers[members[index][0], node].append(index)
        for index, rows in enumerate(rows_of):
            tree, leaf, _ = members[index]
            for number, row in enumerate(rows):
                datum = []
                for left, target in pairwise(row):
                    logprob = advantage = 0.0
                    if target.node is not None:
                        among = sharers[tree, target.node]
                        owns = settings.prefix_weight == "each" or among[0] == index
                        terms = [0.0 if equal else rewards[i] - mean for i in among]
                        if owns:
                            logprob = target.logprob
                            weight = {"each": 1, "once": 1, "once_sum": len(among)}[settings.prefix_weight]
                            value = {
                                "each": 0.0 if equal else rewards[index] - mean,
                                "once": math.fsum(terms) / len(terms),
                                "once_sum": math.fsum(terms),
                            }[settings.prefix_weight]
                            advantage = value - weight * settings.kl_beta * target.gap
                    datum.append((left.id, target.id, logprob, advantage))
                if any(entry[3] for entry in datum):
                    result[uid, tree, leaf, number] = datum
    return result


def check(batch: StepBatch, step: Step, settings: BatchSettings) -> None:
    """Compare a whole batch with the oracle: datums, their scale, and that each is sent once."""
    expected = expected_datums(step, settings)
    assert [tuple(key) for key in batch.keys] == list(expected)
    sent = [index for micro_batch in batch.micro_batches for index in micro_batch]
    assert sorted(sent) == list(range(len(expected)))
    assert len(batch.datums) == len(expected)
    members = sum(len(chosen) for _, chosen in step.groups)
    for micro_batch in batch.micro_batches:
        scale = len(micro_batch) / members if settings.reduction == "sample_mean" else 1 / members
        for index in micro_batch:
            rows = expected[tuple(batch.keys[index])]  # type: ignore[index]
            inputs, targets, logprobs, advantages = zip(*rows, strict=True)
            datum = batch.datums[index]
            assert datum.inputs.tolist() == list(inputs)
            assert datum.targets.tolist() == list(targets)
            assert datum.logprobs.tolist() == list(logprobs)
            np.testing.assert_allclose(datum.advantages, np.array(advantages) * scale, rtol=1e-6, atol=1e-12)
            untrained = np.array(advantages) == 0
            assert not datum.advantages[untrained].any()


@st.composite
def recorded_steps(draw: st.DrawFn) -> Step:
    """Draw a step of one to three groups with references, voids and prompt resets."""
    shape = GroupShape(references=True)
    groups = []
    for ticket in range(1, draw(st.integers(1, 3)) + 1):
        records = draw(group_records(ticket, shape))
        groups.append((records, scored_leaves(fold_group(records))))
    return Step(groups)


PREFIX_WEIGHTS = st.sampled_from(["each", "once_sum", "once"])
SETTINGS = st.builds(
    BatchSettings,
    prefix_weight=PREFIX_WEIGHTS,
    kl_beta=st.sampled_from([0.0, 0.25]),
    reduction=st.sampled_from(["sample_mean", "sum"]),
    packing=st.just(FEW),
)


@pytest.mark.parametrize("kl_beta", [0.0, 0.25])
@pytest.mark.parametrize("prefix_weight", ["each", "once_sum", "once"])
@given(step=recorded_steps(), settings=SETTINGS)
def test_batches_equal_the_oracle(
    step: Step, settings: BatchSettings, prefix_weight: Literal["each", "once_sum", "once"], kl_beta: float
) -> None:
    """Tokens, shift, mask, logprobs, advantages, KL term, prefix weight, scale and micro-batches."""
    settings = msgspec.structs.replace(settings, prefix_weight=prefix_weight, kl_beta=kl_beta)
    check(build_step(step.folded(), settings), step, settings)


def multi_turn() -> Step:
    """Return two groups of two- and three-turn trajectories, one with a rewritten prompt."""
    first = Script(1, prompt=[1, 2]).turn("0.0.0", None, [10, 11], [-0.1, -0.2]).see("0.0.0", [20, 21])
    first.turn("0.0.1", "0.0.0", [12], [-0.3]).see("0.0.1", [22]).turn(
        "0.0.2", "0.0.1", [13, 14], [-0.4, -0.5]
    )
    first.end("0.0.2", 1.0).turn("0.0.0", None, [15], [-0.6], tree=2).see("0.0.0", [23], tree=2)
    first.turn("0.0.1", "0.0.0", [16, 17, 18], [-0.7, -0.8, -0.9], tree=2).end("0.0.1", 0.0, tree=2)
    second = Script(2, prompt=[3]).turn("0.0.0", None, [30], [-1.5]).see("0.0.0", [40], reset=[3, 3, 3])
    second.turn("0.0.1", "0.0.0", [31, 32], [-1.6, -1.7]).end("0.0.1", -0.1)
    second.turn("0.0.0", None, [33], [-1.8], tree=2).end("0.0.0", 0.2, tree=2)
    return Step([(s.records, scored_leaves(s.group())) for s in (first, second)])


def test_a_whole_step_by_hand() -> None:
    """Every number of a step of two groups, written out."""
    batch = build_step(multi_turn().folded(), BatchSettings(packing=FEW))
    assert [str(key) for key in batch.keys] == [
        "000001.0/t1/0.0.2#0",
        "000001.0/t2/0.0.1#0",
        "000002.0/t1/0.0.1#0",
        "000002.0/t1/0.0.1#1",
        "000002.0/t2/0.0.0#0",
    ]
    assert batch.micro_batches == ((0, 1), (2, 3), (4,))
    assert batch.table.rewards.tolist() == [1.0, 0.0, -0.1, 0.2]
    assert batch.advantages.leaf.tolist() == pytest.approx([0.5, -0.5, -0.15, 0.15])
    first = batch.datums[0]
    assert [values.dtype.str for values in first] == ["<i8", "<i8", "<f4", "<f4"]
    assert first.inputs.tolist() == [1, 2, 10, 11, 20, 21, 12, 22, 13]
    assert first.targets.tolist() == [2, 10, 11, 20, 21, 12, 22, 13, 14]
    assert first.logprobs.tolist() == np.float32([0, -0.1, -0.2, 0, 0, -0.3, 0, -0.4, -0.5]).tolist()
    # Two of four members in the micro-batch: 0.5 · 2/4.
    assert first.advantages.tolist() == [0, 0.25, 0.25, 0, 0, 0.25, 0, 0.25, 0.25]
    rewritten = batch.datums[3]
    assert rewritten.inputs.tolist() == [3, 3, 3, 31]
    assert rewritten.targets.tolist() == [3, 3, 31, 32]
    assert rewritten.advantages.tolist() == np.float32([0, 0, -0.075, -0.075]).tolist()
    assert batch.datums[4].advantages.tolist() == np.float32([0.15 * 0.25]).tolist()
    assert batch.stats._asdict() == {
        "members": 4,
        "segments": 5,
        "datums": 5,
        "prompt_tokens": 2 + 2 + 1 + 3 + 1,
        "observation_tokens": 3 + 1,
        "sampled_tokens": 5 + 4 + 1 + 2 + 1,
        "shared_sampled_tokens": 0,
        "trained_tokens": 13,
        "datum_tokens": 9 + 6 + 1 + 4 + 1,
        "reset_segments": 1,
    }
    assert batch.digests() == tuple(datum_digest(datum) for datum in batch.datums)


def altered(batch: StepBatch, change: Callable[[DatumArrays], DatumArrays]) -> StepBatch:
    """Return the batch with every datum changed."""
    return batch._replace(datums=tuple(change(datum) for datum in batch.datums))


def inverted(datum: DatumArrays) -> DatumArrays:
    """Train the observations instead of the turns."""
    value = datum.advantages[np.flatnonzero(datum.advantages)[0]]
    return datum._replace(advantages=np.where(datum.advantages == 0, value, np.float32(0)))


SEEDED_BUGS: dict[str, Callable[[StepBatch], StepBatch]] = {
    "logprobs shifted by one": lambda b: altered(b, lambda d: d._replace(logprobs=np.roll(d.logprobs, 1))),
    "logprobs not shifted": lambda b: altered(b, lambda d: d._replace(logprobs=np.roll(d.logprobs, -1))),
    "advantages shifted by one": lambda b: altered(
        b, lambda d: d._replace(advantages=np.roll(d.advantages, 1))
    ),
    "inverted mask": lambda b: altered(b, inverted),
    "no mask": lambda b: altered(
        b, lambda d: d._replace(advantages=np.full_like(d.advantages, d.advantages[d.advantages != 0][0]))
    ),
    "targets are the inputs": lambda b: altered(b, lambda d: d._replace(targets=d.inputs)),
    "dropped micro-batch": lambda b: b._replace(micro_batches=b.micro_batches[1:]),
    "doubled micro-batch": lambda b: b._replace(micro_batches=(*b.micro_batches, b.micro_batches[0])),
    "dropped datum": lambda b: b._replace(datums=b.datums[:-1], keys=b.keys[:-1]),
    "no scale": lambda b: _rescaled(b, lambda size, members: members / size),
    "scaled by 1/n_k": lambda b: _rescaled(b, lambda size, members: members / size / size),
    "scaled by n_k/datums": lambda b: _rescaled(b, lambda _, members: members / len(b.datums)),
    "scaled by 1/N": lambda b: _rescaled(b, lambda size, _: 1 / size),
    "completion order": lambda b: b._replace(keys=b.keys[::-1], datums=b.datums[::-1]),
}


def _rescaled(batch: StepBatch, factor: Callable[[int, int], float]) -> StepBatch:
    size = {index: len(part) for part in batch.micro_batches for index in part}
    datums = [
        datum._replace(advantages=datum.advantages * np.float32(factor(size[index], batch.stats.members)))
        for index, datum in enumerate(batch.datums)
    ]
    return batch._replace(datums=tuple(datums))


@pytest.mark.parametrize("name", SEEDED_BUGS)
def test_the_oracle_catches_seeded_bugs(name: str) -> None:
    """Each bug that was seen in public code is noticed by the comparison above."""
    step, settings = multi_turn(), BatchSettings(packing=FEW)
    batch = build_step(step.folded(), settings)
    check(batch, step, settings)
    with pytest.raises(AssertionError):
        check(SEEDED_BUGS[name](batch), step, settings)


def coefficients(step: Step, settings: BatchSettings) -> dict[tuple[Any, ...], float]:
    """Return per sampled token what it adds to the gradient at ratio 1, summed over the datums it is in.

    The trainer averages over the datums of a call (sample_mean) or sums them (sum).
    """
    batch = build_step(step.folded(), settings)
    result: dict[tuple[Any, ...], float] = defaultdict(float)
    for micro_batch in batch.micro_batches:
        divisor = len(micro_batch) if settings.reduction == "sample_mean" else 1
        for index in micro_batch:
            key, segment, datum = batch.keys[index], batch.segments[index], batch.datums[index]
            path = trajectory(step.folded()[int(key.uid[:6]) - 1][0], key.tree, key.leaf).path
            for place in np.flatnonzero(segment.sampled):
                number = int(segment.node_index[place])
                offset = int(place - np.argmax(segment.node_index == number))
                token = (key.uid, key.tree, path[number].node, offset)
                result[token] += float(datum.advantages[place - 1]) / divisor
    return result


@given(
    step=recorded_steps(),
    estimator=st.sampled_from(["group_mean", "tree", "node"]),
    beta=st.sampled_from([0.0, 0.5]),
    reduction=st.sampled_from(["sample_mean", "sum"]),
)
def test_once_sum_has_the_gradient_of_each(step: Step, estimator: str, beta: float, reduction: Any) -> None:
    """Per sampled token the coefficients of `once_sum` and `each` agree within float32, for any packing."""
    found = [
        coefficients(
            step,
            BatchSettings(
                estimator=estimator,
                prefix_weight=weight,
                kl_beta=beta,
                reduction=reduction,
                packing=packing,
            ),
        )
        for weight, packing in (("each", PackingSettings()), ("once_sum", FEW))
    ]
    for token in found[0].keys() | found[1].keys():
        assert found[1][token] == pytest.approx(found[0][token], rel=1e-5, abs=1e-6)


def test_prefix_weights_by_hand() -> None:
    """Three leaves below one turn: +0.75, −0.25 and +0.25 of it, or once their sum, or once their mean."""
    group, chosen = bush((1.0, 0.0, 0.5, -0.5)).scored()
    shared = {"each": [0.75, -0.25, 0.25], "once_sum": [0.75, 0.0, 0.0], "once": [0.25, 0.0, 0.0]}
    trained = {"each": 11, "once_sum": 7, "once": 7}
    for weight, values in shared.items():
        batch = build_step([(group, chosen)], BatchSettings(prefix_weight=weight, reduction="sum"))
        # Places 2 and 3 of the targets are the shared turn 0.0.0; the leaf's own turn comes after place 4.
        assert [datum.advantages[2] * 4 for datum in batch.datums[:3]] == pytest.approx(values)
        assert [datum.advantages[5] * 4 for datum in batch.datums[:3]] == pytest.approx([0.75, -0.25, 0.25])
        assert [bool(datum.logprobs[2]) for datum in batch.datums[:3]] == [value != 0 for value in values]
        assert batch.stats.trained_tokens == trained[weight]
        assert batch.stats.shared_sampled_tokens == 4


def test_kl_term_by_hand() -> None:
    """A − β(sampled − reference): 0.5 − 0.1 · (−0.5 + 0.75) and −0.5 − 0.1 · (−1 + 0.5); unscaled."""
    script = Script().turn("0.0.0", None, [4], [-0.5]).refer("0.0.0", [-0.75]).end("0.0.0", 1.0)
    script.turn("0.0.0", None, [5], [-1.0], tree=2).refer("0.0.0", [-0.5], tree=2).end("0.0.0", 0.0, tree=2)
    batch = build_step([script.scored()], BatchSettings(kl_beta=0.1))
    assert [float(datum.advantages[-1]) for datum in batch.datums] == pytest.approx([0.475, -0.45])


@pytest.mark.parametrize(
    ("prefix_weight", "shared"),
    [("each", [0.7, -0.3, 0.2]), ("once", [0.2, 0, 0]), ("once_sum", [0.6, 0, 0])],
)
def test_kl_term_of_a_shared_turn_by_hand(
    prefix_weight: Literal["each", "once_sum", "once"], shared: list[float]
) -> None:
    """0.75, −0.25 and 0.25 below one turn whose term is 0.1 · 0.5: each its own; their means; their sums."""
    script = bush((1.0, 0.0, 0.5, -0.5))
    for node, count in (("0.0.0", 2), ("0.0.1", 1), ("1.0.1", 2), ("1.1.1", 1), ("2.0.0", 1)):
        script.refer(node, [-0.6] * count)
    batch = build_step([script.scored()], BatchSettings(prefix_weight=prefix_weight, kl_beta=0.1))
    for place in (2, 3):
        assert [float(datum.advantages[place]) for datum in batch.datums[:3]] == pytest.approx(shared)
    assert float(batch.datums[3].advantages[2]) == pytest.approx(-0.8)


def test_kl_term_keeps_a_datum_without_reward_signal() -> None:
    """With β > 0 a group of equal rewards still trains towards the base model, and counts in N."""
    script = Script()
    for tree in (1, 2):
        script.turn("0.0.0", None, [4], [-0.5], tree=tree).refer("0.0.0", [-0.75], tree=tree)
        script.end("0.0.0", 1.0, tree=tree)
    assert build_step([script.scored()], BatchSettings()).datums == ()
    batch = build_step([script.scored()], BatchSettings(kl_beta=1.0))
    assert [float(datum.advantages[-1]) for datum in batch.datums] == [-0.25, -0.25]


def test_kl_term_needs_usable_references() -> None:
    """Missing or infinite reference logprobs are an error that names the turn."""
    script = chains([1.0, 0.0])
    with pytest.raises(EstimatorError, match=r"000001.0/t1 node '0.0.0' has no reference logprobs"):
        build_step([script.scored()], BatchSettings(kl_beta=0.1))
    script.refer("0.0.0", [-0.1, -math.inf])
    with pytest.raises(EstimatorError, match="a reference logprob is not finite"):
        build_step([script.scored()], BatchSettings(kl_beta=0.1))


def test_groups_without_signal_send_nothing_but_count() -> None:
    """Equal rewards give no datum; their members stay in N and so halve the others' weight."""
    live, dead = chains([1.0, 0.0]).scored(), chains([-0.1] * 2, ticket=2).scored()
    alone, both = build_step([live], BatchSettings()), build_step([live, dead], BatchSettings())
    assert [key.uid for key in both.keys] == ["000001.0"] * 2
    assert (both.stats.members, both.stats.segments, both.stats.datums) == (4, 4, 2)
    for single, halved in zip(alone.datums, both.datums, strict=True):
        assert (halved.advantages * 2).tolist() == single.advantages.tolist()
    nothing = build_step([dead], BatchSettings())
    assert (nothing.datums, nothing.micro_batches, nothing.stats.members) == ((), (), 2)
    assert build_step([], BatchSettings()).stats.members == 0


def test_shaping_and_user_estimators_reach_the_datums() -> None:
    """The estimator sees shaped rewards; the table keeps the recorded ones."""
    seen: list[list[float]] = []

    def watching(table: Any, _: Any) -> Float64:
        seen.append(table.rewards.tolist())
        return np.ones(len(table.rewards))

    settings = BatchSettings(
        estimator="mine:watching", user=watching, shaping="tree_diff", shaping_margin=0.0
    )
    batch = build_step([bush((1.0, 0.0, 0.5, -0.5)).scored()], settings)
    assert batch.table.rewards.tolist() == [1.0, 0.0, 0.5, -0.5]
    assert seen == [batch.shaped.tolist()]
    assert batch.shaped.tolist() != batch.table.rewards.tolist()
    assert all(datum.advantages.max() == 1.0 for datum in batch.datums)


def test_shaping_makes_no_signal_of_equal_rewards() -> None:
    """A tree of four right answers sends nothing, though tree_diff tells its leaves apart."""
    batch = build_step([bush((1.0, 1.0, 1.0, 1.0)).scored()], BatchSettings(shaping="tree_diff"))
    assert len(set(batch.shaped.tolist())) > 1
    assert batch.datums == ()
    assert not estimate("tree_intra", batch.shaped_table()).leaf.any()


@given(st.data())
def test_arrival_order_changes_no_digest(data: st.DataObject) -> None:
    """The order in which trees were recorded, or leaves chosen, changes no datum."""
    records = data.draw(group_records())
    chosen = data.draw(st.permutations(scored_leaves(fold_group(records))))
    streams: dict[int, Records] = {}
    for record in records:
        streams.setdefault(record[0], []).append(record)
    mixed = [streams[tree].pop(0) for tree in data.draw(st.permutations([tree for tree, _ in records]))]
    straight = build_step([(fold_group(records), scored_leaves(fold_group(records)))], BatchSettings())
    other = build_step([(fold_group(mixed), chosen)], BatchSettings())
    assert other.digests() == straight.digests()
    assert other.micro_batches == straight.micro_batches


def test_rounding_happens_once() -> None:
    """0.1 · 1/3 in float64, then rounded: not the product of two float32 numbers."""
    group, chosen = chains([0.2, 0.0, 0.1], tokens=[4]).scored()
    batch = build_step([(group, chosen)], BatchSettings(packing=PackingSettings(max_datums=1)))
    advantage = float(batch.advantages.leaf[0])
    assert float(batch.datums[0].advantages[-1]) == float(np.float32(advantage * (1 / 3)))


def test_datums_need_arrays_of_one_length() -> None:
    """Unequal lengths, or too few tokens to shift, are refused with the lengths."""
    (segment,) = segments(trajectory(chains([1.0]).group(), 1, "0.0.0"))
    with pytest.raises(FoldError, match=r"lengths \[5, 5, 4\]: expected equal"):
        build_datum(segment, np.zeros(4))
    with pytest.raises(FoldError, match=r"lengths \[1, 1, 1\]"):
        build_datum(Segment(segment.tokens[:1], segment.logprobs[:1], ()), np.zeros(1))


def plan_of(settings: BatchSettings, **changes: Any) -> StepPlanned:
    """Return a plan that recorded `settings`."""
    fields: dict[str, Any] = {
        "step": 3,
        "groups": (),
        "loss": "ppo",
        "loss_config": {},
        "adam": AdamParams(learning_rate=1e-4),
        "members": 0,
        "micro_batches": (),
        "datum_digests": (),
        "batch_digest": "",
        "policy_version": 0,
        "fingerprints": {},
        **plan_fields(settings),
    }
    return StepPlanned(**(fields | changes))


@given(
    st.builds(
        LearnerSettings,
        estimator=st.sampled_from(["tree", "mine:own"]),
        singleton=st.sampled_from(["zero", "raw"]),
        group_by=st.sampled_from(["uid", "tree_uid"]),
        shaping=st.sampled_from(["base", "tree_diff"]),
        shaping_margin=st.floats(0, 1),
        prefix_weight=PREFIX_WEIGHTS,
        kl_beta=st.floats(0, 1),
        reduction=st.sampled_from(["sample_mean", "sum"]),
        packing=st.builds(PackingSettings, max_datums=st.integers(1, 99)),
    )
)
def test_a_plan_gives_the_settings_back(learner: LearnerSettings) -> None:
    """What replay reads from the plan is what the learner used."""
    settings = settings_from_learner(learner)
    assert settings_from_plan(plan_of(settings)) == settings
    for field in ("estimator", "singleton", "group_by", "shaping", "prefix_weight", "packing"):
        assert getattr(settings, field) == getattr(learner, field)


@pytest.mark.parametrize(
    "changes",
    [
        {"shaping": "potential"},
        {"estimator_params": {"singleton": "zero", "group_by": "uid", "window": 3.0}},
        {"packing": {"max_things": 3}},
    ],
)
def test_a_plan_with_other_settings_is_refused(changes: dict[str, Any]) -> None:
    """A plan by a newer release cannot be replayed as if its new settings meant nothing."""
    with pytest.raises(EstimatorError, match="step 3: its plan's batch settings are not ours"):
        settings_from_plan(plan_of(BatchSettings(), **changes))
