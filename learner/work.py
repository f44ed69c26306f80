"""Owns what every part of the learner is handed: the run, and the ways to tell and to ask a person."""

import time
from collections.abc import Callable
from typing import NamedTuple

from core.config import Config
from core.errors import ConfigError
from core.events import RunOpened, StepCommitted, StepPlanned
from engine.client import Session
from learner.rebuild import CodeLoader, no_code
from store.log import Log
from store.ports import Sink


def _quiet(_text: str) -> None:
    pass


def _not_watched(_point: str) -> None:
    pass


def _not_reported(_planned: StepPlanned, _committed: StepCommitted) -> None:
    pass


def _declined(_question: str) -> bool:
    return False


class Policy(NamedTuple):
    """A published version."""

    policy_version: int
    weights_uri: str
    step: int
    """Committed steps that the weights hold."""


class Hooks(NamedTuple):
    """How the learner speaks with its surroundings; all may be left out."""

    notify: Sink = _quiet
    """One plain line for a person."""
    committed: Callable[[StepPlanned, StepCommitted], None] = _not_reported
    """After a step is committed."""
    evaluate: Callable[[Policy], None] | None = None
    """Evaluate a just-published version and record it; called every `learner.eval_every` steps."""
    confirm: Callable[[str], bool] = _declined
    """Answer a question about money; the learner goes on when it returns True."""
    probe: Callable[[str], None] = _not_watched
    """Called at each named point of a step, so that a test can end the process exactly there."""
    load_code: CodeLoader = no_code
    """Loads a `module:function` estimator that the user allowed."""


class Work(NamedTuple):
    """One run and the session in which it is trained."""

    log: Log
    session: Session
    config: Config
    opened: RunOpened
    fingerprints: dict[str, str]
    hooks: Hooks
    clock: Callable[[], float] = time.time
    """Unix seconds, for the record only; nothing is derived from it."""


def check_distribution(config: Config) -> None:
    """Refuse sampling settings whose logprobs are not those of the policy that is trained."""
    rollout = config.rollout
    off = rollout.temperature != 1.0 or rollout.top_p < 1.0 or rollout.top_k > 0
    if off and not config.learner.allow_off_distribution:
        raise ConfigError(
            f"rollouts are sampled with temperature {rollout.temperature!r}, top_p {rollout.top_p!r}, top_k "
            f"{rollout.top_k!r}, so their logprobs are not those of the policy: expected 1, 1 and -1, or set "
            "learner.allow_off_distribution = true"
        )
