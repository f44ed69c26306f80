"""Owns putting a run's environment together from its configuration: questions, prompt, tools, scorer."""

import hashlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from core.config import Config, RolloutSettings
from core.errors import ConfigError, DataError
from engine.client import Session
from engine.embedded.world import write_world
from rollout.chat import Chat
from rollout.data import Example, load_examples
from rollout.early import check_corpus, check_settings
from rollout.prompts import PromptTemplate, check_prompt, load_prompt
from rollout.protocols import get_protocol
from rollout.reward import get_scorer
from rollout.run import Environment
from rollout.search.index import Notify
from rollout.search.service import Cache
from rollout.tools import build_tools

WORLD = "world"
"""The setting value that names the embedded engine's generated world, written into the run."""


def freeze(config: Config, allow_code: Collection[str] = ()) -> Config:
    """Return the configuration as the run keeps it: paths made absolute, the prompt's text put in.

    Everything that a later command would stumble over is checked here, before anything is written. Raises
    ConfigError, DataError, EstimatorError or CodeNotAllowed.
    """
    check_settings(config)
    get_protocol(config.rollout.protocol)
    template = _template(config.rollout)
    get_scorer(config.reward.scorer, config.reward, allow_code)
    config = with_absolute_paths(config)
    data, search, corpus = config.data, config.tools.search, config.tools.search.corpus
    for path in (data.train, data.eval):
        if path != WORLD:
            load_examples(Path(path))
    if "search" in config.tools.declared and search.backend == "local" and corpus != WORLD:
        check_corpus(corpus)
    prompted = msgspec.structs.replace(
        config.rollout, system_prompt=template.system, user_template=template.user
    )
    return msgspec.structs.replace(config, rollout=prompted)


def _template(settings: RolloutSettings) -> PromptTemplate:
    """Return the prompt to freeze: given texts (those of another run) before the named ones."""
    system, user = settings.system_prompt, settings.user_template
    if system is None or user is None:
        named = load_prompt(settings.prompt, settings.protocol)
        system = named.system if system is None else system
        user = named.user if user is None else user
    return check_prompt(PromptTemplate(system=system, user=user))


def with_absolute_paths(config: Config) -> Config:
    """Return the configuration with the paths of its files made absolute, as a run keeps them."""
    data = msgspec.structs.replace(
        config.data, train=_absolute(config.data.train), eval=_absolute(config.data.eval)
    )
    search = msgspec.structs.replace(config.tools.search, corpus=_absolute(config.tools.search.corpus))
    tools = msgspec.structs.replace(config.tools, search=search)
    return msgspec.structs.replace(config, data=data, tools=tools)


def _absolute(path: str) -> str:
    return path if path in ("", WORLD) else str(Path(path).resolve())


def needs_world(config: Config) -> bool:
    """Return whether any setting names the generated world."""
    return WORLD in (config.data.train, config.data.eval) or (
        config.tools.search.backend == "local" and config.tools.search.corpus == WORLD
    )


def prepare_world(config: Config, run_dir: Path) -> None:
    """Write the generated world into the run, if a setting names it; the same seed gives the same bytes."""
    if needs_world(config):
        write_world(run_dir / WORLD, config.run.seed)


def restore_world(config: Config, run_dir: Path) -> None:
    """Write the generated world where it is missing, as in an imported run or a backup."""
    if not (run_dir / WORLD / "train.jsonl").exists():
        prepare_world(config, run_dir)


def questions(config: Config, run_dir: Path, split: str) -> list[Example]:
    """Return the questions of `split`: "train", "dev" or "test" (or a file), in file order.

    Outside the generated world, dev and test are both `data.eval`. Raises DataError.
    """
    if split not in ("train", "dev", "test"):
        return load_examples(Path(split))
    named = config.data.train if split == "train" else config.data.eval
    path = run_dir / WORLD / f"{split}.jsonl" if named == WORLD else Path(named)
    return load_examples(path)


def questions_digest(config: Config, run_dir: Path) -> str:
    """Return SHA-256 hex of the training questions' file, which says what each ticket asks."""
    named = config.data.train
    path = run_dir / WORLD / "train.jsonl" if named == WORLD else Path(named)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"cannot read the questions file {str(path)!r}: {error.strerror}") from error


def check_questions(config: Config, run_dir: Path, recorded: str) -> None:
    """Raise DataError when the training questions are no longer those that the run was created with."""
    if recorded and questions_digest(config, run_dir) != recorded:
        raise DataError(
            f"the questions file {config.data.train!r} has changed since the run was created, so its tickets "
            "would ask other questions: put the old file back, or begin another run"
        )


def build_environment(
    config: Config,
    session: Session,
    run_dir: Path,
    *,
    cache: Cache | None = None,
    allow_code: Collection[str] = (),
    notify: Notify | None = None,
) -> Environment:
    """Return the environment of a run with a frozen configuration.

    Raises ConfigError, DataError (the corpus) and CodeNotAllowed (a user's scorer).
    """
    settings = config.rollout
    if settings.system_prompt is None or settings.user_template is None:
        raise ConfigError("the run's prompt was never frozen: create the run with `rollout` or `learn`")
    tools = build_tools(config.tools, run_dir, cache, notify)
    chat = Chat(
        session.tokenizer(),
        get_protocol(settings.protocol),
        [tool.spec for tool in tools.values()],
        PromptTemplate(system=settings.system_prompt, user=settings.user_template),
        enable_thinking=settings.enable_thinking,
        rewrite_history=settings.history == "rewrite",
    )
    scorer = get_scorer(config.reward.scorer, config.reward, allow_code)
    return Environment(session, chat, tools, scorer)
