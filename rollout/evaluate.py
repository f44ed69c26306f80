"""Owns evaluations: a fixed set of questions, any weights, the environment of the run.

Each question is a chain group that is kept in memory. A record per question is written as it ends, so that an
interrupted evaluation goes on where it stood; questions with void trajectories are asked again then. Seeds
depend on the run and the set alone, so that two checkpoints answer under the same draws.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from core.arrays import view_tokens
from core.closing import CHAIN
from core.config import Config, TreeSettings
from core.errors import DataError, RolltapeError
from core.events import Evaluated, GroupAsked, Plan
from core.ids import make_uid
from rollout.data import Example
from rollout.evalrecords import RecordFile, Sheet, set_digest
from rollout.growing import Gardener
from rollout.live import LiveGroup
from rollout.normalise import get_rule
from rollout.plan import ask, make_params
from rollout.progress import Voice
from rollout.run import Environment, make_gardener
from rollout.seeds import derived_seed
from rollout.serving import first
from rollout.summary import question_record, summarise
from store.ports import Claim, StreamWrite

RULE = "unicode_p"
"""Normaliser of exact match and F1 where the run's own scorer does not record them."""


class EvalOptions(NamedTuple):
    """How a set is asked."""

    samples: int = 1
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    limit: int = 0
    """The first so many questions; 0 is all."""
    batch_size: int = 16
    """Questions in work at once."""
    name: str = ""
    """Under which the result is recorded and compared."""


class Weights(NamedTuple):
    """What is evaluated."""

    weights_uri: str
    """"" is the base model."""
    policy_version: int


class Exam(NamedTuple):
    """An evaluation, put together."""

    config: Config
    environment: Environment
    weights: Weights
    options: EvalOptions


async def evaluate(exam: Exam, examples: Sequence[Example], records: Path, voice: Voice) -> Evaluated:
    """Ask the set and return the event that records it; the caller stamps and appends it to the journal.

    `records` is the file of one JSON line per question, made or continued. Raises ConfigError when it holds
    another evaluation, DataError when a question leaves no room to answer, and WeightsGone, EngineDied,
    ServiceRefused, CredentialsMissing, ToolError or RewardError, with what was finished kept.
    """
    examples = examples[: exam.options.limit or None]
    sheet = make_sheet(exam, examples)
    with RecordFile(records, sheet) as file:
        try:
            await _ask_all(exam, sheet, examples, file, voice)
        except BaseExceptionGroup as raised:
            known = raised.subgroup(RolltapeError)
            if known is None:
                raise
            raise first(known) from raised
        ordered = [file.done[example.id] for example in examples]
    return Evaluated(
        weights_uri=sheet.weights_uri,
        policy_version=sheet.policy_version,
        set_digest=sheet.set_digest,
        settings=sheet.settings,
        results=tuple(record.result for record in ordered),
        summary=summarise(ordered),
        name=sheet.name,
    )


def make_sheet(exam: Exam, examples: Sequence[Example]) -> Sheet:
    """Return what identifies an evaluation: two with equal sheets ask the same in the same way."""
    settings, options = exam.config.rollout, exam.options
    scorer = exam.environment.scorer
    search = exam.config.tools.search
    return Sheet(
        name=options.name,
        weights_uri=exam.weights.weights_uri,
        policy_version=exam.weights.policy_version,
        set_digest=set_digest(examples),
        settings={
            "samples": options.samples,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "questions": len(examples),
            "max_search_calls": settings.max_search_calls,
            "max_turns": settings.max_turns,
            "max_trajectory_tokens": settings.max_trajectory_tokens,
            "max_assistant_tokens": settings.max_assistant_tokens,
            "max_tool_tokens": settings.max_tool_tokens,
            "protocol": exam.environment.chat.protocol.name,
            "search": search.backend,
            "top_k_results": search.top_k,
            "scorer": f"{scorer.id} {scorer.version}"
            + (f" {scorer.source_digest[:12]}" if ":" in scorer.id else ""),
        },
    )


async def _ask_all(
    exam: Exam, sheet: Sheet, examples: Sequence[Example], file: RecordFile, voice: Voice
) -> None:
    done = {name for name, record in file.done.items() if not record.result.void}
    run_seed = derived_seed(exam.config.run.seed, "eval", sheet.set_digest)
    gardener = make_gardener(_as_chains(exam.config), exam.environment, voice, run_seed=run_seed)
    places = anyio.CapacityLimiter(exam.options.batch_size)
    async with anyio.create_task_group() as tasks:
        for position, example in enumerate(examples):
            if example.id in done:
                continue
            asked = _asked(exam, example, position)
            await places.acquire_on_behalf_of(asked.uid)
            voice.progress.groups_open += 1
            tasks.start_soon(_ask_one, gardener, asked, file, voice, places)


async def _ask_one(
    gardener: Gardener, asked: GroupAsked, file: RecordFile, voice: Voice, places: anyio.CapacityLimiter
) -> None:
    try:
        live = await LiveGroup.open(asked, _keep_in_memory)
        await gardener.grow(live, lambda: None)
        file.add(question_record(live.group, get_rule(RULE)))
        voice.progress.groups_open -= 1
        voice.progress.groups_closed += 1
        voice.notify(voice.progress)
    finally:
        places.release_on_behalf_of(asked.uid)


async def _keep_in_memory(writes: Sequence[StreamWrite]) -> None:
    """Write nowhere: an evaluation's trajectories are no part of the log."""
    del writes


def _asked(exam: Exam, example: Example, position: int) -> GroupAsked:
    """Return what is asked of one question; raises DataError when its prompt leaves no room to answer."""
    options = exam.options
    params = msgspec.structs.replace(
        make_params(exam.config.rollout), temperature=options.temperature, top_p=options.top_p, top_k=-1
    )
    plan = Plan(mode=CHAIN, group_size=options.samples, min_group=1)
    uid = make_uid(position, 0)
    claim = Claim(uid, position, 0, 0, exam.weights.policy_version, exam.weights.weights_uri, adopted=False)
    asked = ask(exam.environment.chat, plan, params, claim, example, 0.0)
    length = len(view_tokens(asked.prompt))
    if length >= params.max_trajectory_tokens:
        raise DataError(
            f"question {example.id!r}: its prompt has {length} tokens, but a trajectory may have "
            f"{params.max_trajectory_tokens}; raise rollout.max_trajectory_tokens"
        )
    return asked


def _as_chains(config: Config) -> Config:
    """Return the configuration of a run whose groups are chains; user expansion code is not needed then."""
    return msgspec.structs.replace(
        config, rollout=msgspec.structs.replace(config.rollout, mode=CHAIN, tree=TreeSettings())
    )
