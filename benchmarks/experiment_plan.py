"""Owns what the experiment compares: its arms, their budgets, and the settings common to all runs."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

COMMON = (
    "learner.groups_per_step=8",
    "learner.max_staleness=0",
    # Throw-away runs: checkpoints are for recovery, which is not measured here.
    "learner.save_every=1000000",
)
"""Over the preset `demo`: importance_sampling, learning rate 2e-3, LoRA rank 16, 5 turns, 4 searches."""

PER_CHAIN = 1_500
"""Generated tokens of a run in the sweep, per chain of the group's budget: twelve steps or so."""
MARKS = (4 * PER_CHAIN, 8 * PER_CHAIN)
"""Generated tokens after which a run is evaluated in the comparison of estimators; the last ends it."""


class Arm(NamedTuple):
    """One way to roll out and to credit."""

    name: str
    estimator: str
    chains: int
    """Chains of a group; for trees, the chains' budget that they are set against."""
    tree: tuple[int, int, int] | None = None
    """M, N, L."""

    def settings(self) -> tuple[str, ...]:
        """Return the settings that make it; every leaf of a tree is a member (K = N·L + 1)."""
        estimator = f"learner.estimator={self.estimator}"
        if self.tree is None:
            return (estimator, "rollout.mode=chain", f"rollout.group_size={self.chains}")
        m, n, l = self.tree  # noqa: E741 the paper's letter
        shape = {"m": m, "n": n, "l": l, "k": n * l + 1}
        return (
            estimator,
            "rollout.mode=tree",
            *(f"rollout.tree.{key}={value}" for key, value in shape.items()),
        )


class Cell(NamedTuple):
    """One run."""

    arm: Arm
    seed: int
    marks: tuple[int, ...]
    """Generated tokens after which the weights are evaluated; the last ends the run. None: no training."""

    @property
    def name(self) -> str:
        """What identifies it in the results file."""
        return f"{self.arm.name}/seed {self.seed}/{self.marks[-1] if self.marks else 0}"


BASE = Arm("base model", "group_mean", 4)

ESTIMATORS = (
    Arm("chain GRPO", "grpo", 4),
    Arm("tree", "tree", 4, (2, 2, 1)),
    Arm("tree, intra only", "tree_intra", 4, (2, 2, 1)),
    Arm("tree, inter only", "grpo", 4, (2, 2, 1)),
    Arm("tree, node", "node", 4, (2, 2, 1)),
    Arm("chain group mean", "group_mean", 4),
)

SWEEP = tuple(
    (Arm(f"chains, {chains}", "grpo", chains), Arm(f"tree {shape}", "tree", chains, shape))
    for chains, shape in ((2, (1, 2, 1)), (8, (4, 2, 1)), (16, (4, 5, 1)))
)
"""The pairs of the paper's sweep. That of 4 chains is in ESTIMATORS, at its first mark."""


def cells(seeds: Sequence[int]) -> Iterator[Cell]:
    """Yield every cell: the estimators seed by seed, then the sweep pair by pair, the dearest last."""
    yield from (Cell(BASE, seed, ()) for seed in seeds)
    yield from (Cell(arm, seed, MARKS) for seed in seeds for arm in ESTIMATORS)
    yield from (
        Cell(arm, seed, (PER_CHAIN * arm.chains,)) for pair in SWEEP for seed in seeds for arm in pair
    )
