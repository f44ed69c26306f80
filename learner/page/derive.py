"""Owns what a step's re-derived batch says about each member and node, so that trees can be annotated."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.arrays import Float64
from core.batch import BatchSettings, StepBatch
from core.credit import Credit, assign_credit
from core.ids import NodeId
from core.tree import Trajectory
from learner.page.model import DatumBlock, MemberBlock

LeafKey = tuple[str, int, str]
"""uid, tree, leaf."""


class NodeCredit(NamedTuple):
    """How the members whose path holds a node train it, on average."""

    advantage: float
    members: int


class Derived(NamedTuple):
    """The advantages of one step, re-derived from its groups."""

    batch: StepBatch
    settings: BatchSettings
    credit: Credit
    positions: dict[LeafKey, int]
    """Each member's position in the batch."""
    datums: dict[LeafKey, list[DatumBlock]]
    """Each member's datums, those that were left out included."""
    nodes: dict[LeafKey, NodeCredit]
    """Keyed by node instead of leaf."""

    def advantage(self, key: LeafKey) -> float | None:
        """Return a leaf's advantage, None when it is no member."""
        position = self.positions.get(key)
        return None if position is None else float(self.batch.advantages.leaf[position])


def derive_credit(batch: StepBatch, settings: BatchSettings) -> Derived:
    """Return the step's credit per member and node; `batch` was built with `settings`."""
    credit = assign_credit(batch.table, batch.advantages.entries, settings.prefix_weight)
    positions = {key_of(member): position for position, member in enumerate(batch.members)}
    return Derived(
        batch, settings, credit, positions, _datums(batch, settings), _node_credit(batch.members, batch)
    )


def key_of(member: Trajectory) -> LeafKey:
    """Return the key under which a member is found."""
    return member.group.uid, member.tree, member.leaf


def member_block(derived: Derived, key: LeafKey, leaf: tuple[int, int]) -> MemberBlock:
    """Return how the member `key` is trained; `leaf` is where the page has it."""
    starts = derived.batch.table.path_starts
    position = derived.positions[key]
    part = slice(int(starts[position]), int(starts[position + 1]))
    advantages = derived.batch.advantages.entries[part]
    credit = derived.credit.advantages[part]
    trained = derived.credit.trained[part]
    return MemberBlock(
        leaf=leaf,
        advantages=advantages.tolist(),
        credit=None if np.array_equal(advantages, credit) else credit.tolist(),
        trained=None if trained.all() else trained.tolist(),
        kl_weights=derived.credit.kl_weights[part].tolist() if derived.settings.kl_beta else None,
        datums=derived.datums.get(key, []),
    )


def largest(values: Float64) -> float:
    """Return the largest absolute value, 0 of nothing."""
    return float(np.abs(values).max(initial=0.0))


def _datums(batch: StepBatch, settings: BatchSettings) -> dict[LeafKey, list[DatumBlock]]:
    micro_batch = {datum: number for number, micro in enumerate(batch.micro_batches) for datum in micro}
    members = len(batch.members)
    result: dict[LeafKey, list[DatumBlock]] = {}
    for number, key in enumerate(batch.keys):
        micro = micro_batch[number]
        count = len(batch.micro_batches[micro]) if settings.reduction == "sample_mean" else 1
        block = DatumBlock(segment=key.segment, datum=number, micro_batch=micro, scale=count / members)
        result.setdefault((key.uid, key.tree, key.leaf), []).append(block)
    return result


def _node_credit(members: Sequence[Trajectory], batch: StepBatch) -> dict[LeafKey, NodeCredit]:
    found: dict[LeafKey, list[float]] = {}
    for position, member in enumerate(members):
        values = batch.advantages.path(position).tolist()
        for node, value in zip(member.path, values, strict=True):
            found.setdefault((member.group.uid, member.tree, NodeId(node.node)), []).append(value)
    return {key: NodeCredit(sum(values) / len(values), len(values)) for key, values in found.items()}
