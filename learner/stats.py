"""Owns statistics over recorded groups: why answers are wrong, how stale groups were, what was spent."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from core.accounting import Cost, TreeBudget, call_budget, generated_budget, total_cost
from core.events import VOID_OUTCOMES, Outcome
from core.nodes import Node
from core.tree import Group, Trajectory, trajectories
from learner.batch import fold_bundle
from learner.lint import had_fault
from learner.metrics import component, search_calls
from learner.visible import visible
from store.log import Log
from store.ports import GroupFate

KINDS = (
    "tool_fault",
    "budget",
    "bad_format",
    "no_search",
    "never_retrieved",
    "retrieved_not_used",
)
"""Why a leaf is wrong; the first that applies."""

ADVICE = {
    "tool_fault": "a search on the path failed",
    "budget": "it ran out of turns, calls or tokens",
    "bad_format": "neither a valid call nor a valid answer",
    "no_search": "it answered without searching",
    "never_retrieved": "no result held a reference",
    "retrieved_not_used": "a result held a reference, the answer is another",
}

BUDGET = frozenset({Outcome.TOOL_LIMIT, Outcome.TURN_LIMIT, Outcome.TOKEN_LIMIT, Outcome.TRUNCATED})
SPACED_SCRIPTS = "\u0e00"
"""Below it the scripts that put spaces between words; from it on Thai, Chinese, Japanese and others."""
MAX_EXAMPLES = 3
ENDED = frozenset({GroupFate.CLOSED, GroupFate.PLANNED, GroupFate.TRAINED, GroupFate.DROPPED})


class ErrorKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of wrong leaf."""

    kind: str
    count: int
    share: float
    """Of the wrong leaves."""
    left_at: dict[int, int]
    """Depth of the turn after which a right sibling went another way → leaves; only trees have such turns."""
    examples: tuple[str, ...]


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why leaves are wrong."""

    leaves: int
    """Scored, void ones left out."""
    wrong: int
    kinds: tuple[ErrorKind, ...]


class StalenessReport(msgspec.Struct, frozen=True, kw_only=True):
    """How old trained groups were, in steps."""

    groups: dict[int, int]
    """Staleness → trained groups."""
    dropped: dict[str, int]
    """Reason → dropped groups."""
    tighter: dict[int, int]
    """A smaller max_staleness → trained groups that it would have kept out."""


class BudgetReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the rollouts cost, beside what their plan lets expect."""

    cost: Cost
    tokens: TreeBudget
    calls: TreeBudget


def groups_of(log: Log, first: int = 0) -> Iterator[Group]:
    """Yield every closed, planned, trained or dropped group from a ticket on, one at a time."""
    for row in log.group_rows(start_ticket=first):
        if row.fate in ENDED:
            yield fold_bundle(log.groups.fetch(row.uid))


def error_report(groups: Iterable[Group]) -> ErrorReport:
    """Return why scored leaves without an exact match are wrong; every leaf counts, chosen or not."""
    leaves = wrong = 0
    counts: Counter[str] = Counter()
    left_at: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}
    examples: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for group in groups:
        scored = [
            path
            for path in trajectories(group)
            if path.outcome not in VOID_OUTCOMES and path.reward is not None
        ]
        leaves += len(scored)
        right = [path for path in scored if is_right(path)]
        for path in scored:
            if is_right(path):
                continue
            wrong += 1
            kind = error_kind(path)
            counts[kind] += 1
            depth = left_right_path(path, right)
            if depth is not None:
                left_at[kind][depth] += 1
            if len(examples[kind]) < MAX_EXAMPLES:
                examples[kind].append(_example(path))
    return ErrorReport(
        leaves=leaves,
        wrong=wrong,
        kinds=tuple(
            ErrorKind(
                kind=kind,
                count=counts[kind],
                share=counts[kind] / wrong if wrong else 0.0,
                left_at=dict(sorted(left_at[kind].items())),
                examples=tuple(examples[kind]),
            )
            for kind in KINDS
        ),
    )


def is_right(path: Trajectory) -> bool:
    """Tell whether a leaf's answer is an exact match."""
    return component(path, "exact_match") >= 1.0


def error_kind(path: Trajectory) -> str:
    """Return why a wrong leaf is wrong; the first kind that applies."""
    if had_fault(path):
        return "tool_fault"
    if path.outcome in BUDGET:
        return "budget"
    if path.outcome is Outcome.BAD_FORMAT:
        return "bad_format"
    if search_calls(path) == 0:
        return "no_search"
    references = [plain(reference) for reference in path.group.asked.references]
    found = any(
        holds(plain(node.observation.content), reference)
        for node in path.path
        if node.observation is not None
        for reference in references
    )
    return "retrieved_not_used" if found else "never_retrieved"


