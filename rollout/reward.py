"""Owns scoring: from an ended trajectory to a reward with its components.

Whether a turn is well formed was decided once, by the protocol's parser, and stands in the `answer` event:
`valid_format` is `outcome == answered`, here and everywhere else.

`em_format`: 1.0 exact match, 0.0 well formed but wrong, -0.1 otherwise (normaliser unicode_p).
`search_r1_format`: match x structure, see `levels` (normaliser squad_ascii); `f1_format` is the same with F1
in the place of match. `em` and `f1` are bare. `name@normaliser` chooses another normaliser.
"""

import hashlib
import inspect
import math
import sys
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, SupportsFloat

import msgspec

from core.config import RewardSettings
from core.errors import ConfigError, RewardError
from core.events import Outcome
from core.tree import Trajectory
from rollout import normalise
from rollout.normalise import Rule, exact_match, f1, get_rule
from rollout.structure import found_reference, well_structured
from rollout.usercode import load_function

BAD_FORMAT = -0.1
VERSION = "1"


class NodeScore(msgspec.Struct, frozen=True):
    """A dense process signal: the value of one turn."""

    node: str
    value: float
    components: dict[str, float] = {}


class Score(msgspec.Struct, frozen=True):
    """What a scorer says of a trajectory."""

    value: float
    components: dict[str, float] = {}
    nodes: tuple[NodeScore, ...] = ()
    """Recorded as rewards of scope "node"."""


ScoreFunction = Callable[[Trajectory], Score]


class Scorer(NamedTuple):
    """A scorer and what it is: any change of rule, level or source changes its identity."""

    id: str
    version: str
    source_digest: str
    """SHA-256 hex of the source that computes it."""
    function: ScoreFunction

    def score(self, trajectory: Trajectory) -> Score:
        """Score an ended, non-void trajectory; raises RewardError on a value that is no finite number."""
        score = self.function(trajectory)
        for name, value in (
            ("value", score.value),
            *score.components.items(),
            *((f"node {node.node}", node.value) for node in score.nodes),
        ):
            if not math.isfinite(value):
                raise RewardError(
                    f"scorer {self.id!r} returned {value!r} as {name} for {trajectory.group.uid} "
                    f"leaf {trajectory.leaf}, expected a finite number"
                )
        return score


def get_scorer(spec: str, settings: RewardSettings, allow_code: Collection[str] = ()) -> Scorer:
    """Return the scorer called `spec`: a name, name@normaliser, or module:function.

    Code is imported only if `spec` stands in `allow_code`, else CodeNotAllowed is raised. Raises ConfigError
    when there is no such scorer.
    """
    if ":" in spec:
        return _user_scorer(spec, allow_code)
    name, _, chosen = spec.partition("@")
    if name not in BUILDERS:
        raise ConfigError(f"no scorer {spec!r}, expected one of {', '.join(BUILDERS)} or module:function")
    default, build = BUILDERS[name]
    rule = get_rule(chosen or default)
    function = build(rule, settings)
    levels_text = ""
    if name in ("search_r1_format", "f1_format"):
        levels_text = (
            f" {settings.structure_format_score}/{settings.final_format_score}/{settings.retrieval_score}"
        )
    return Scorer(name, f"{VERSION} {rule.name}{levels_text}", _builtin_digest(), function)


def measures(trajectory: Trajectory, rule: Rule) -> dict[str, float]:
    """Return the components that every built-in scorer records: format, exact_match and f1."""
    answer, references = trajectory.ended.answer, trajectory.group.asked.references
    valid = trajectory.outcome is Outcome.ANSWERED and answer is not None
    return {
        "format": float(valid),
        "exact_match": float(valid and exact_match(answer or "", references, rule)),
        "f1": f1(answer or "", references, rule) if valid else 0.0,
    }


def levels(match: float, *, valid: bool, answered: bool, retrieved: bool, settings: RewardSettings) -> float:
    """Return Search-R1's format reward; `match` is 0 or 1 (exact match) or an F1.

    | match | structure valid | not |
    |---|---|---|
    | 1 | 1 | 1 - structure_format_score |
    | 0 | structure_format_score (+ retrieval_score if a result held a reference) | final_format_score |
    | no answer | the same | 0 |

    An F1 between them interpolates linearly.
    """
    structure = settings.structure_format_score
    if valid:
        wrong = structure + (settings.retrieval_score if retrieved else 0.0)
        return match + (1 - match) * wrong
    if not answered:
        return 0.0
    return match * (1 - structure) + (1 - match) * settings.final_format_score


