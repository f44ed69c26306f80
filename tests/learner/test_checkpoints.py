"""The list of checkpoints: evaluations are held against each other only when they asked alike."""

from collections.abc import Callable
from pathlib import Path

from core.events import Evaluated
from learner.checkpoints import checkpoint_lines, list_checkpoints
from learner.evaluations import Way, what_differs
from learner.goal import record_goal
from learner.history import History
from learner.points import evaluation_name
from store.log import Log, open_log


def evaluate(
    log: Log, version: int, score: float, temperature: float, digest: str = "dev", name: str = ""
) -> None:
    """Record an evaluation of a policy version."""
    event = Evaluated(
        weights_uri="w",
        policy_version=version,
        set_digest=digest,
        settings={"temperature": temperature, "samples": 4},
        results=(),
        summary={"exact_match": score},
        name=name or f"{digest}-{version}-{temperature}",
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


def test_of_ways_asked_as_often_the_first_counts(copy_of: Callable[[str], Path]) -> None:
    """A control evaluation beside the usual one, a search that returns nothing, decides nothing."""
    with open_log(copy_of("chains"), role="reader") as log:
        for version, usual, control in ((0, 0.3, 0.02), (3, 0.9, 0.01)):
            evaluate(log, version, usual, temperature=1.0)
            evaluate(log, version, control, temperature=0.5)
        lines = {line.step: line for line in list_checkpoints(log)}
    assert [step for step, line in lines.items() if line.best] == [3]
    assert lines[3].evaluation == {"exact_match": 0.9}


def test_an_evaluation_by_hand_does_not_stand_for_the_one_in_training(copy_of: Callable[[str], Path]) -> None:
    """Weights count as evaluated in their turn only by the evaluation that training itself makes."""
    with open_log(copy_of("chains"), role="reader") as log:
        evaluate(log, 3, 0.9, temperature=1.0)
        history = History()
        history.catch_up(log.journal)
        assert not history.is_evaluated(3)
        evaluate(log, 3, 0.9, temperature=1.0, name=evaluation_name(3))
        history.catch_up(log.journal)
        assert history.is_evaluated(3)


def test_a_goal_is_never_below_what_is_committed(copy_of: Callable[[str], Path]) -> None:
    """A smaller --max-steps is reached already; the recorded aim stays one that a run can have."""
    with open_log(copy_of("chains"), role="learner") as log:
        for asked, aim in ((9, 9), (1, 3), (3, 3)):
            record_goal(log, asked, 0.0)
            assert log.state().max_steps == aim


def test_ways_are_named_by_what_differs() -> None:
    """Settings are told apart one by one, and so are the questions."""
    main = Way("dev", {"samples": 4, "search": "local"}, {})
    assert what_differs(main, main) == ""
    assert what_differs(Way("dev", {"samples": 1, "search": "local"}, {}), main) == "samples 1"
    assert (
        what_differs(Way("test", {"samples": 4, "top_k": 2}, {}), main)
        == "other questions, search not set, top_k 2"
    )
