"""Owns `lint`: what has bitten others, looked for in a run's recorded groups and steps.

Each check counts what it saw and what is wrong, keeps a few examples, and says what to do. Nothing is
changed. A finding is a reason to look, not a proof of a fault.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from core.arrays import view_logprobs, view_tokens
from core.closing import ALL_VOID
from core.errors import RolltapeError
from core.events import Outcome
from core.nodes import Node
from core.tree import Trajectory, trajectories
from learner.batch import Taken, members_of, take
from learner.counterfactual import AGREEMENT, Rescore
from learner.metrics import SEARCH, component, reward_of
from learner.rebuild import CodeLoader, committed_event, no_code, planned_event, rebuild
from learner.selection import NO_SIGNAL, RUN_ENDED
from learner.visible import visible
from store.log import Log
from store.ports import GroupFate, GroupRow

MAX_EXAMPLES = 3
TINY_STD = 1e-3
HUGE_ADVANTAGE = 10.0
LOW_LOGPROB = -50.0
GAP = 0.02
FAULT_EFFECT = 0.1
"""Difference of mean reward, with and without a search fault, from which the two are called related."""
FEWEST = 8
"""Trajectories on either side before that is said."""

ADVICE = {
    "observation_in_loss": "an observation is trained on: this must never happen, report it as a bug",
    "prefix_break": "the chat template rewrites history: earlier turns are trained only in their own segment",
    "unknown_token": "the tokenizer cannot spell these tokens: check that it belongs to the model",
    "example_collision": "two questions share an id: make ids unique across data sets with `prepare`",
    "singleton_group": "a baseline of one trajectory says nothing: raise min_group or group_size",
    "no_signal": "equal rewards carry no signal: easier or harder questions, or learner.dynamic_sampling",
    "tiny_std": "nearly equal rewards are blown up by z-scores: prefer group_mean, or coarser rewards",
    "huge_advantage": "one trajectory outweighs the batch: look at its reward and at the estimator",
    "bad_logprob": "a sampled logprob that no policy gives: the sampler is at fault",
    "search_fault_reward": "search faults and reward go together: the policy is blamed for the back-end",
    "truncated": "answers are cut: raise max_assistant_tokens or max_trajectory_tokens",
    "reward_unsupported": "the recorded text does not support the reward: rescore, or look at the scorer",
    "all_void": "questions whose every attempt was void: look at the search back-end",
    "logprob_drift": "sampler and trainer disagree on fresh groups: it does not sample the trained weights",
    "unreadable": "groups whose records are damaged or contradict each other: run `verify`",
    "not_derived": "steps that cannot be made again: `replay` them, and name user code with --allow-code",
    "dropped": "groups were left out of training, which can bias it: see the reasons",
}


TOLERATED = {"no_signal": 0.5}
"""Share up to which a healthy run has it: questions that are always, or not yet ever, answered right."""


class LintFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of problem in a run."""

    name: str
    count: int
    examined: int
    share: float
    examples: tuple[str, ...]
    advice: str


class Tally:
    """Counts per check, with the first few examples."""

    def __init__(self) -> None:
        self._examined: dict[str, int] = dict.fromkeys(ADVICE, 0)
        self._count: dict[str, int] = dict.fromkeys(ADVICE, 0)
        self._examples: dict[str, list[str]] = {name: [] for name in ADVICE}

    def __repr__(self) -> str:
        return f"<Tally {sum(self._count.values())} found>"

    def see(self, name: str, wrong: bool | np.bool_, example: Callable[[], str]) -> None:
        """Count one look at something, and what is wrong with it."""
        self._examined[name] += 1
        if wrong:
            self._count[name] += 1
            if len(self._examples[name]) < MAX_EXAMPLES:
                self._examples[name].append(example())

    def findings(self) -> list[LintFinding]:
        """Return what was found, in the order of the checks."""
        return [
            LintFinding(
                name=name,
                count=count,
                examined=self._examined[name],
                share=count / self._examined[name],
                examples=tuple(self._examples[name]),
                advice=ADVICE[name],
            )
            for name, count in self._count.items()
            if count and count / self._examined[name] > TOLERATED.get(name, 0.0)
        ]


