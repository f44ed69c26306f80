"""Owns what is told of the experiment: tables and pictures, from the results file into the page."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.experiment_plan import BASE, ESTIMATORS, MARKS, SWEEP, Arm

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""Student's t at 0.975 for 1 to 14 degrees of freedom."""
GROUPS_PER_STEP = 8
PAIRS: tuple[tuple[Arm, Arm], ...] = (SWEEP[0], (ESTIMATORS[0], ESTIMATORS[1]), *SWEEP[1:])
"""Chains and trees of the sweep, by budget."""

CONTRASTS = (
    ("trees for chains, normalised by std", "tree, inter only", "chain GRPO"),
    ("trees for chains, not normalised", "tree, node", "chain group mean"),
    ("normalising by std, chains", "chain GRPO", "chain group mean"),
    ("intra-tree part added", "tree", "tree, inter only"),
    ("inter-tree part added", "tree", "tree, intra only"),
)
"""What changes, the arm with it, the arm without."""

Row = dict[str, Any]


class Spread(NamedTuple):
    """A mean over seeds."""

    mean: float
    sd: float
    half: float
    """Half of the 95 % t interval."""
    seeds: int

    def text(self, scale: float = 100.0) -> str:
        """Return "mean ± half"."""
        return f"{scale * self.mean:.1f} ± {scale * self.half:.1f}"

    def signed(self) -> str:
        """Return "+mean ± half" in points."""
        return f"{100 * self.mean:+.1f} ± {100 * self.half:.1f}"


def spread(values: Sequence[float]) -> Spread:
    """Return mean, sample sd and t interval; raises ValueError for fewer than 2 or more than 15 values."""
    if not 2 <= len(values) <= len(T_975) + 1:
        raise ValueError(f"{len(values)} seeds: expected 2 to {len(T_975) + 1}")
    sd = statistics.stdev(values)
    half = T_975[len(values) - 2] * sd / math.sqrt(len(values))
    return Spread(statistics.fmean(values), sd, half, len(values))


class Results:
    """The rows of a results file."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def of(self, arm: Arm, mark: int) -> dict[int, Row]:
        """Return an arm's rows at a mark, by seed."""
        found = {row["seed"]: row for row in self.rows if (row["arm"], row["mark"]) == (arm.name, mark)}
        return dict(sorted(found.items()))

    def spread(self, arm: Arm, mark: int, name: str = "exact_match") -> Spread:
        """Return the spread of a number over an arm's seeds."""
        return spread([row[name] for row in self.of(arm, mark).values()])

    def difference(self, arm: Arm, other: Arm, mark: int) -> Spread:
        """Return the spread of the differences arm − other in exact match, paired by seed."""
        left, right = self.of(arm, mark), self.of(other, mark)
        return spread([left[s]["exact_match"] - right[s]["exact_match"] for s in left if s in right])

    def mean(self, arm: Arm, mark: int, name: str) -> float:
        """Return the mean of a number over an arm's seeds."""
        return statistics.fmean(row[name] for row in self.of(arm, mark).values())


def read_results(results: Path) -> Results:
    """Return the rows of a results file."""
    return Results([json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()])


def make_tables(results: Path) -> dict[str, str]:
    """Return the tables by the name of their place in the page."""
    found = read_results(results)
    return {
        "estimators": estimator_tables(found),
        "contrasts": contrast_table(found),
        "signal": signal_table(found),
        "sweep": sweep_table(found),
        "budgets": budget_table(found),
        "provenance": provenance(found.rows),
    }


