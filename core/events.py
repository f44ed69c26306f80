"""Owns the facts: one frozen Struct per event, their stored tags, and the two unions.

Stored as MessagePack maps. New fields get defaults; a field is never renamed or retyped. Token ids and
logprobs are raw little-endian bytes (int32 / float32). Every token is stored once: the prompt on `group`,
each completion on its `sample`, each observation's tokens on its `observation`.
"""

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """How a trajectory ended; the first that applies."""

    ANSWERED = "answered"
    BAD_FORMAT = "bad_format"
    TOOL_LIMIT = "tool_limit"
    TURN_LIMIT = "turn_limit"
    TRUNCATED = "truncated"
    TOKEN_LIMIT = "token_limit"
    VOID_TOOL = "void_tool"
    VOID_ENGINE = "void_engine"
    CANCELLED = "cancelled"


VOID_OUTCOMES = frozenset({Outcome.VOID_TOOL, Outcome.VOID_ENGINE, Outcome.CANCELLED})
"""Not the policy's doing: never scored, never trained on, in no mean."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of every stored fact."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The shape of a group's rollouts: chains, or trees (Tree-GRPO's M, N, L, K)."""

    mode: str
    """"chain" or "tree"."""
    group_size: int = 0
    """G, chains only."""
    m: int = 0
    n: int = 0
    l: int = 0  # noqa: E741 the paper's letter
    k: int = 0
    expand: str = "random"
    tau: float = 1.0
    """τ of the uncertainty policy's softmax."""
    min_group: int = 2
    """Fewest non-void leaves with which the group may close."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the policy is sampled and what ends a trajectory."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_search_calls: int = 4
    max_turns: int = 6
    max_trajectory_tokens: int = 8192
    max_assistant_tokens: int = 1024
    max_tool_tokens: int = 1024
    final_turn: str = "last"
    """"last": a call in the last turn ends the trajectory; "forced": the last turn runs no tool."""


class GroupAsked(Event, tag="group", frozen=True):
    """What is asked and how: the first record of a group's own stream."""

    uid: str
    ticket: int
    attempt: int
    example_id: str
    question: str
    references: tuple[str, ...]
    data_source: str
    prompt: bytes
    """int32 LE token ids of the rendered prompt, generation prompt included."""
    plan: Plan
    policy_version: int
    weights_uri: str
    """"" is the base model."""
    params: SamplingParams
    protocol: str = ""
    source: str = ""
    """`<run id>/<uid>` of the group that this one repeats, when it was taken from another run."""
    at: float = 0.0
    """Unix seconds; information only, nothing is derived from it."""


class TurnSampled(Event, tag="sample", frozen=True):
    """The policy sampled a turn."""

    node: str
    parent: str | None
    """Node id; None stands for the root, the prompt itself."""
    turn: int
    """Depth from the root, from 0."""
    tokens: bytes
    """int32 LE, exactly as the sampler returned them."""
    sampled_logprobs: bytes
    """float32 LE, one per token, of the policy that acted."""
    text: str
    stop_reason: str
    """"stop" or "length"."""
    seed: int
    sample_index: int
    """Position in the response of the request that made it."""
    policy_version: int
    request: int = 0
    """Ordinal of the request among those made for the parent node (part of the seed)."""
    seconds: float = 0.0


class ToolCalled(Event, tag="tool_call", frozen=True):
    """A tool call was parsed from a turn."""

    node: str
    call_id: str
    tool: str
    arguments: dict[str, str | int | float | bool | None]


class Observed(Event, tag="observation", frozen=True):
    """The environment answered: a tool's result, or a correction of an invalid action."""

    node: str
    content: str
    """The rendered content that the policy reads."""
    tokens: bytes
    """int32 LE: turn-closing tokens + rendered tool message + next generation prompt."""
    prompt_reset: bytes | None = None
    """int32 LE: the whole prompt of a new segment where the template rewrites history."""
    ok: bool = True
    error: str = ""
    status: str = ""
    """success, timeout, rate_limited, error, empty, invalid_action, ..."""
    latency: float = 0.0
    """Seconds."""
    backend: str = ""
    cached: bool = False
    truncated: bool = False
    call_id: str = ""
    """"" when the policy's action was no call (a correction)."""
    document_ids: tuple[str, ...] = ()