def plain(text: str) -> str:
    """Return text for a search in it: composed, without case, each run of spaces one."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def holds(text: str, phrase: str) -> bool:
    """Tell whether a text holds a phrase as words of its own: "Ann" is in "Ann's", not in "Anne"."""
    start = text.find(phrase) if phrase else -1
    while start >= 0:
        end = start + len(phrase)
        if not _is_one_word(text[start - 1 : start], phrase[0]) and not _is_one_word(
            phrase[-1], text[end : end + 1]
        ):
            return True
        start = text.find(phrase, start + 1)
    return False


def _is_one_word(left: str, right: str) -> bool:
    """Tell whether two neighbours belong to one word, of a script that puts spaces between words."""
    return all(one.isalnum() and one < SPACED_SCRIPTS for one in (left, right))


def left_right_path(path: Trajectory, right: Sequence[Trajectory]) -> int | None:
    """Return how many turns a wrong leaf shares with the closest right leaf of its tree, None without one."""
    shared = [_shared(path.path, other.path) for other in right if other.tree == path.tree]
    return max(shared, default=None)


def _shared(left: Sequence[Node], right: Sequence[Node]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one.node != other.node:
            break
        count += 1
    return count


def _example(path: Trajectory) -> str:
    asked = path.group.asked
    answer = "no answer" if path.ended.answer is None else repr(path.ended.answer)
    expected = visible(" | ".join(asked.references))
    return f"{path.tree_uid}/{path.leaf}: {asked.question!r} → {answer}, expected {expected}"


def staleness_report(log: Log) -> StalenessReport:
    """Return the distribution of staleness, and what any tighter bound would have kept out."""
    ages: Counter[int] = Counter()
    dropped: Counter[str] = Counter()
    for row in log.group_rows():
        if row.fate == GroupFate.TRAINED and row.step is not None:
            ages[row.step - row.opened_at_step] += 1
        elif row.fate == GroupFate.DROPPED:
            dropped[row.reason] += 1
    highest = max(ages, default=0)
    return StalenessReport(
        groups=dict(sorted(ages.items())),
        dropped=dict(sorted(dropped.items())),
        tighter={bound: sum(count for age, count in ages.items() if age > bound) for bound in range(highest)},
    )


def budget_report(groups: Iterable[Group]) -> BudgetReport:
    """Return the cost of groups and the paper's budget beside it."""
    kept = list(groups)
    return BudgetReport(cost=total_cost(kept), tokens=generated_budget(kept), calls=call_budget(kept))


def error_lines(report: ErrorReport) -> list[str]:
    """Return the taxonomy for a terminal."""
    lines = [f"{report.wrong} of {report.leaves} scored leaves are wrong"]
    for kind in report.kinds:
        left = "".join(f"  {count} after {depth} shared turns" for depth, count in kind.left_at.items())
        lines.append(f"{kind.kind:<20} {kind.count:>6}  {100 * kind.share:5.1f} %  {ADVICE[kind.kind]}{left}")
        lines += [f"    {example}" for example in kind.examples]
    return lines


def staleness_lines(report: StalenessReport) -> list[str]:
    """Return the distribution for a terminal."""
    lines = [f"staleness {age}: {count} groups trained" for age, count in report.groups.items()]
    lines += [
        f"max_staleness {bound} would have kept {count} of them out"
        for bound, count in report.tighter.items()
    ]
    lines += [f"dropped, {reason}: {count}" for reason, count in report.dropped.items()]
    return lines or ["no group has been trained yet"]


def budget_facts(report: BudgetReport) -> dict[str, dict[str, float]]:
    """Return a budget report with every number under its name, for JSON."""
    return {
        "cost": report.cost._asdict(),
        "tokens_per_group": report.tokens._asdict(),
        "calls_per_group": report.calls._asdict(),
    }


def budget_lines(report: BudgetReport) -> list[str]:
    """Return the cost for a terminal; "paper" is M·B + L·N·B/2, "expected" counts every tree's expansions."""
    cost = report.cost
    tokens = f"{cost.generated} tokens generated, {cost.prefilled} read"
    counts = f"{cost.tool_calls} tool calls, {cost.requests} requests, {cost.leaves} leaves"
    lines = [f"{cost.groups} groups: {tokens}, {counts}"]
    for what, number in (("group", cost.groups), ("leaf", cost.leaves)):
        if number:
            each = f"{cost.generated / number:.1f} tokens and {cost.tool_calls / number:.2f} calls"
            lines.append(f"per {what} {each}")
    for unit, budget in (("tokens", report.tokens), ("calls", report.calls)):
        lines.append(
            f"{unit} per group: measured {budget.measured:.1f}, expected {budget.expected:.1f}, "
            f"paper {budget.paper:.1f}, one chain {budget.chain:.1f}"
        )
    return lines
