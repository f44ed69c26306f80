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
from learner.visible import one_line, visible

QUESTION_WIDTH = 60
ANSWER_WIDTH = 14
METRICS_WIDTH = 78
HEAD_EVERY = 20
"""Rows of the table of steps between two heads."""
LONG_HEX = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b")
"""A digest or a revision, of which twelve digits tell enough to a person."""


class StepTable:
    """Tells committed steps as they come: rows of a table that fits 80 columns, or JSON lines."""

    def __init__(self, goal: int, *, quiet: bool = False, as_json: bool = False) -> None:
        self._goal = goal
        self._quiet, self._as_json = quiet, as_json
        self._rows = 0

    def __repr__(self) -> str:
        return f"<StepTable of {self._rows} rows, goal {self._goal}>"

    def tell(self, committed: StepCommitted) -> None:
        """Print one step; the head of the table before the first and again every HEAD_EVERY rows."""
        if self._as_json:
            sys.stdout.write(msgspec.json.encode(committed).decode() + "\n")
        elif not self._quiet:
            if self._rows % HEAD_EVERY == 0:
                sys.stdout.write(step_head(self._goal) + "\n")
            sys.stdout.write(step_row(committed, self._goal) + "\n")
        self._rows += 1
        sys.stdout.flush()


def _step_width(goal: int) -> int:
    return max(len(f"{goal}/{goal}"), len("step"))


def step_head(goal: int) -> str:
    """Return the head of the table of steps."""
    columns = "reward       EM   format  searches  no signal   datums  policy  seconds"
    return f"{'step':>{_step_width(goal)}}  {columns}"


def step_row(committed: StepCommitted, goal: int) -> str:
    """Return a step as a row under `step_head`."""
    metrics = committed.rollout_metrics
    datums = "skipped" if committed.skipped else f"{metrics.get('train/datums', 0.0):.0f}"
    return (
        f"{f'{committed.step}/{goal}':>{_step_width(goal)}}  "
        f"{metrics.get('reward/mean', 0.0):+6.3f}  "
        f"{100 * metrics.get('reward/correct', 0.0):5.1f} %  "
        f"{100 * metrics.get('reward/format', 0.0):5.1f} %  "
        f"{metrics.get('rollout/search_calls', 0.0):8.2f}  "
        f"{100 * metrics.get('rollout/degenerate_group_rate', 0.0):7.0f} %  "
        f"{datums:>7}  {f'v{committed.policy_version}':>6}  {committed.seconds.get('step', 0.0):7.1f}"
    )


def report_json(report: StepReport) -> str:
    """Return a report as one line of JSON."""
    return msgspec.json.encode(report).decode()


def report_lines(report: StepReport, *, whole: bool) -> list[str]:
    """Return a report as lines; `whole` adds what the step was made of, group by group, and its notes."""
    state = "" if report.committed else "  (planned, not committed)"
    state += "  (skipped: no signal)" if report.skipped else ""
    batch = f"  batch {report.batch_digest[:16]}" if report.batch_digest else ""
    lines = [f"step {report.step}: {verdict_of(report)}{batch}{state}"]
    if report.needs:
        lines.append(f"  {report.needs}")
    if whole and report.batch_digest:
        lines += _made_of(report)
    lines += [f"  {difference}" for difference in report.differences]
    if whole:
        lines += [f"  note: {_shortened(note)}" for note in report.notes]
    return [visible(line) for line in lines]


def note_lines(notes: Iterable[tuple[int, str]]) -> list[str]:
    """Return the notes of an audit, each (step, note), with the same words told once for all their steps."""
    steps: dict[str, list[int]] = {}
    for step, note in notes:
        steps.setdefault(_shortened(note), []).append(step)
    return [visible(f"note: {_span(listed)}: {note}") for note, listed in steps.items()]


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
    tokens = {f"tokens/{kind}": float(count) for kind, count in report.tokens.items()}
    micro = " + ".join(str(count) for count in report.micro_batches) or "none"
    lines = [
        (
            f"  estimator {report.estimator}, loss {report.loss}, rate {report.learning_rate:g}, "
            f"from policy v{report.policy_version}"
        ),
        f"  {len(report.groups)} groups, N = {report.members} members, datums per micro-batch: {micro}",
        *(f"  {line}" for line in metric_lines(tokens | report.metrics)),
    ]
    for group in report.groups:
        lines += _group_lines(group)
    return lines


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return metrics by family, a line or a few each: the family's name, then each member with its value.

    A member that is a number is an HTTP status.
    """
    families: dict[str, list[str]] = {}
    for key, value in metrics.items():
        family, _, member = key.rpartition("/")
        name = f"HTTP\u00a0{member}" if member.isdecimal() else member
        told = f"{value:.0f}" if float(value).is_integer() else f"{value:.6g}"
        families.setdefault(family, []).append(f"{name}\u00a0{told}")
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
    return [visible(line.replace("\u00a0", " ")) for line in lines]


def _group_lines(group: GroupLine) -> list[str]:
    lines = [
        f"  group {group.uid}  {one_line(group.question, QUESTION_WIDTH)}",
        (
            f"    {group.data_source} {group.example_id}  policy v{group.policy_version}  "
            f"staleness {group.staleness}"
        ),
        f"    temperature {group.temperature:g}  mean reward {group.mean:.6g}  std {group.std:.6g}",
    ]
    if group.members:
        lines.append(f"    scored by {group.members[0].scorer}")
        lines.append(
            f"    {'leaf':<9}  {'reward':>7}  {'advantage':>9}  {'outcome':<11}  turns  sampled  answer"
        )
    for member in group.members:
        answer = "–" if member.answer is None else one_line(member.answer, ANSWER_WIDTH)
        lines.append(
            f"    {f't{member.tree}/{member.leaf}':<9}  {member.reward:+7.4f}  {member.advantage:+9.6f}  "
            f"{member.outcome:<11}  {member.turns:>5}  {member.sampled_tokens:>7}  {answer}".rstrip()
        )
    return lines


def verdict_of(report: StepReport) -> str:
    """Return MATCH, MISMATCH, or NOT DERIVED where code is needed that the user has not allowed."""
    return "MATCH" if report.match else "NOT DERIVED" if report.needs else "MISMATCH"


def summary_line(verdicts: Sequence[str]) -> str:
    """Return the last line of an audit of several steps."""
    if not verdicts:
        return "no step is committed yet: nothing was replayed"
    bad = [f"{verdicts.count(one)} {one}" for one in ("MISMATCH", "NOT DERIVED") if one in verdicts]
    return f"{len(verdicts)} steps replayed: {', '.join(bad) or 'all MATCH'}"


def audit_status(verdicts: Sequence[str]) -> int:
    """Return an audit's exit status: 1 with a mismatch, 2 where only permissions are missing, else 0."""
    return 1 if "MISMATCH" in verdicts else 2 if "NOT DERIVED" in verdicts else 0


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
    return visible(f"{place}: recorded {change.recorded:+.4f} by {change.scorer}, now {now}")