class Linter(NamedTuple):
    """What a lint may use besides the log."""

    unknown_tokens: frozenset[int] = frozenset()
    """Token ids that stand for text the tokenizer cannot spell."""
    rescore: Rescore | None = None
    load: CodeLoader = no_code


def lint(log: Log, linter: Linter | None = None) -> list[LintFinding]:
    """Return what is suspicious in a run; reads one group or step at a time."""
    linter = linter or Linter()
    tally = Tally()
    questions: dict[str, tuple[str, str]] = {}
    faulty: list[tuple[bool, float]] = []
    for row in log.group_rows():
        _row(row, tally)
        if row.fate in {GroupFate.CLOSED, GroupFate.PLANNED, GroupFate.TRAINED, GroupFate.DROPPED}:
            faulty += _readable(log, row, questions, linter, tally)
    _faults(faulty, tally)
    for step in range(log.state().committed_steps):
        _step(log, step, linter, tally)
    return tally.findings()


def _readable(
    log: Log, row: GroupRow, questions: dict[str, tuple[str, str]], linter: Linter, tally: Tally
) -> list[tuple[bool, float]]:
    """Look at one ended group; return of each member whether it had a search fault, and its reward."""
    try:
        taken = take(row, log.groups.fetch(row.uid))
        found = members_of(taken)
    except RolltapeError as exc:
        problem = str(exc)
        tally.see("unreadable", wrong=True, example=lambda: f"{row.uid}: {problem}")
        return []
    tally.see("unreadable", wrong=False, example=str)
    _group(taken, found, questions, linter, tally)
    return [(had_fault(member), reward_of(member)) for member in found]


def _row(row: GroupRow, tally: Tally) -> None:
    left_out = row.fate == GroupFate.DROPPED and row.reason not in {RUN_ENDED, NO_SIGNAL}
    tally.see("dropped", left_out, lambda: f"{row.uid}: {row.reason}")
    void = row.fate == GroupFate.ABORTED and row.reason.startswith(ALL_VOID)
    tally.see("all_void", void, lambda: f"{row.uid}: {row.reason}")


def _group(
    taken: Taken,
    found: Sequence[Trajectory],
    questions: dict[str, tuple[str, str]],
    linter: Linter,
    tally: Tally,
) -> None:
    group = taken.group
    asked = group.asked
    known = questions.setdefault(asked.example_id, (asked.data_source, asked.question))
    tally.see(
        "example_collision",
        known != (asked.data_source, asked.question),
        lambda: f"{asked.uid}: {asked.example_id!r} is also {known[1]!r}",
    )
    rewards = [reward_of(member) for member in found]
    tally.see("singleton_group", len(rewards) == 1, lambda: asked.uid)
    tally.see(
        "no_signal", len(set(rewards)) <= 1, lambda: f"{asked.uid}: all {rewards[0] if rewards else None!r}"
    )
    spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    tally.see("tiny_std", 0 < spread < TINY_STD, lambda: f"{asked.uid}: std {spread:.3g}")
    for tree in group.trees.values():
        for node in tree.nodes.values():
            _node(f"{asked.uid}/t{tree.index}", node, linter, tally)
    for ended in trajectories(group):
        _ended(ended, linter, tally)


def _node(where: str, node: Node, linter: Linter, tally: Tally) -> None:
    place = f"{where}/{node.node}"
    logprobs = view_logprobs(node.sample.sampled_logprobs)
    bad = ~np.isfinite(logprobs) | (logprobs > 0) | (logprobs < LOW_LOGPROB)
    tally.see("bad_logprob", bad.any(), lambda: f"{place}: {float(logprobs[int(np.argmax(bad))])!r}")
    unknown = linter.unknown_tokens & set(view_tokens(node.sample.tokens).tolist())
    spelled = bool(unknown) or "\ufffd" in node.sample.text
    tally.see("unknown_token", spelled, lambda: f"{place}: {node.sample.text[:60]!r}")
    if node.observation is not None:
        tally.see("prefix_break", node.observation.prompt_reset is not None, lambda: place)


