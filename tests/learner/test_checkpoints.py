"""The list of checkpoints: evaluations are held against each other only when they asked alike."""

from collections.abc import Callable
from pathlib import Path

from core.events import Evaluated
from learner.checkpoints import checkpoint_lines, list_checkpoints
from store.log import Log, open_log


def evaluate(log: Log, version: int, score: float, temperature: float, digest: str = "dev") -> None:
    """Record an evaluation of a policy version."""
    event = Evaluated(
        weights_uri="w",
        policy_version=version,
        set_digest=digest,
        settings={"temperature": temperature, "samples": 4},
        results=(),
        summary={"exact_match": score},
        name=f"{digest}-{version}-{temperature}",
    )
    log.journal.append_sync([event])


def test_the_best_is_chosen_among_evaluations_that_asked_alike(copy_of: Callable[[str], Path]) -> None:
    """A greedy score of the base, or one on other questions, is no rival of sampled ones on the dev set."""
    with open_log(copy_of("chains"), role="reader") as log:
        evaluate(log, 0, 1.0, temperature=0.0)
        evaluate(log, 2, 0.5, temperature=1.0)
        evaluate(log, 3, 0.4, temperature=1.0)
        evaluate(log, 3, 0.9, temperature=1.0, digest="test")
        lines = {line.step: line for line in list_checkpoints(log)}
        assert {step: line.evaluation for step, line in lines.items()} == {
            0: {},
            2: {"exact_match": 0.5},
            3: {"exact_match": 0.4},
        }
        assert [step for step, line in lines.items() if line.best] == [2]
        told = checkpoint_lines(list(lines.values()))
        assert [line.count("best") for line in told] == [0, 1, 0]
        evaluate(log, 3, 0.6, temperature=1.0)
        lines = {line.step: line for line in list_checkpoints(log)}
        assert lines[3].evaluation == {"exact_match": 0.6}, "the newest of the same way counts"
        assert lines[3].best