def write_report(results: Path, tables: dict[str, str], page: Path) -> None:
    """Put the tables into the page's marked places, and draw the pictures; raises ValueError."""
    text = page.read_text(encoding="utf-8")
    for name, body in tables.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_end:
            raise ValueError(f"{str(page)!r} has no place {begin!r} … {end!r}: add one")
        text = f"{before}{begin}{body}\n{end}{after}"
    page.write_text(text, encoding="utf-8")
    found = read_results(results)
    draw_estimators(found, page.parent / "images" / "experiments-estimators.png")
    draw_sweep(found, page.parent / "images" / "experiments-sweep.png")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def estimator_tables(found: Results) -> str:
    """Return held-out exact match per arm, one table per mark, with the base model."""
    base = [
        f"{found.spread(BASE, 0, name).text()}" for name in ("exact_match", "em_1hop", "em_2hop", "em_3hop")
    ]
    texts = [f"Base model: {base[0]} (1 hop {base[1]}, 2 hops {base[2]}, 3 hops {base[3]})."]
    chain = ESTIMATORS[0]
    for mark in MARKS:
        rows = []
        for arm in ESTIMATORS:
            em = found.spread(arm, mark)
            hops = [f"{100 * found.mean(arm, mark, f'em_{hops}hop'):.1f}" for hops in (1, 2, 3)]
            against = "" if arm is chain else found.difference(arm, chain, mark).signed()
            counts = [f"{found.mean(arm, mark, name):,.0f}" for name in ("generated", "steps")]
            rows.append([arm.name, str(em.seeds), *counts, em.text(), f"{100 * em.sd:.1f}", against, *hops])
        head = ("arm", "seeds", "tokens", "steps", "EM, %", "sd", "minus chain GRPO", "1 hop", "2", "3")
        texts.append(f"After {mark:,} generated tokens:\n\n{table(head, rows)}")
    return "\n\n".join(texts)


def contrast_table(found: Results) -> str:
    """Return differences that answer one question each, paired by seed, at both marks."""
    arms = {arm.name: arm for arm in ESTIMATORS}
    rows = []
    for title, left, right in CONTRASTS:
        ems = [found.difference(arms[left], arms[right], mark).signed() for mark in MARKS]
        rows.append([title, f"{left} − {right}", *ems])
    return table(("what changes", "arms", *(f"points at {mark:,} tokens" for mark in MARKS)), rows)


def signal_table(found: Results) -> str:
    """Return what trained: groups and trees without signal, members, tokens trained and tool calls."""
    mark = MARKS[-1]
    rows = []
    for arm in ESTIMATORS:
        shares = [
            f"{100 * found.mean(arm, mark, name):.0f} %"
            for name in ("no_signal", "tree_zero_std", "saved_by_sharing")
        ]
        if arm.tree is None:
            shares[1:] = ["", ""]
        counts = [
            f"{found.mean(arm, mark, name):,.0f}"
            for name in ("members_per_step", "tool_calls", "trained_tokens")
        ]
        rows.append([arm.name, *shares, *counts])
    head = (
        *("arm", "groups without signal", "trees without signal", "generation saved by sharing"),
        *("members a step", "tool calls", "tokens trained"),
    )
    return table(head, rows)


def measured_pairs(found: Results) -> list[tuple[Arm, Arm]]:
    """Return the pairs of the sweep of which both arms have at least two seeds."""
    return [pair for pair in PAIRS if min(len(found.of(arm, mark_of(pair[0]))) for arm in pair) > 1]


def sweep_table(found: Results) -> str:
    """Return held-out exact match of chains beside trees, per budget."""
    rows = []
    for chain, tree in measured_pairs(found):
        mark = mark_of(chain)
        left, right = found.spread(chain, mark), found.spread(tree, mark)
        steps = "/".join(f"{found.mean(arm, mark, 'steps'):.0f}" for arm in (chain, tree))
        tokens = " / ".join(f"{found.mean(arm, mark, 'generated'):,.0f}" for arm in (chain, tree))
        seeds = str(min(left.seeds, right.seeds))
        against = found.difference(tree, chain, mark).signed()
        shape = [str(chain.chains), f"{tree.tree}"]
        rows.append([*shape, tokens, steps, seeds, left.text(), right.text(), against])
    head = (
        *("chains", "(M, N, L)", "tokens, chains / trees", "steps", "seeds"),
        *("chain GRPO, EM %", "tree, EM %", "tree minus chain"),
    )
    return table(head, rows)


