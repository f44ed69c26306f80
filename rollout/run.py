"""Owns the rollout command: from a log, a session and a configuration to a worker that works."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import anyio

from core.config import Config
from core.errors import RolltapeError
from rollout.acting import Actor, Surroundings
from rollout.chat import Chat
from rollout.data import Example
from rollout.expand import expand_policy
from rollout.growing import Gardener
from rollout.plan import make_params, make_plan
from rollout.progress import Voice
from rollout.reward import Scorer
from rollout.sampling import Sampler
from rollout.serving import Questions, Server, first
from rollout.tickets import Tickets
from rollout.tools import Tool
from rollout.trees import Policy
from rollout.turns import Rules, is_finished
from rollout.watching import Watch
from rollout.workers import FIRST_PAUSE, Bounds, Ending, Worker
from store.ports import Admission, Groups, Journal


class RunLog(Protocol):
    """What a worker sees of a log (store.log.Log)."""

    @property
    def journal(self) -> Journal:
        """The run's one ordered stream."""
        ...

    @property
    def groups(self) -> Groups:
        """The groups' records."""
        ...

    @property
    def worker_id(self) -> str:
        """Under which this process claims groups."""
        ...


class Environment(NamedTuple):
    """What trajectories live in, built once for a run."""

    sampler: Sampler
    chat: Chat
    tools: Mapping[str, Tool]
    scorer: Scorer


class Options(NamedTuple):
    """What a command may add to the configuration."""

    max_tickets: int | None = None
    """End after this many tickets, whatever the learner's goal is."""
    allow_code: Collection[str] = ()
    """User code (`module:function`) that may be imported."""
    pause: float = FIRST_PAUSE
    """Seconds without new claims after a group that failed."""
    check: Callable[[], None] = lambda: None
    """Raises when waiting is in vain, because the engine is gone (Session.check)."""


NO_OPTIONS = Options()


async def run_rollouts(
    log: RunLog,
    config: Config,
    examples: Sequence[Example],
    environment: Environment,
    voice: Voice,
    options: Options = NO_OPTIONS,
) -> Ending:
    """Roll out groups until the goal or a budget is reached; return which.

    Cancelling it is a clean stop: what is recorded stays, open groups are adopted at the next start. Raises
    the RolltapeError that ended the work: EngineDied, ServiceRefused, CredentialsMissing, ToolError,
    RewardError, DataError, ConfigError, CodeNotAllowed or StoreError.
    """
    run_seed = config.run.seed
    watch = Watch(log.journal)
    gardener = make_gardener(config, environment, voice, options.allow_code, run_seed=run_seed)
    plan = make_plan(config.rollout)
    tickets = Tickets(run_seed, len(examples))
    questions = Questions(examples, tickets, environment.chat, plan, make_params(config.rollout))
    reference = environment.sampler.fingerprints()["base_model"] if config.learner.kl_beta else ""
    server = Server(log.groups, watch, gardener, questions, reference=reference)
    admission = Admission(config.learner.max_staleness, config.learner.groups_per_step, options.max_tickets)
    bounds = Bounds(admission, config.rollout.concurrency, config.budget, plan, options.pause, options.check)
    worker = Worker(log.worker_id, log.groups, watch, server, bounds, voice)
    try:
        return await worker.run()
    except BaseExceptionGroup as raised:
        known = raised.subgroup(RolltapeError)
        if known is None:
            raise
        raise first(known) from raised


def make_gardener(
    config: Config,
    environment: Environment,
    voice: Voice,
    allow_code: Collection[str] = (),
    *,
    run_seed: int,
) -> Gardener:
    """Return what grows groups under a configuration; raises CodeNotAllowed or ConfigError."""
    settings, chat = config.rollout, environment.chat
    rules = Rules(chat.parse, chat.protocol.corrects_invalid)
    surroundings = Surroundings(
        environment.sampler,
        chat,
        rules,
        environment.tools,
        environment.scorer,
        config.tools.on_fault,
        run_seed,
    )
    expand = expand_policy(settings.tree.expand, settings.tree.temperature, allow_code)
    policy = Policy(run_seed, expand, lambda group, tree, tip: is_finished(rules, group, tree, tip))
    slots = anyio.CapacityLimiter(settings.concurrency)
    return Gardener(Actor(surroundings, voice), rules, policy, slots)
