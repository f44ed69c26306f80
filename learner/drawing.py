"""Owns pictures of comparisons (PNG), with the optional matplotlib."""

from pathlib import Path

from core.errors import ConfigError
from learner.compare import CompareReport


def draw_comparison(report: CompareReport, out: Path) -> None:
    """Write, per estimator and step, the correlation with the reference and the share of silent groups.

    Raises ConfigError when matplotlib is not installed or `out` cannot be written.
    """
    try:
        # An optional extra: everything else works without it.
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("--png needs matplotlib: pip install 'rolltape[plot]'") from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    related, silent = figure.subplots(2, 1, sharex=True)
    names = list(dict.fromkeys(row.estimator for row in report.overall))
    for name in names:
        rows = [(step.step, row) for step in report.steps for row in step.rows if row.estimator == name]
        steps = [step for step, _ in rows]
        related.plot(
            steps,
            [float("nan") if row.correlation is None else row.correlation for _, row in rows],
            marker=".",
            label=name,
        )
        silent.plot(steps, [row.zero_groups / row.groups for _, row in rows], marker=".", label=name)
    related.set_ylabel(f"correlation with {report.reference}")
    silent.set_ylabel("groups without signal")
    silent.set_xlabel("step")
    related.legend()
    try:
        figure.savefig(out, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {str(out)!r}: {error}") from error