def budget_table(found: Results) -> str:
    """Return the formula beside what was measured, per group, in tokens and in tool calls."""
    rows = []
    for pair in measured_pairs(found):
        for arm in pair:
            mark = mark_of(pair[0])
            leaves = found.mean(arm, mark, "members_per_step") / GROUPS_PER_STEP
            units = [
                f"{found.mean(arm, mark, f'{unit}_{name}'):.1f}"
                for unit in ("tokens", "calls")
                for name in ("chain", "paper", "expected", "measured")
            ]
            rows.append([f"{arm.tree}" if arm.tree else f"{arm.chains} chains", f"{leaves:.1f}", *units])
    named = ("B", "printed", "all trees", "measured")
    head = ("group", "leaves", *(f"{unit}: {name}" for unit in ("tokens", "calls") for name in named))
    return table(head, rows)


def mark_of(chain: Arm) -> int:
    """Return the generated tokens at which a pair of the sweep is compared."""
    return MARKS[0] // ESTIMATORS[0].chains * chain.chains


def provenance(rows: Sequence[Row]) -> str:
    """Return where the numbers come from."""
    dates = sorted(row["date"] for row in rows)
    seeds = sorted({row["seed"] for row in rows})
    commits = ", ".join(f"`{name[:12]}`" for name in sorted({row["git"] for row in rows}))
    bases = ", ".join(f"`{name[:16]}`" for name in sorted({row["base_model"] for row in rows}))
    last = {row["cell"]: row for row in rows}
    seconds = sum(row["eval_seconds"] for row in rows) + sum(row["train_seconds"] for row in last.values())
    return "\n".join(
        (
            f"- {len(last)} runs, {len(rows)} evaluations; seeds {', '.join(map(str, seeds))}.",
            f"- Run from {dates[0]} to {dates[-1]} UTC, two at a time, {seconds / 3600:.1f} hours in all.",
            "- Two cores shared with other work, one BLAS thread.",
            f"- Commit {commits}; base model {bases}.",
        )
    )


def draw_estimators(found: Results, out: Path) -> None:
    """Draw every seed, the mean and its interval, per arm and mark."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, mark in zip(figure.subplots(1, len(MARKS), sharey=True), MARKS, strict=True):
        for height, arm in enumerate(reversed(ESTIMATORS)):
            found_rows = found.of(arm, mark).values()
            em = found.spread(arm, mark)
            axes.plot([100 * row["exact_match"] for row in found_rows], [height] * em.seeds, "o", color="0.7")
            axes.errorbar(100 * em.mean, height, xerr=100 * em.half, fmt="o", color="C0", capsize=3)
        axes.set_yticks(range(len(ESTIMATORS)), [arm.name for arm in reversed(ESTIMATORS)])
        axes.set_title(f"{mark:,} generated tokens")
        axes.set_xlabel("held-out exact match, %")
        axes.grid(axis="x", alpha=0.3)
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, dpi=120)


def draw_sweep(found: Results, out: Path) -> None:
    """Draw chains and trees over the group's budget."""
    pairs = measured_pairs(found)
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(("chain GRPO", "tree")):
        where = [position + 0.1 * (place - 0.5) for position in range(len(pairs))]
        ems = [found.spread(pair[place], mark_of(pair[0])) for pair in pairs]
        means, halves = [100 * em.mean for em in ems], [100 * em.half for em in ems]
        axes.errorbar(where, means, halves, fmt="o-", capsize=3, label=name)
    axes.set_xticks(range(len(pairs)), [f"{chain.chains} chains\n{tree.tree}" for chain, tree in pairs])
    axes.set_ylabel("held-out exact match, %")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)
