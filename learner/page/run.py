"""Owns what the page says about a run as a whole, read from its journal, and which steps come first."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import fsum

import msgspec

from core.config import Config, from_plain
from core.errors import ReplayError
from core.events import Evaluated, PolicyPublished, RunOpened, StepCommitted, StepPlanned
from learner.evaluations import Way, by_way, main_way, what_differs
from learner.page.model import HeldOut, RunFacts
from learner.page.steps import RunSource
from learner.page.turns import NAME, cut
from store.log import Log
from store.ports import GroupFate


def read_run(log: Log) -> RunSource:
    """Return the run's facts, from one pass over its journal; raises ReplayError for an empty log."""
    opened: RunOpened | None = None
    members: dict[int, int] = {}
    commits: dict[int, StepCommitted] = {}
    steps_of_version = {0: 0}
    evaluations: list[tuple[int, Evaluated]] = []
    for record in log.journal.read():
        match record.event:
            case RunOpened() as event:
                opened = event
            case StepPlanned() as event:
                members[event.step] = event.members
            case StepCommitted() as event:
                commits[event.step] = event
            case PolicyPublished() as event:
                steps_of_version[event.policy_version] = event.step
            case Evaluated(results=[_, *_]) as event:
                evaluations.append((steps_of_version.get(event.policy_version, len(commits)), event))
            case _:
                pass
    if opened is None:
        raise ReplayError(f"the log in {str(log.run_dir)!r} holds no run yet: start `rollout` or `learn`")
    facts = RunFacts(
        run_id=cut(opened.run_id, NAME),
        base_model=cut(opened.base_model, NAME),
        facts=[(cut(name, NAME), cut(value, NAME)) for name, value in run_rows(opened)],
        books=books(log),
        evals=list(_curves(by_way(evaluations))),
        steps_planned=len(members),
    )
    return RunSource(facts, dict(sorted(members.items())), commits)


def _curves(ways: Sequence[Way]) -> Iterator[HeldOut]:
    """Yield a curve per way of evaluating, the main one first, the others named by what differs in them."""
    main = main_way(ways)
    for way in sorted(ways, key=lambda way: way is not main):
        assert main is not None
        yield HeldOut(
            differs=cut(what_differs(way, main), NAME),
            points=[(steps, _held_out(event)) for steps, event in sorted(way.events.items())],
        )


def _held_out(event: Evaluated) -> float:
    """Return the mean exact match over the questions of an evaluation."""
    return fsum(result.exact_match for result in event.results) / len(event.results)


def run_rows(opened: RunOpened) -> list[tuple[str, str]]:
    """Return what a person wants to know of a run's configuration, as name and value."""
    rows = [("base model", opened.base_model), ("seed", str(opened.seed))]
    try:
        rows += _setting_rows(from_plain(opened.config))
    except msgspec.ValidationError:
        rows.append(("configuration", "of another release; not shown"))
    return [*rows, ("configuration digest", opened.config_digest), *sorted(opened.fingerprints.items())]


def _setting_rows(config: Config) -> list[tuple[str, str]]:
    rollout, learner, tree = config.rollout, config.learner, config.rollout.tree
    shape = f"tree, M {tree.m} N {tree.n} L {tree.l} K {tree.k}, expand {tree.expand}"
    return [
        ("preset", config.run.preset or "none"),
        ("engine", config.engine.kind),
        ("rollouts", shape if rollout.mode == "tree" else f"chain, {rollout.group_size} per question"),
        ("protocol", rollout.protocol),
        ("search", config.tools.search.backend),
        ("scorer", config.reward.scorer),
        ("estimator", learner.estimator),
        ("loss", learner.loss),
        ("groups per step", str(learner.groups_per_step)),
        ("max staleness", str(learner.max_staleness)),
        ("learning rate", f"{learner.learning_rate:g}"),
    ]


def books(log: Log) -> list[tuple[str, int]]:
    """Return the groups per fate, with the reason of those that were given up, the largest first."""
    counts: Counter[str] = Counter()
    for row in log.group_rows():
        given_up = row.fate in {GroupFate.DROPPED, GroupFate.ABORTED}
        counts[f"{row.fate.value}: {row.reason}" if given_up else row.fate.value] += 1
    return [(cut(name, NAME), count) for name, count in counts.most_common()]


def choose_steps(run: RunSource, steps: Sequence[int] | None) -> list[int]:
    """Return the steps that the page should hold, all planned ones or those asked for, ascending.

    Raises ReplayError when one was never planned.
    """
    if steps is None:
        return list(run.members)
    unknown = sorted(set(steps) - run.members.keys())
    if unknown:
        raise ReplayError(
            f"step {unknown[0]!r} was never planned: this run has {len(run.members)} planned steps, from 0"
        )
    return sorted(set(steps))


def spread(steps: Sequence[int]) -> Iterator[int]:
    """Yield the last, the first, then those in between by halving, so that any beginning covers the run."""
    if steps:
        yield steps[-1]
    if len(steps) > 1:
        yield steps[0]
    gaps = [(0, len(steps) - 1)]
    while gaps:
        halves = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                yield steps[middle]
                halves += [(low, middle), (middle, high)]
        gaps = halves
