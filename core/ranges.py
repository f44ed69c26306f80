"""Owns what numbers a setting may have, beyond its type."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from core.errors import ConfigError

LARGEST_SEED = 2**31 - 1
"""Seeds of requests have 31 bits as well."""

_AT_LEAST: Mapping[str, float] = {
    "run.seed": 0,
    "rollout.group_size": 1,
    "rollout.tree.m": 1,
    "rollout.tree.n": 0,
    "rollout.tree.l": 0,
    "rollout.tree.k": 1,
    "rollout.max_turns": 1,
    "rollout.max_search_calls": 0,
    "rollout.max_trajectory_tokens": 2,
    "rollout.max_assistant_tokens": 1,
    "rollout.max_tool_tokens": 1,
    "rollout.concurrency": 1,
    "rollout.min_group": 1,
    "rollout.temperature": 0,
    "rollout.top_k": -1,
    "tools.search.top_k": 1,
    "tools.search.retries": 0,
    "learner.groups_per_step": 1,
    "learner.max_staleness": 0,
    "learner.learning_rate": 0,
    "learner.warmup_steps": 0,
    "learner.kl_beta": 0,
    "learner.adam.weight_decay": 0,
    "learner.adam.grad_clip_norm": 0,
    "learner.save_every": 1,
    "learner.eval_every": 0,
    "learner.eval_samples": 1,
    "learner.eval_limit": 0,
    "learner.max_replaced": 0,
    "learner.recovery.max_resend_steps": 0,
    "learner.packing.max_datums": 1,
    "learner.packing.max_datum_tokens": 1,
    "learner.packing.max_padded_tokens": 1,
    "learner.group_deadline": 1,
    "budget.tokens_sampled": 0,
    "budget.tokens_trained": 0,
    "budget.search_calls": 0,
    "budget.money": 0,
    "budget.price_per_million_sampled": 0,
    "budget.price_per_million_trained": 0,
    "budget.price_per_search": 0,
}

_MORE_THAN_ZERO = (
    "engine.request_timeout",
    "tools.search.timeout",
    "rollout.tree.temperature",
    "learner.adam.eps",
)


class _Range(NamedTuple):
    """Which numbers are meant, in words and as a test."""

    expected: str
    holds: Callable[[float], bool]


_RATE = _Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
_OTHERS: Mapping[str, _Range] = {
    **dict.fromkeys(_MORE_THAN_ZERO, _Range("more than 0", lambda value: value > 0)),
    "learner.adam.beta1": _RATE,
    "learner.adam.beta2": _RATE,
    "run.seed": _Range(f"at most {LARGEST_SEED}", lambda value: value <= LARGEST_SEED),
    "engine.lora_rank": _Range("4 to 64", lambda value: 4 <= value <= 64),
    "rollout.top_p": _Range("more than 0 and at most 1", lambda value: 0 < value <= 1),
}


def check_ranges(values: Mapping[str, object]) -> None:
    """Raise ConfigError for a number that cannot be meant; `values` holds every setting by its name."""
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
    for key, value in numbers.items():
        if not math.isfinite(value):
            raise ConfigError(f"setting {key!r}: {value!r}, expected a finite number")
    for key, least in _AT_LEAST.items():
        if numbers[key] < least:
            raise ConfigError(f"setting {key!r}: {numbers[key]!r} is too small, expected at least {least:g}")
    for key, wanted in _OTHERS.items():
        if not wanted.holds(numbers[key]):
            raise ConfigError(f"setting {key!r}: {numbers[key]!r}, expected {wanted.expected}")