class Answered(Event, tag="answer", frozen=True):
    """A trajectory ended at this leaf."""

    leaf: str
    outcome: Outcome
    answer: str | None
    """The extracted answer, None when there is none."""
    text: str
    """The last turn's text, which is what a scorer reads."""
    detail: str = ""


class Rewarded(Event, tag="reward", frozen=True):
    """A leaf (or, with scope "node", a node) was scored."""

    node: str
    value: float
    scorer: str
    scorer_version: str
    source_digest: str
    components: dict[str, float] = {}
    scope: str = "leaf"


class NodesChosen(Event, tag="expand", frozen=True):
    """Nodes were chosen for expansion in one round of one tree."""

    round: int
    nodes: tuple[str | None, ...]
    """One per expansion, with repeats; None is the root."""
    policy: str
    candidates: tuple[str | None, ...] = ()
    scores: tuple[float, ...] = ()


class ReferenceScored(Event, tag="reference_logprobs", frozen=True):
    """The base model's logprobs of one turn's sampled tokens, for a KL term."""

    node: str
    logprobs: bytes
    base_model: str


class RunOpened(Event, tag="run", frozen=True):
    """A run was opened: everything that is frozen about it."""

    schema: int
    config: dict[str, object]
    """The frozen configuration, as plain data (core.config.to_plain)."""
    config_digest: str
    fingerprints: dict[str, str]
    base_model: str
    seed: int
    run_id: str
    weights_uri: str = ""
    """Of policy version 0; "" is the base model."""
    at: float = 0.0


class GoalSet(Event, tag="run_goal", frozen=True):
    """The learner was given an aim; rollout ends by itself when it is reached."""

    max_steps: int
    at: float = 0.0


class GroupOpened(Event, tag="group_opened", frozen=True):
    """A worker claimed a ticket and thereby opened a group."""

    uid: str
    ticket: int
    attempt: int
    owner: int
    worker: str
    policy_version: int
    weights_uri: str
    committed_steps: int
    """When it was opened: staleness is counted from here."""
    at: float = 0.0


class GroupAdopted(Event, tag="group_adopted", frozen=True):
    """Another worker took over the open group of a dead one."""

    uid: str
    owner: int
    worker: str
    at: float = 0.0


