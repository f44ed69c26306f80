"""Owns pictures of evaluations (PNG), with the optional matplotlib."""

from pathlib import Path

from core.errors import ConfigError
from rollout.comparing import EvalComparison


def draw_evaluations(found: EvalComparison, out: Path) -> None:
    """Write macro exact match, with its intervals, and format rate per evaluation.

    Raises ConfigError when matplotlib is not installed or `out` cannot be written.
    """
    try:
        # An optional extra: everything else works without it.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install 'rolltape[plot]'") from error
    figure = Figure(figsize=(1.6 + 1.4 * len(found.rows), 4), layout="constrained")
    axes = figure.subplots()
    places = range(len(found.rows))
    values = [100 * row.macro_em.value for row in found.rows]
    spread = [
        [value - 100 * row.macro_em.low for value, row in zip(values, found.rows, strict=True)],
        [100 * row.macro_em.high - value for value, row in zip(values, found.rows, strict=True)],
    ]
    axes.bar([place - 0.2 for place in places], values, 0.4, yerr=spread, capsize=4, label="macro EM")
    axes.bar([place + 0.2 for place in places], [100 * row.format for row in found.rows], 0.4, label="format")
    axes.set_xticks(list(places), [row.name for row in found.rows])
    axes.set_ylim(0, 105)
    axes.set_ylabel(f"percent of {found.questions} questions")
    axes.legend()
    try:
        figure.savefig(out, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {str(out)!r}: {error}") from error