def _ended(ended: Trajectory, linter: Linter, tally: Tally) -> None:
    place = f"{ended.tree_uid}/{ended.leaf}"
    cut = ended.outcome in {Outcome.TRUNCATED, Outcome.TOKEN_LIMIT}
    tally.see("truncated", cut, lambda: f"{place}: {ended.outcome.value}")
    if ended.reward is None:
        return
    tally.see("reward_unsupported", *_unsupported(ended, place, linter.rescore))


def _unsupported(ended: Trajectory, place: str, score: Rescore | None) -> tuple[bool, Callable[[], str]]:
    """Tell whether the recorded reward contradicts the recorded text, and how."""
    assert ended.reward is not None
    recorded = ended.reward
    if score is not None:
        try:
            now = score(ended)
        except RolltapeError as exc:
            problem = str(exc)
            return True, lambda: f"{place}: {problem}"
        return abs(now - recorded) > AGREEMENT, lambda: f"{place}: recorded {recorded!r}, scored now {now!r}"
    right = component(ended, "exact_match") >= 1.0
    wrong = right and (ended.ended.answer is None or ended.outcome is not Outcome.ANSWERED)
    return wrong, lambda: f"{place}: exact match, but the outcome is {ended.outcome.value}"


def had_fault(member: Trajectory) -> bool:
    """Tell whether a search on the path failed."""
    return any(
        node.observation is not None
        and not node.observation.ok
        and node.tool_call is not None
        and node.tool_call.tool == SEARCH
        for node in member.path
    )


def _faults(faulty: Iterable[tuple[bool, float]], tally: Tally) -> None:
    listed = list(faulty)
    hit = [reward for fault, reward in listed if fault]
    rest = [reward for fault, reward in listed if not fault]
    if min(len(hit), len(rest)) < FEWEST:
        return
    gap = statistics.fmean(hit) - statistics.fmean(rest)
    tally.see(
        "search_fault_reward",
        abs(gap) > FAULT_EFFECT,
        lambda: (
            f"mean reward {gap:+.3f} over {len(hit)} trajectories with a fault, beside {len(rest)} without"
        ),
    )


def _step(log: Log, step: int, linter: Linter, tally: Tally) -> None:
    try:
        planned, committed = planned_event(log, step), committed_event(log, step)
        batch = rebuild(log, planned, linter.load).batch
    except RolltapeError as exc:
        problem = str(exc)
        tally.see("not_derived", wrong=True, example=lambda: f"step {step}: {problem}")
        return
    tally.see("not_derived", wrong=False, example=str)
    assert committed is not None
    gap = committed.trainer_metrics.get("trainer/logprob_gap", 0.0)
    fresh = committed.rollout_metrics.get("staleness/max", 0.0) == 0
    tally.see("logprob_drift", fresh and gap > GAP, lambda: f"step {step}: {gap:.4f}")
    for position, advantage in enumerate(batch.advantages.leaf.tolist()):
        member = batch.members[position]
        tally.see(
            "huge_advantage",
            abs(advantage) > HUGE_ADVANTAGE,
            lambda member=member, advantage=advantage: (  # type: ignore[misc]
                f"step {step} {member.tree_uid}/{member.leaf}: {advantage:+.3g}"
            ),
        )
    for key, segment, datum in zip(batch.keys, batch.segments, batch.datums, strict=True):
        given = ~segment.sampled[1:]
        wrong = bool((datum.advantages[given] != 0).any() or (datum.logprobs[given] != 0).any())
        tally.see("observation_in_loss", wrong, lambda key=key: f"step {step} {key}")  # type: ignore[misc]


def lint_lines(findings: Iterable[LintFinding]) -> list[str]:
    """Return the findings for a terminal."""
    lines: list[str] = []
    for finding in findings:
        share = f"{finding.count} of {finding.examined} ({100 * finding.share:.1f} %)"
        lines.append(f"{finding.name}: {share}. {finding.advice}")
        lines += [f"    {visible(example)}" for example in finding.examples]
    return lines or ["nothing suspicious was found"]