class ChosenLeaf(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One member of a closed group."""

    tree: int
    leaf: str


class GroupClosed(Event, tag="group_closed", frozen=True):
    """A group is complete and waits for its step."""

    uid: str
    chosen: tuple[ChosenLeaf, ...]
    """The members, in (tree, node) order."""
    records: int
    digest: str
    """SHA-256 hex over all the group's records."""
    tokens_sampled: int = 0
    search_calls: int = 0
    at: float = 0.0


class GroupAborted(Event, tag="group_aborted", frozen=True):
    """A group was given up before it was complete."""

    uid: str
    reason: str
    final: bool = False
    """True: the ticket is given up too; False: it is opened again as attempt + 1."""
    records: int = 0
    tokens_sampled: int = 0
    """Paid for all the same, and counted in the budget."""
    search_calls: int = 0
    at: float = 0.0


class GroupDropped(Event, tag="group_dropped", frozen=True):
    """A closed group will not be trained."""

    uid: str
    reason: str
    at: float = 0.0


class PlannedGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group inside a plan, pinned by its digest."""

    uid: str
    digest: str
    marks: bytes = b""
    """First 4 bytes of the SHA-256 of each record, in key order: names an altered record."""


class PlanEvidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What names the altered place, should a step not be re-derived. Nothing is computed from it.

    Sums are two u64 LE per row over integer views v of its values (float bits): the sum of v_i and
    of (i + 1) v_i, modulo 2^64. One altered value shifts them by d and (i + 1) d, which yields both its
    offset and what it was; the recorded digest then proves it.
    """

    keys: tuple[str, ...] = ()
    """Per datum, `<uid>/t<tree>/<leaf>#<segment>`."""
    tokens: bytes = b""
    """Per datum, over the token ids of its whole segment."""
    logprobs: bytes = b""
    advantages: bytes = b""
    rewards: bytes = b""
    """One row, over the members' rewards (float64 bits) in training order."""


class AdamParams(msgspec.Struct, frozen=True, kw_only=True):
    """The optimizer's settings for one step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0 means no clipping."""


class StepPlanned(Event, tag="step_planned", frozen=True):
    """The learner is about to train: all that the update will be made of."""

    step: int
    groups: tuple[PlannedGroup, ...]
    """In training order (ascending ticket)."""
    estimator: str
    estimator_params: dict[str, float | str | bool]
    shaping: str
    shaping_params: dict[str, float]
    prefix_weight: str
    kl_beta: float
    loss: str
    loss_config: dict[str, float]
    adam: AdamParams
    members: int
    """N: chosen, non-void leaves of the step, zero-advantage ones included."""
    micro_batches: tuple[tuple[int, ...], ...]
    """Datum indices per micro-batch, in sending order."""
    datum_digests: tuple[str, ...]
    batch_digest: str
    policy_version: int
    """The version whose weights the update starts from."""
    fingerprints: dict[str, str]
    packing: dict[str, int] = {}
    reduction: str = "sample_mean"
    evidence: PlanEvidence | None = None
    at: float = 0.0


class StepCommitted(Event, tag="step_committed", frozen=True):
    """The trainer acknowledged the update, or there was nothing to train."""

    step: int
    skipped: bool
    policy_version: int
    """The version after the step."""
    trainer_metrics: dict[str, float] = {}
    rollout_metrics: dict[str, float] = {}
    seconds: dict[str, float] = {}
    tokens_trained: int = 0
    """Input tokens of the datums that were sent."""
    engine_digest: str = ""
    """What the embedded engine says it received; "" where the service tells nothing."""
    at: float = 0.0


class PolicyPublished(Event, tag="policy_published", frozen=True):
    """Samplers may use new weights."""

    policy_version: int
    weights_uri: str
    step: int
    """Steps committed so far; the weights hold all of them."""
    at: float = 0.0


class CheckpointSaved(Event, tag="checkpoint", frozen=True):
    """Weights and optimizer state were saved."""

    step: int
    """Steps committed when it was made; 0 is before the first."""
    state_uri: str
    weights_uri: str
    training_run: str = ""
    at: float = 0.0


class Recovered(Event, tag="recovered", frozen=True):
    """The learner restored a checkpoint and sent later steps again."""

    restored_uri: str
    restored_step: int
    resent_steps: tuple[int, ...]
    training_run: str
    tokens_trained: int = 0
    at: float = 0.0


class QuestionResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One question of an evaluation, averaged over its samples."""

    example_id: str
    data_source: str
    samples: int
    exact_match: float
    format: float
    f1: float = 0.0
    search_calls: float = 0.0
    turns: float = 0.0
    void: int = 0
    answer: str | None = None


class Evaluated(Event, tag="eval", frozen=True):
    """An evaluation was made."""

    weights_uri: str
    policy_version: int
    set_digest: str
    settings: dict[str, float | str | int | bool]
    results: tuple[QuestionResult, ...]
    summary: dict[str, float]
    name: str = ""
    at: float = 0.0


JournalEvent = (
    RunOpened
    | GoalSet
    | GroupOpened
    | GroupAdopted
    | GroupClosed
    | GroupAborted
    | GroupDropped
    | StepPlanned
    | StepCommitted
    | PolicyPublished
    | CheckpointSaved
    | Recovered
    | Evaluated
)
"""What changes what the run is; one stream, one order."""

GroupEvent = (
    GroupAsked | TurnSampled | ToolCalled | Observed | Answered | Rewarded | NodesChosen | ReferenceScored
)
"""What happened in a group's rollouts; one stream per tree."""

SCHEMA_VERSION = 1