def _em_format(rule: Rule, settings: RewardSettings) -> ScoreFunction:
    del settings

    def score(trajectory: Trajectory) -> Score:
        parts = measures(trajectory, rule)
        return Score(parts["exact_match"] if parts["format"] else BAD_FORMAT, parts)

    return score


def _bare(component: str) -> Callable[[Rule, RewardSettings], ScoreFunction]:
    def build(rule: Rule, settings: RewardSettings) -> ScoreFunction:
        del settings

        def score(trajectory: Trajectory) -> Score:
            parts = measures(trajectory, rule)
            return Score(parts[component], parts)

        return score

    return build


def _levelled(component: str) -> Callable[[Rule, RewardSettings], ScoreFunction]:
    def build(rule: Rule, settings: RewardSettings) -> ScoreFunction:
        def score(trajectory: Trajectory) -> Score:
            parts = measures(trajectory, rule)
            valid = bool(parts["format"]) and well_structured(trajectory)
            retrieved = found_reference(trajectory, rule)
            value = levels(
                parts[component],
                valid=valid,
                answered=bool(parts["format"]),
                retrieved=retrieved,
                settings=settings,
            )
            return Score(value, {**parts, "structure": float(valid), "retrieved": float(retrieved)})

        return score

    return build


BUILDERS: dict[str, tuple[str, Callable[[Rule, RewardSettings], ScoreFunction]]] = {
    "em_format": ("unicode_p", _em_format),
    "search_r1_format": ("squad_ascii", _levelled("exact_match")),
    "f1_format": ("squad_ascii", _levelled("f1")),
    "em": ("squad_ascii", _bare("exact_match")),
    "f1": ("squad_ascii", _bare("f1")),
}
"""Scorers by name, with the normaliser that each uses unless told otherwise."""


def _builtin_digest() -> str:
    modules = (sys.modules[__name__], normalise, sys.modules["rollout.structure"])
    return hashlib.sha256("\0".join(inspect.getsource(module) for module in modules).encode()).hexdigest()


def _user_scorer(spec: str, allow_code: Collection[str]) -> Scorer:
    function = load_function(spec, allow_code)
    module = sys.modules[spec.partition(":")[0]]
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"scorer {spec!r}: the source of {module.__name__!r} cannot be read, and its digest is recorded "
            "with every reward; put the function into a .py file"
        ) from error
    digest = hashlib.sha256(source.encode()).hexdigest()
    return Scorer(spec, VERSION, digest, _wrap(spec, function))


def _wrap(spec: str, function: Callable[[Trajectory], object]) -> ScoreFunction:
    def score(trajectory: Trajectory) -> Score:
        try:
            result = function(trajectory)
        except Exception as error:
            where = f"{trajectory.group.uid} leaf {trajectory.leaf}"
            raise RewardError(f"scorer {spec!r} failed on {where}: {error!r}; mend it and go on") from error
        return _plain(spec, result if isinstance(result, Score) else Score(_number(spec, "", result)))

    return score


def _plain(spec: str, score: Score) -> Score:
    """Return a user's score with plain floats alone: the log could not give back another type."""
    nodes = tuple(
        NodeScore(
            str(node.node),
            _number(spec, f"node {node.node}", node.value),
            _numbers(spec, f"node {node.node}", node.components),
        )
        for node in score.nodes
    )
    named = [node.node for node in nodes]
    if len(set(named)) < len(named):
        raise RewardError(f"scorer {spec!r} scored a turn twice: {named!r}, expected each at most once")
    value = _number(spec, "value", score.value)
    return Score(value, _numbers(spec, "components", score.components), nodes)


def _numbers(spec: str, name: str, components: Mapping[str, object]) -> dict[str, float]:
    return {str(key): _number(spec, f"{name} {key!r}", value) for key, value in components.items()}


def _number(spec: str, name: str, value: object) -> float:
    """Return any kind of number (a bool, numpy's, a tensor of one) as a float; raises RewardError."""
    try:
        if isinstance(value, SupportsFloat):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    where = f" as {name}" if name else ""
    raise RewardError(f"scorer {spec!r} returned {value!r}{where}, expected a number or a Score of numbers")
