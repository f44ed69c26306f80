"""Owns how steps and audits read in a terminal or as JSON lines; it computes nothing."""

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from core.events import StepCommitted
from learner.counterfactual import Counterfactual, RewardChange
from learner.replay import GroupLine, StepReport
from learner.visible import one_line

QUESTION_WIDTH = 72
ANSWER_WIDTH = 28
METRICS_WIDTH = 110
LONG_HEX = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
"""A digest or a revision, of which twelve digits tell enough to a person."""


def tell_step(committed: StepCommitted, goal: int, *, quiet: bool, as_json: bool) -> None:
    """Print one committed step, as a line for a person or as JSON."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(committed).decode() + "\n")
    elif not quiet:
        sys.stdout.write(step_line(committed, goal) + "\n")
    sys.stdout.flush()


def step_line(committed: StepCommitted, goal: int) -> str:
    """Return the dashboard line of a step."""
    metrics = committed.rollout_metrics
    parts = [
        f"step {committed.step:>4}/{goal}",
        f"reward {metrics.get('reward/mean', 0.0):+.3f}",
        f"EM {100 * metrics.get('reward/correct', 0.0):5.1f} %",
        f"format {100 * metrics.get('reward/format', 0.0):5.1f} %",
        f"searches {metrics.get('rollout/search_calls', 0.0):.2f}",
        f"no signal {100 * metrics.get('rollout/degenerate_group_rate', 0.0):3.0f} %",
    ]
    if committed.skipped:
        parts.append("skipped: no group carries a signal")
    else:
        parts += [
            f"{metrics.get('train/datums', 0.0):.0f} datums",
            f"in {metrics.get('train/micro_batches', 0.0):.0f} calls",
            f"→ policy {committed.policy_version}",
        ]
    parts.append(f"{committed.seconds.get('step', 0.0):.1f} s")
    return "  ".join(parts)


def report_json(report: StepReport) -> str:
    """Return a report as one line of JSON."""
    return msgspec.json.encode(report).decode()


def report_lines(report: StepReport, *, whole: bool) -> list[str]:
    """Return a report as lines; `whole` adds what the step was made of, group by group, and its notes."""
    verdict = "MATCH" if report.match else "MISMATCH"
    state = "" if report.committed else "  (planned, not committed)"
    state += "  (skipped: no signal)" if report.skipped else ""
    lines = [f"step {report.step}: {verdict}  batch {report.batch_digest[:16]}{state}"]
    if whole:
        lines += _made_of(report)
    lines += [f"  {difference}" for difference in report.differences]
    if whole:
        lines += [f"  note: {_shortened(note)}" for note in report.notes]
    return lines


def note_lines(notes: Iterable[tuple[int, str]]) -> list[str]:
    """Return the notes of an audit, each (step, note), with the same words told once for all their steps."""
    steps: dict[str, list[int]] = {}
    for step, note in notes:
        steps.setdefault(_shortened(note), []).append(step)
    return [f"note: {_span(listed)}: {note}" for note, listed in steps.items()]


def _shortened(note: str) -> str:
    return LONG_HEX.sub(r"\1", note)


def _span(steps: Sequence[int]) -> str:
    """Return ascending steps in words: step 3, steps 0–29, steps 0–4, 7, 9–11."""
    cuts = [
        0,
        *(place for place, (left, right) in enumerate(pairwise(steps), 1) if right != left + 1),
        len(steps),
    ]
    runs = [(steps[start], steps[stop - 1]) for start, stop in pairwise(cuts)]
    spans = ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in runs)
    return f"step{'s' if len(steps) > 1 else ''} {spans}"


def _made_of(report: StepReport) -> list[str]:
    tokens = "  ".join(f"{kind} {count}" for kind, count in report.tokens.items())
    micro = " + ".join(str(count) for count in report.micro_batches) or "none"
    lines = [
        (
            f"  estimator {report.estimator}, loss {report.loss}, learning rate {report.learning_rate:g}, "
            f"from policy version {report.policy_version}"
        ),
        f"  {len(report.groups)} groups, N = {report.members} members, datums per micro-batch: {micro}",
        f"  tokens: {tokens}",
        *(f"  {line}" for line in metric_lines(report.metrics)),
    ]
    for group in report.groups:
        lines += _group_lines(group)
    return lines


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return metrics by family, a line or a few each: the family's name, then each member with its value."""
    families: dict[str, list[str]] = {}
    for name, value in metrics.items():
        family, _, member = name.rpartition("/")
        families.setdefault(family, []).append(f"{member}\u00a0{value:.6g}")
    width = max(map(len, families), default=0) + 2
    lines = [
        line
        for family, members in families.items()
        for line in textwrap.wrap(
            "  ".join(members),
            METRICS_WIDTH,
            initial_indent=f"{family:<{width}}",
            subsequent_indent=" " * width,
            break_on_hyphens=False,
            break_long_words=False,
        )
    ]
    return [line.replace("\u00a0", " ") for line in lines]


def _group_lines(group: GroupLine) -> list[str]:
    lines = [
        f"  group {group.uid}  {one_line(group.question, QUESTION_WIDTH)}",
        (
            f"    {group.data_source} {group.example_id}  policy {group.policy_version}  "
            f"staleness {group.staleness}  temperature {group.temperature:g}  "
            f"mean reward {group.mean:.6g}  std {group.std:.6g}"
        ),
    ]
    if group.members:
        lines.append(f"    scored by {group.members[0].scorer}")
    for member in group.members:
        answer = "–" if member.answer is None else one_line(member.answer, ANSWER_WIDTH)
        lines.append(
            f"    t{member.tree}/{member.leaf}  reward {member.reward:+.4f}  "
            f"advantage {member.advantage:+.6f}  {member.outcome:<11} {answer:<{ANSWER_WIDTH}} "
            f"{member.turns} turns, {member.sampled_tokens} sampled"
        )
    return lines


def summary_line(reports: Sequence[bool]) -> str:
    """Return the last line of an audit of several steps."""
    if not reports:
        return "no step is committed yet: nothing was replayed"
    good = sum(reports)
    verdict = "all MATCH" if good == len(reports) else f"{len(reports) - good} MISMATCH"
    return f"{len(reports)} steps replayed: {verdict}"


def counterfactual_lines(found: Counterfactual) -> list[str]:
    """Return, leaf by leaf, what another estimator would have made of a step."""
    related = "–" if found.correlation is None else f"{found.correlation:.4f}"
    ratio = "–" if found.norm_ratio is None else f"{found.norm_ratio:.4f}"
    summary = f"correlation {related}, norm ratio {ratio}, {found.flips} sign flips"
    lines = [f"step {found.step}: {found.other} instead of {found.recorded}: {summary}"]
    if found.gained:
        lines.append(f"  groups that would gain a signal: {', '.join(found.gained)}")
    if found.lost:
        lines.append(f"  groups that would lose theirs: {', '.join(found.lost)}")
    lines += [
        f"  {leaf.uid}/t{leaf.tree}/{leaf.leaf}  reward {leaf.reward:+.4f}  {found.recorded} "
        f"{leaf.recorded:+.6f}  {found.other} {leaf.other:+.6f}{'  sign flipped' if leaf.flipped else ''}"
        for leaf in found.leaves
    ]
    return lines


def rescored_line(change: RewardChange) -> str:
    """Return one reward that would be another today."""
    now = change.error or f"{change.rescored:+.4f}"
    place = f"{change.uid}/t{change.tree}/{change.leaf}"
    return f"{place}: recorded {change.recorded:+.4f} by {change.scorer}, now {now}"
