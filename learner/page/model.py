"""Owns the page's data: what its scripts read. Small facts of everything first, one block of turns per group.

Field names are those of the events where they mean the same. Nothing here is stored in a log.
"""

from typing import NamedTuple

import msgspec


class Limits(NamedTuple):
    """What keeps the file small enough to open; the page says where something was cut."""

    trajectories: int = 1000
    text: int = 65_536
    """Characters of one question, argument, answer or error."""
    turn_tokens: int = 16_384
    """Tokens of one prompt, turn or observation."""
    size: int = 96 * 1024 * 1024
    """Bytes of group blocks, about the size of the file."""


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of what becomes JSON."""


class HeldOut(Block, frozen=True):
    """Evaluations that may be held against each other."""

    differs: str = ""
    """In what they differ from the run's main ones; "" for those."""
    points: list[tuple[int, float]] = []
    """Committed steps, exact match."""


class RunFacts(Block, frozen=True):
    """What is said about the run as a whole."""

    run_id: str
    base_model: str
    facts: list[tuple[str, str]] = []
    """Name and value, as they are shown."""
    books: list[tuple[str, int]] = []
    """Groups per fate, with the reason where there is one."""
    evals: list[HeldOut] = []
    steps_planned: int = 0
    cut: str = ""
    """What the page does not hold; "" when it holds all."""


class StepFacts(Block, frozen=True):
    """One step of the run; most are only points of a curve."""

    step: int
    reward: float | None = None
    exact_match: float | None = None
    format: float | None = None
    skipped: bool = False
    committed: bool = False
    shown: bool = False
    """Its groups are on the page; the fields below are empty otherwise."""
    policy_in: int = 0
    policy_out: int = 0
    members: int = 0
    datums: int = 0
    micro_batches: int = 0
    tokens: list[tuple[str, int]] = []
    """Tokens by kind."""
    recipe: list[tuple[str, str]] = []
    """Estimator, loss, learning rate, …: what the update was made with."""
    estimator: str = ""
    scale: float = 0.0
    """The largest |advantage| of the step: full colour."""
    digest: str = ""
    verdict: str = ""
    """"match" or "mismatch": the re-derived batch digest against the planned one; "" when not derived."""
    problem: str = ""
    """Why advantages are missing."""
    metrics: list[tuple[str, float]] = []


class LeafCard(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One ended trajectory, as far as lists and filters need it. An array: there are many."""

    tree: int
    """Position of its tree in the group's block."""
    node: int
    """Position of the leaf in its tree."""
    name: str
    """Tree number and node id: `<tree>/<leaf>`."""
    reward: float | None
    outcome: str
    answer: str
    advantage: float | None
    """None when it is no member of the step, or not derived."""


class GroupCard(Block, frozen=True):
    """One group, as far as lists and filters need it."""

    uid: str
    step: int
    question: str
    references: list[str]
    source: str
    example: str
    mode: str
    leaves: list[LeafCard]
    mean: float | None = None
    std: float | None = None
    """Over the members' rewards, n − 1."""
    staleness: int = 0
    policy_version: int = 0
    hidden_leaves: int = 0
    """Leaves that the page does not hold."""


class ObservationBlock(Block, frozen=True):
    """What the environment answered."""

    tokens: str
    """Turn-closing tokens, tool message and next generation prompt."""
    tokens_cut: int = 0
    reset: str | None = None
    """The whole prompt of a new segment."""
    reset_cut: int = 0
    ok: bool = True
    status: str = ""
    error: str = ""
    backend: str = ""
    latency: float = 0.0
    cached: bool = False
    truncated: bool = False
    documents: list[str] = []


class ScoreBlock(Block, frozen=True):
    """A reward and what made it."""

    value: float
    scorer: str
    version: str
    components: list[tuple[str, float]] = []


class NodeBlock(Block, frozen=True):
    """One agent step."""

    node: str
    parent: int = -1
    """Position of its parent in the tree, −1 for the root."""
    depth: int = 0
    tokens: str = ""
    logprobs: str = ""
    reference: str | None = None
    """The base model's logprobs, where the step has a KL term."""
    tokens_cut: int = 0
    count: int = 0
    """Tokens sampled, those that are cut included."""
    advantage: float | None = None
    """Mean over the members whose path holds it; None when none does."""
    members: int = 0
    tool: str | None = None
    arguments: list[tuple[str, str]] = []
    observation: ObservationBlock | None = None
    outcome: str | None = None
    answer: str | None = None
    detail: str = ""
    score: ScoreBlock | None = None
    node_score: ScoreBlock | None = None
    stop_reason: str = ""
    seed: int = 0
    request: int = 0
    sample_index: int = 0
    policy_version: int = 0
    seconds: float = 0.0


class TreeBlock(Block, frozen=True):
    """One tree; parents stand before their children."""

    index: int
    nodes: list[NodeBlock]
    unborn: list[tuple[str, str, str]] = []
    """Node id, outcome and detail of void ends of turns that were never sampled."""


class DatumBlock(Block, frozen=True):
    """One datum of a member."""

    segment: int
    datum: int = -1
    """Its number in the step, −1 when it was left out: no advantage differs from 0."""
    micro_batch: int = -1
    scale: float = 0.0
    """The factor on its advantages."""


class MemberBlock(Block, frozen=True):
    """How one leaf is trained, per node of its path (root first)."""

    leaf: tuple[int, int]
    """Positions of tree and leaf."""
    advantages: list[float]
    credit: list[float] | None = None
    """After the prefix weight; None when equal to the advantages."""
    trained: list[bool] | None = None
    """None when every node is trained in this member's datums."""
    kl_weights: list[float] | None = None
    """Times β, the weight of the KL term; None when β is 0."""
    datums: list[DatumBlock] = []


class GroupBlock(Block, frozen=True):
    """All turns of one group."""

    uid: str
    prompt: str
    prompt_cut: int
    prompt_count: int
    trees: list[TreeBlock]
    members: list[MemberBlock] = []
    kl_beta: float = 0.0
    params: list[tuple[str, str]] = []
    """How it was sampled."""


class PageIndex(Block, frozen=True):
    """Everything but the turns."""

    run: RunFacts
    steps: list[StepFacts]
    groups: list[GroupCard]
    formulas: dict[str, str]
    """Estimator → its definition, as a person would check it by hand."""
