"""Owns audits by several processes: each opens the log for itself; reports come back in step order."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from learner.difference import Decode
from learner.fingerprints import code_fingerprints
from learner.rebuild import CodeLoader
from learner.replay import Auditor, StepReport, audit_step, replay_steps
from store.log import Log, open_log

MakeLoader = Callable[[Sequence[str]], CodeLoader]


class Means(NamedTuple):
    """What an audit needs besides the steps; `make_loader` must be importable by a new process."""

    make_loader: MakeLoader
    allow_code: tuple[str, ...]
    decode: Decode


def audit(log: Log, steps: Sequence[int], means: Means, jobs: int) -> Iterator[StepReport]:
    """Yield the reports of `steps` in order, made by `jobs` processes; raises StoreError.

    Spelling tokens is left to this process, so the others start without a tokenizer.
    """
    auditor = Auditor(log, code_fingerprints(), means.make_loader(means.allow_code), means.decode)
    if jobs == 1 or len(steps) < 2:
        yield from replay_steps(auditor, steps)
        return
    setup = (log.run_dir, means.make_loader, means.allow_code)
    context = get_context("spawn")  # an LMDB environment must not cross a fork
    with ProcessPoolExecutor(min(jobs, len(steps)), context, _open_here, setup) as pool:
        for step, report in zip(steps, pool.map(_replay_here, steps), strict=True):
            yield report if report.match or report.needs else audit_step(auditor, step)


_here: list[Auditor] = []
"""The auditor of a worker process, which lives as long as the process."""


def _open_here(run_dir: Path, make_loader: MakeLoader, allow_code: Sequence[str]) -> None:
    log = open_log(run_dir, readonly=True)
    _here.append(Auditor(log, code_fingerprints(), make_loader(allow_code)))


def _replay_here(step: int) -> StepReport:
    return audit_step(_here[0], step)
