"""Owns the frozen configuration of a run: its Structs, defaults and digest."""

import hashlib
from typing import Literal

import msgspec


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every settings table; unknown keys are errors."""


class RunSettings(Table, frozen=True):
    """Identity and randomness."""

    seed: int = 0
    preset: str = ""


class EngineSettings(Table, frozen=True):
    """Where training and sampling happen."""

    kind: Literal["embedded", "pytrio"] = "embedded"
    base_model: str = ""
    """"" is the embedded engine's own model."""
    lora_rank: int = 16
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    request_timeout: float = 120.0
    """Seconds of retries on one call before a fault is reported."""


class DataSettings(Table, frozen=True):
    """Question files (JSONL); "world" names the embedded engine's generated world."""

    train: str = "world"
    eval: str = "world"


class TreeSettings(Table, frozen=True):
    """Tree-GRPO's M, N, L, K."""

    m: int = 2
    n: int = 2
    l: int = 1  # noqa: E741 the paper's letter
    k: int = 3
    expand: str = "random"
    """random, uncertainty, value or module:function."""
    temperature: float = 1.0
    """τ of the uncertainty policy's softmax."""


class RolloutSettings(Table, frozen=True):
    """How questions become trajectories."""

    mode: Literal["chain", "tree"] = "chain"
    group_size: int = 8
    tree: TreeSettings = TreeSettings()
    protocol: str = "qwen3_5"
    prompt: str = ""
    """Name of a prompt template, or a file; "" is the protocol's own."""
    system_prompt: str | None = None
    """Frozen text of the template; filled from `prompt` when the run is created, unless it is given."""
    user_template: str | None = None
    """Frozen text with a {question} place; filled likewise."""
    enable_thinking: bool = False
    history: Literal["keep", "rewrite"] = "keep"
    """What follows a turn where the chat template would render that turn anew once a result follows (Qwen3):
    keep the sampled prefix, or start a new segment as the template has it."""
    max_search_calls: int = 4
    max_turns: int = 6
    max_trajectory_tokens: int = 8192
    max_assistant_tokens: int = 1024
    max_tool_tokens: int = 1024
    final_turn: Literal["last", "forced"] = "last"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    concurrency: int = 64
    """Trajectories in flight per rollout process."""
    min_group: int = 2


class SearchSettings(Table, frozen=True):
    """The search back-end."""

    backend: Literal["local", "zhihu", "wikipedia", "retrieval", "none"] = "local"
    top_k: int = 3
    corpus: str = "world"
    url: str = ""
    timeout: float = 20.0
    retries: int = 3
    cache: bool = True


class ToolSettings(Table, frozen=True):
    """Declared tools and what a tool's fault means."""

    declared: tuple[str, ...] = ("search",)
    on_fault: Literal["void", "observe"] = "void"
    search: SearchSettings = SearchSettings()


class RewardSettings(Table, frozen=True):
    """Which scorer, and its levels."""

    scorer: str = "em_format"
    structure_format_score: float = 0.2
    final_format_score: float = 0.1
    retrieval_score: float = 0.0


class AdamSettings(Table, frozen=True):
    """AdamW."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class PackingSettings(Table, frozen=True):
    """Limits of one micro-batch."""

    max_datums: int = 32
    max_datum_tokens: int = 8192
    max_padded_tokens: int = 64_000


class RecoverySettings(Table, frozen=True):
    """When recovery must ask."""

    max_resend_steps: int = 20


class LearnerSettings(Table, frozen=True):
    """How completed groups become updates."""

    groups_per_step: int = 8
    estimator: str = "group_mean"
    singleton: Literal["zero", "raw"] = "zero"
    group_by: Literal["uid", "tree_uid"] = "uid"
    shaping: Literal["base", "tree_diff"] = "base"
    shaping_margin: float = 0.1
    prefix_weight: Literal["each", "once_sum", "once"] = "each"
    loss: Literal["importance_sampling", "ppo", "cispo", "dro", "gspo"] = "importance_sampling"
    loss_config: dict[str, float] = {}
    reduction: Literal["sample_mean", "sum"] = "sample_mean"
    """What the trainer does over the datums of one call; sample_mean scales micro-batches by n_k/N."""
    kl_beta: float = 0.0
    max_staleness: int = 0
    learning_rate: float = 1e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    adam: AdamSettings = AdamSettings()
    packing: PackingSettings = PackingSettings()
    recovery: RecoverySettings = RecoverySettings()
    save_every: int = 5
    eval_every: int = 0
    eval_samples: int = 4
    eval_limit: int = 0
    group_deadline: float = 1800.0
    """Seconds that a step waits for its slowest group."""
    dynamic_sampling: bool = False
    """Replace groups without signal until the step has groups_per_step with signal (DAPO)."""
    max_replaced: int = 32
    """Groups without signal that one step replaces at most; later ones are trained as they are."""
    allow_off_distribution: bool = False


class BudgetSettings(Table, frozen=True):
    """Limits at which rollout and learn stop cleanly; 0 is no limit."""

    tokens_sampled: int = 0
    tokens_trained: int = 0
    search_calls: int = 0
    money: float = 0.0
    price_per_million_sampled: float = 0.0
    price_per_million_trained: float = 0.0
    price_per_search: float = 0.0


class TrackingSettings(Table, frozen=True):
    """Where metrics also go."""

    swanlab: Literal["online", "local", "offline", "disabled"] = "disabled"


class Config(Table, frozen=True):
    """Everything about a run that is frozen when it is created."""

    run: RunSettings = RunSettings()
    engine: EngineSettings = EngineSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    tools: ToolSettings = ToolSettings()
    reward: RewardSettings = RewardSettings()
    learner: LearnerSettings = LearnerSettings()
    budget: BudgetSettings = BudgetSettings()
    tracking: TrackingSettings = TrackingSettings()


def to_plain(config: Config) -> dict[str, object]:
    """Return the configuration as plain data, as the `run` event stores it."""
    plain = msgspec.to_builtins(config)
    assert isinstance(plain, dict)
    return plain


def from_plain(plain: dict[str, object]) -> Config:
    """Return the configuration stored in a `run` event; raises msgspec.ValidationError on bad data."""
    return msgspec.convert(plain, Config)


def config_digest(config: Config) -> str:
    """Return SHA-256 hex of the canonical JSON (sorted keys) of the configuration."""
    return hashlib.sha256(msgspec.json.encode(to_plain(config), order="sorted")).hexdigest()
