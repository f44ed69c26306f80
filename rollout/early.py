"""Owns what is checked in a configuration before a run is made of it, and so before anything is bought."""

import os
from itertools import islice
from pathlib import Path

from core.advantage import check_estimator
from core.config import Config, EngineSettings, LearnerSettings
from core.errors import ConfigError, DataError
from engine import sequence_loss
from engine.embedded.base_model import BASE_FOLDER
from engine.embedded.calls import InputError, Loss
from engine.embedded.losses import resolve_loss
from engine.locks import MODEL_NAME
from rollout.expand import expand_policy
from rollout.search.build import check_address
from rollout.search.index import corpus_lines
from rollout.search.keys import find_keys
from rollout.tools import TOOL_NAMES

CORPUS_LINES = 1000
"""Passages that are looked at; the index reads them all, and names a bad line later."""


def check_settings(config: Config) -> None:
    """Raise what a later command would that uses these settings; user code is left to that command.

    Raises ConfigError or EstimatorError.
    """
    check_estimator(config.learner.estimator)
    if ":" not in config.rollout.tree.expand:
        expand_policy(config.rollout.tree.expand, config.rollout.tree.temperature)
    for place, name in enumerate(config.tools.declared):
        if name not in TOOL_NAMES:
            raise ConfigError(f"setting 'tools.declared': {name!r}, expected {' or '.join(TOOL_NAMES)}")
        if name in config.tools.declared[:place]:
            raise ConfigError(f"setting 'tools.declared': {name!r} stands twice")
    check_address(config.tools.search)
    if "search" in config.tools.declared and config.tools.search.backend == "zhihu":
        find_keys(os.environ, Path(".env"))
    _check_engine(config.engine)
    if config.engine.kind == "embedded" or config.learner.loss == sequence_loss.LOSS:
        _check_loss(config.learner)


def _check_engine(engine: EngineSettings) -> None:
    if engine.kind == "embedded" and engine.base_model not in ("", MODEL_NAME, str(BASE_FOLDER)):
        raise ConfigError(
            f"setting 'engine.base_model': the embedded engine has no model {engine.base_model!r}; leave it "
            f"empty, or use {MODEL_NAME!r}, or --set engine.kind=pytrio"
        )


def _check_loss(learner: LearnerSettings) -> None:
    """Raise ConfigError for settings that the loss does not have, or cannot use."""
    # A loss on sequences has the settings of ppo: the two bounds.
    name = "ppo" if learner.loss == sequence_loss.LOSS else learner.loss
    try:
        resolve_loss(Loss(name, {**learner.loss_config}))
    except InputError as error:
        raise ConfigError(f"setting 'learner.loss_config', loss {learner.loss!r}: {error}") from error


def check_corpus(corpus: str) -> None:
    """Raise ConfigError when there is no such file, DataError when its first lines are no passages."""
    path = Path(corpus)
    if not path.is_file():
        raise ConfigError(f"setting 'tools.search.corpus': there is no file {corpus!r}")
    if not sum(1 for _ in islice(corpus_lines(path), CORPUS_LINES)):
        raise DataError(f"{corpus}: no passages in it, expected one JSON object per line")
