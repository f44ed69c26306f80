"""Owns the command line: parses, builds the objects of one run, calls one function per command.

Heavy imports stand inside the commands, so that `--help` answers at once. Every user error becomes one
line on stderr and exit status 2; 1 means that a check found something (MISMATCH, a verify finding).
"""

import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, TypeVarTuple

import click

if TYPE_CHECKING:
    from core.config import Config
    from core.events import Evaluated, RunOpened
    from core.tree import Trajectory
    from engine.client import Session
    from learner.work import Policy
    from rollout.data import Example
    from rollout.evaluate import EvalOptions, Weights
    from rollout.progress import Voice
    from rollout.run import Environment
    from store.log import Log, Role

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RUN_WAIT_SECONDS = 600.0
"""How long a command that names no preset waits for another one to create the run."""

PRESET_HELP = "demo, demo-tree, search-r1, and grpo-X or tree-grpo-X with X multihop, singlehop, webagent."
HOW_FAR = "how far should it train? Pass --max-steps N (later starts remember it)"


class Given(NamedTuple):
    """What the user said about a run's configuration."""

    run_dir: Path
    preset: str
    tables: Mapping[str, object]
    assignments: Sequence[str]


class Workplace(NamedTuple):
    """An open run: its log and its frozen configuration."""

    run_dir: Path
    log: "Log"
    config: "Config"
    opened: "RunOpened"


class _Group(click.Group):
    """Turns our errors into one line and exit status 2."""

    def invoke(self, ctx: click.Context) -> object:
        from core.errors import RolltapeError

        try:
            return super().invoke(ctx)
        except RolltapeError as error:
            click.echo(f"rolltape: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("stopped; what is finished is kept, and the same command goes on from here", err=True)
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            sys.exit(1)
        except OSError as error:
            click.echo(f"rolltape: {error}", err=True)
            sys.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rolltape", message="rolltape %(version)s")
def main() -> None:
    """Event-sourced rollouts and a replayable trainer for LLM-agent reinforcement learning."""


def _run_option(function: F) -> F:
    return click.option(
        "--run",
        "run_dir",
        required=True,
        type=click.Path(path_type=Path, file_okay=False),
        help="Run directory.",
    )(function)


def _config_options(function: F) -> F:
    """Add --run, --preset, --config and --set, and hand the command one `given`."""

    def command(
        run_dir: Path, preset: str, config_file: Path | None, assignments: tuple[str, ...], **rest: object
    ) -> object:
        return function(Given(run_dir, preset, _read_tables(config_file), assignments), **rest)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__dict__.update(function.__dict__)
    command = click.option(
        "--set", "assignments", multiple=True, metavar="KEY=VALUE",
        help="One setting, of those that `settings` prints; repeatable.",
    )(command)  # fmt: skip
    command = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="TOML file of settings.",
    )(command)
    command = click.option("--preset", default="", help=PRESET_HELP)(command)
    return _run_option(command)  # type: ignore[return-value] # the wrapper has click's signature, not F's


def _read_tables(path: Path | None) -> Mapping[str, object]:
    import tomllib

    from core.errors import ConfigError

    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot use {str(path)!r} as a configuration file: {error}") from error


def _exists(run_dir: Path) -> bool:
    """Return whether the run has been created; raises StoreError when its log cannot be read."""
    from store.log import open_log

    if not (run_dir / "log").exists():
        return False
    with open_log(run_dir, readonly=True) as log:
        return log.run_event() is not None


@contextlib.contextmanager
def _workplace(
    given: Given, role: "Role", *, wait: bool = False, allow_code: Sequence[str] = ()
) -> Iterator[Workplace]:
    """Open the run, creating it when a preset or settings are given; close it afterwards."""
    from core.errors import ConfigError
    from rollout.environment import restore_world
    from store.log import open_log

    if not _exists(given.run_dir):
        if given.preset or given.tables or given.assignments:
            _create_run(given, allow_code)
        elif wait:
            _wait_for_run(given.run_dir)
        else:
            raise ConfigError(
                f"there is no run at {str(given.run_dir)!r}: create it with "
                f"`rollout --run {given.run_dir} --preset NAME`"
            )
    with open_log(given.run_dir, role=role) as log:
        opened = log.run_event()
        assert opened is not None  # runs are never emptied
        config = _config_for(given, opened)
        restore_world(config, given.run_dir)
        yield Workplace(given.run_dir, log, config, opened)


def _config_for(given: Given, opened: "RunOpened") -> "Config":
    """Return the run's frozen configuration with this command's own settings; raises on a conflicting one."""
    from core.config import from_plain
    from core.errors import ConfigError
    from core.settings import differences, with_given, with_own
    from rollout.environment import with_absolute_paths

    config = from_plain(opened.config)
    wanted = with_absolute_paths(with_given(config, given.preset, given.tables, given.assignments))
    if lines := differences(config, wanted):
        raise ConfigError(
            f"the run at {str(given.run_dir)!r} has another configuration; "
            + "; ".join(lines)
            + " (leave the setting out, or use another --run)"
        )
    return with_own(config, wanted)


def _wait_for_run(run_dir: Path) -> None:
    import time

    from core.errors import ConfigError

    click.echo(f"waiting for `rollout --run {run_dir} --preset NAME` to create the run …", err=True)
    deadline = time.monotonic() + RUN_WAIT_SECONDS
    while not _exists(run_dir):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"no run appeared at {str(run_dir)!r} within {RUN_WAIT_SECONDS:.0f} s; pass --preset"
            )
        time.sleep(0.2)


def _create_run(given: Given, allow_code: Sequence[str]) -> None:
    """Freeze the configuration and make the run; checks everything that can be wrong before it writes."""
    import time
    import uuid

    from core.config import config_digest, to_plain
    from core.events import SCHEMA_VERSION, RunOpened
    from core.settings import build_config
    from engine.client import connect
    from learner.fingerprints import code_fingerprints
    from learner.tracking import check_installed
    from learner.work import check_distribution
    from rollout.environment import freeze, prepare_world, questions_digest
    from store.disk import check_filesystem
    from store.log import open_log

    config = build_config(given.preset, given.tables, given.assignments)
    check_distribution(config)
    check_installed(config.tracking.swanlab)
    config = freeze(config, allow_code)
    check_filesystem(given.run_dir)
    with _made(given.run_dir), connect(config.engine, given.run_dir) as session:
        prepare_world(config, given.run_dir)
        event = RunOpened(
            schema=SCHEMA_VERSION,
            config=to_plain(config),
            config_digest=config_digest(config),
            fingerprints=code_fingerprints()
            | session.fingerprints()
            | {"questions": questions_digest(config, given.run_dir)},
            base_model=session.model_name,
            seed=config.run.seed,
            run_id=uuid.uuid4().hex,
            at=time.time(),
        )
    with open_log(given.run_dir, create=True) as log:
        log.open_run(event)


@contextlib.contextmanager
def _made(run_dir: Path) -> Iterator[None]:
    """Make a run's directory; a new one goes again when nothing comes into it because something fails."""
    from core.errors import ConfigError

    new = not run_dir.exists()
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the run directory {str(run_dir)!r}: {error.strerror}") from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"no permission to write into the run directory {str(run_dir)!r}")
    try:
        yield
    except BaseException:
        if new:
            with contextlib.suppress(OSError):  # not empty: an engine's log says what went wrong
                run_dir.rmdir()
        raise


def _echo(line: str) -> None:
    click.echo(line, err=True)


@contextlib.contextmanager
def _session(place: Workplace) -> Iterator["Session"]:
    from engine.client import connect

    with connect(place.config.engine, place.run_dir) as session:
        yield session


def _environment(place: Workplace, session: "Session", allow_code: Sequence[str]) -> "Environment":
    from rollout.environment import build_environment

    return build_environment(
        place.config, session, place.run_dir, cache=place.log, allow_code=frozenset(allow_code)
    )


PICTURES = (".png", ".svg", ".pdf")


def _check_target(path: Path | None, endings: Sequence[str] = ()) -> None:
    """Raise ConfigError when a file to be written has no folder, or not one of the endings."""
    from core.errors import ConfigError

    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"cannot write {str(path)!r}: expected a name that ends in {' or '.join(endings)}")


def _folder_option(function: F) -> F:
    return click.option(
        "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write."
    )(function)


def _allow_code_option(function: F) -> F:
    return click.option(
        "--allow-code",
        multiple=True,
        metavar="MODULE:FUNCTION",
        help="User code that may be imported; repeatable.",
    )(function)


@main.command()
@_config_options
@_allow_code_option
@click.option("--quiet", is_flag=True, help="No progress lines.")
@click.option("--json", "as_json", is_flag=True, help="Progress as JSON lines.")
def rollout(given: Given, allow_code: tuple[str, ...], quiet: bool, as_json: bool) -> None:
    """Sample trajectories until the goal is reached."""
    from engine.outlive import outlive
    from rollout.display import progress_display
    from rollout.environment import check_questions, questions
    from rollout.run import Options, run_rollouts
    from rollout.workers import Ending

    def work() -> str:
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(_workplace(given, "rollout", allow_code=allow_code))
            check_questions(place.config, place.run_dir, place.opened.fingerprints.get("questions", ""))
            state = place.log.state()
            if state.max_steps is not None and state.committed_steps >= state.max_steps:
                return Ending.GOAL
            session = stack.enter_context(_session(place))
            voice = stack.enter_context(progress_display(quiet=quiet, as_json=as_json))
            ending: str = _run_async(
                run_rollouts,
                place.log,
                place.config,
                questions(place.config, place.run_dir, "train"),
                _environment(place, session, allow_code),
                voice,
                Options(allow_code=allow_code, check=session.check),
            )
            return ending

    _echo(f"rollout: ended: {outlive(work, _echo)}")


def _run_async(function: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
    import anyio

    return anyio.run(function, *arguments)


@main.command()
@_config_options
@_allow_code_option
@click.option(
    "--max-steps", type=click.IntRange(min=0), default=None, help="Stop after this many committed steps."
)
@click.option("--resume-from", default="", metavar="URI", help="State to start from, before the first step.")
@click.option("--from", "source", type=click.Path(path_type=Path, file_okay=False), metavar="RUN",
              help="Train a new run from another run's recorded groups.")  # fmt: skip
@click.option("--steps", default="", metavar="A:B", help="With --from: only the groups of these steps.")
@click.option("--estimator", default="", help="With --from: the estimator of the new run.")
@click.option("--dry-run", is_flag=True, help="Only estimate what the steps left will cost; change nothing.")
@click.option("--yes", is_flag=True, help="Recover without asking, whatever has to be sent again.")
@click.option("--quiet", is_flag=True, help="No line per step.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per step.")
def learn(
    given: Given, allow_code: tuple[str, ...], max_steps: int | None, resume_from: str, source: Path | None,
    steps: str, estimator: str, dry_run: bool, yes: bool, quiet: bool, as_json: bool,
) -> None:  # fmt: skip
    """Train on completed groups, step by step.

    One optimizer step per logical batch; killed at any moment, the same command goes on from the log.
    """
    from core.errors import ConfigError
    from engine.outlive import outlive

    if dry_run:
        if source is not None:
            raise ConfigError("--dry-run estimates what is sampled and trained; --from RUN samples nothing")
        _tell_estimate(given, allow_code, max_steps, as_json=as_json)
        return
    if source is not None:
        _check_source(source, steps, given.run_dir)
        given = _given_as(source, given, estimator)
    elif steps or estimator:
        raise ConfigError("--steps and --estimator belong to --from RUN; use --set learner.estimator=NAME")
    wish = _Wish(given, allow_code, max_steps, resume_from, source, steps)
    _echo(outlive(lambda: _learn(wish, yes=yes, quiet=quiet, as_json=as_json), _echo))


class _Wish(NamedTuple):
    """What one `learn` is asked to do."""

    given: Given
    allow_code: Sequence[str]
    max_steps: int | None
    resume_from: str
    source: Path | None
    steps: str


def _learn(wish: _Wish, *, yes: bool, quiet: bool, as_json: bool) -> str:
    """Train up to the goal, from wherever the log says the run is; return what to say at the end."""
    import time

    from core.errors import ConfigError
    from learner.goal import is_settled, record_goal
    from learner.loop import Options, run_learner
    from learner.telling import StepTable
    from learner.tracking import Tracking
    from learner.work import Hooks

    allow_code, source = wish.allow_code, wish.source
    with _workplace(wish.given, "learner", wait=True, allow_code=allow_code) as place:
        copied = _copy_groups(source, wish.steps, place) if source is not None else None
        state = place.log.state()
        goal = wish.max_steps if wish.max_steps is not None else state.max_steps or copied
        if goal is None:
            raise ConfigError(HOW_FAR)
        if wish.resume_from and state.checkpoint_index is not None:
            _echo("--resume-from only begins a run; this one goes on from its own checkpoint")
        with Tracking(place.log, place.config, place.opened, _echo):
            if is_settled(place.log, place.config, goal):
                record_goal(place.log, goal, time.time())
                return (
                    f"learn: {state.committed_steps} steps are committed, the goal is {goal}: nothing is "
                    "left to do; a larger --max-steps goes on"
                )
            with _session(place) as session:
                told = StepTable(goal, quiet=quiet, as_json=as_json)
                hooks = Hooks(
                    notify=_echo,
                    committed=lambda _planned, committed: told.tell(committed),
                    evaluate=_evaluator(place, session, allow_code),
                    confirm=lambda question: yes or (sys.stdin.isatty() and click.confirm(question)),
                    load_code=_code_loader(allow_code),
                )
                options = Options(resume_from=wish.resume_from, any_age=source is not None)
                ending = run_learner(place.log, session, place.config, goal, hooks, options)
        left = place.log.state().fates["closed"]
    waiting = f"; {left} groups wait in the log" if left else ""
    return f"learn: {ending.committed_steps} steps are committed; stopped: {ending.reason}{waiting}"


def _tell_estimate(
    given: Given, allow_code: Sequence[str], max_steps: int | None, *, as_json: bool
) -> None:  # fmt: skip
    """Tell what the steps up to the goal will cost, from the run if there is one; write nothing."""
    import msgspec

    from core.errors import ConfigError
    from core.settings import build_config
    from learner.estimate import estimate, estimate_lines
    from rollout.environment import freeze
    from rollout.plan import make_plan
    from store.log import open_log

    if _exists(given.run_dir):
        with open_log(given.run_dir, readonly=True) as log:
            opened, state = log.run_event(), log.state()
            history = [record.event for record in log.journal.read()]
        assert opened is not None
        config, goal, done = _config_for(given, opened), max_steps or state.max_steps, state.committed_steps
    elif given.preset or given.tables or given.assignments:
        config = freeze(build_config(given.preset, given.tables, given.assignments), allow_code)
        history, goal, done = [], max_steps, 0
    else:
        raise ConfigError(
            f"there is no run at {str(given.run_dir)!r}: pass --preset NAME to estimate a new one"
        )
    if goal is None:
        raise ConfigError(HOW_FAR)
    found = estimate(config, make_plan(config.rollout), max(goal - done, 0), history)
    lines = (
        estimate_lines(found) if goal > done else [f"nothing left to buy: {done} of {goal} steps are done"]
    )
    click.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(lines))


def _check_source(source: Path, steps: str, run_dir: Path) -> None:
    """Raise ConfigError or ReplayError when nothing can be repeated from `source`, before a run is made."""
    from core.errors import ConfigError
    from store.log import open_log

    if source.resolve() == run_dir.resolve():
        raise ConfigError(f"--from and --run both name {str(run_dir)!r}: learning from a run needs a new one")
    with open_log(source, readonly=True) as log:
        if not _step_range(None, steps, not steps, log):
            raise ConfigError(
                f"{str(source)!r} has no committed step, so there is nothing to repeat; the groups that wait "
                f"in it are trained by `learn --run {source}`"
            )


def _given_as(source: Path, given: Given, estimator: str) -> Given:
    """Return what was given on top of the source run's own configuration, for a run that learns from it."""
    from core.config import from_plain, to_plain
    from store.log import open_log

    if _exists(given.run_dir):
        return given
    with open_log(source, readonly=True) as log:
        opened = log.run_event()
    assert opened is not None
    config = from_plain(opened.config)
    tables = dict(to_plain(config)) | dict(given.tables)
    chosen = [f"learner.estimator={estimator}"] if estimator else []
    return Given(given.run_dir, "", tables, [*chosen, *given.assignments])


def _copy_groups(source: Path, steps: str, place: Workplace) -> int:
    """Repeat another run's trained groups in this one; return how many whole steps they make."""
    import time

    from learner.offline import check_same_model, copy_groups
    from store.log import open_log

    with open_log(source, readonly=True) as log:
        opened = log.run_event()
        assert opened is not None
        check_same_model(opened.fingerprints, place.opened.fingerprints)
        wanted = _step_range(None, steps, not steps, log)
        count = copy_groups(log, place.log, wanted, time.time())
    return count // place.config.learner.groups_per_step


def _evaluator(place: Workplace, session: "Session", allow_code: Sequence[str]) -> Callable[["Policy"], None]:
    """Return what evaluates a just-published policy on the dev questions and records it."""

    def evaluate(policy: "Policy") -> None:
        from learner.points import evaluation_name
        from rollout.environment import questions
        from rollout.evaluate import EvalOptions, Weights
        from rollout.progress import silence

        settings = place.config.learner
        options = EvalOptions(
            samples=settings.eval_samples,
            temperature=1.0,
            limit=settings.eval_limit,
            name=evaluation_name(policy.step),
        )
        weights = Weights(policy.weights_uri, policy.policy_version)
        event = _evaluate(
            place, _environment(place, session, allow_code), weights, options,
            questions(place.config, place.run_dir, "dev"), silence(),
        )  # fmt: skip
        _echo(f"dev after {policy.step} steps: " + _summary(event.summary))

    return evaluate


def _evaluate(
    place: Workplace, environment: "Environment", weights: "Weights", options: "EvalOptions",
    examples: Sequence["Example"], voice: "Voice",
) -> "Evaluated":  # fmt: skip
    """Ask the questions, append the `eval` event, return it."""
    import time

    import msgspec

    from rollout.evaluate import Exam, evaluate

    folder = place.run_dir / "eval"
    folder.mkdir(mode=0o700, exist_ok=True)
    records = folder / f"{options.name or 'eval'}-v{weights.policy_version}.jsonl"
    event = _run_async(evaluate, Exam(place.config, environment, weights, options), examples, records, voice)
    event = msgspec.structs.replace(event, at=time.time())
    place.log.journal.append_sync([event])
    return event


def _summary(summary: Mapping[str, float]) -> str:
    names = ("exact_match", "em/macro", "format", "f1", "reward", "questions")
    return "  ".join(f"{name} {summary[name]:.4g}" for name in names if name in summary)


class _AskByDefault(click.Group):
    """`eval --run …` asks; `eval compare …` compares."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["ask", *args]
        return super().parse_args(ctx, args)


@main.group("eval", cls=_AskByDefault)
def eval_group() -> None:
    """Ask a fixed set of questions, or compare.

    `eval --run …` is `eval ask --run …`: any weights, any split; see `eval ask --help`.
    """


@eval_group.command("compare")
@click.option("--run", "run_dir", type=click.Path(path_type=Path, file_okay=False), help="Run of bare names.")
@click.argument("names", nargs=-1, required=True, metavar="[RUN:]NAME...")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw macro EM and format.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def eval_compare(run_dir: Path | None, names: tuple[str, ...], png: Path | None, as_json: bool) -> None:
    """Compare recorded evaluations with the first one.

    Intervals are paired bootstraps over questions.
    """
    import msgspec

    from rollout.comparing import compare_evaluations, comparison_lines

    _check_target(png, PICTURES)
    found = compare_evaluations([_evaluated(run_dir, name) for name in names])
    click.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(comparison_lines(found)))
    if png is not None:
        from rollout.drawing import draw_evaluations

        draw_evaluations(found, png)


def _evaluated(run_dir: Path | None, text: str) -> "Evaluated":
    """Return the newest evaluation that `[RUN:]NAME` names."""
    from core.errors import ConfigError
    from core.events import Evaluated
    from store.log import open_log

    folder, colon, name = text.rpartition(":")
    where = Path(folder) if colon else run_dir
    if where is None:
        raise ConfigError(f"evaluation {text!r}: name its run, as --run RUN or RUN:{text}")
    with open_log(where, readonly=True) as log:
        events = [record.event for record in log.journal.read()]
    known = {event.name: event for event in events if isinstance(event, Evaluated)}
    if name not in known:
        raise ConfigError(f"{str(where)!r} has no evaluation {name!r}; it has {', '.join(known) or 'none'}")
    return known[name]


@eval_group.command("ask")
@_config_options
@_allow_code_option
@click.option("--split", default="test", show_default=True, help="train, dev, test, or a JSONL file.")
@click.option("--policy", default="latest", show_default=True, help="base, latest, or a policy version.")
@click.option("--model-path", default="", metavar="URI", help="Weights by their trio:// address instead.")
@click.option("--samples", type=click.IntRange(min=1), default=1, show_default=True, help="Per question.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), help="0 is greedy; default 1, or 0 for one sample."
)
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Only the first N questions.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Questions at once."
)
@click.option("--search", type=click.Choice(["none"]), help="none: the search returns nothing.")
@click.option("--name", default="", help="Under which it is recorded and compared.")
@click.option("--quiet", is_flag=True, help="No progress, no summary.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def eval_command(
    given: Given, allow_code: tuple[str, ...], split: str, policy: str, model_path: str, samples: int,
    temperature: float | None, limit: int, batch_size: int, search: str | None, name: str, quiet: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Ask a fixed set of questions with any weights.

    Resumable under the same name, and recorded in the log.
    """
    import re

    import msgspec

    from core.errors import ConfigError
    from engine.outlive import outlive
    from learner.telling import metric_lines
    from rollout.display import progress_display
    from rollout.environment import questions
    from rollout.evaluate import EvalOptions

    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    name = name or re.sub(r"[^\w.+-]", "_", f"{policy}-{Path(split).name}")
    if not re.fullmatch(r"[\w+-][\w.+-]*", name):
        raise ConfigError(f"--name {name!r}: expected letters, digits, '.', '_', '+' and '-' only")
    options = EvalOptions(samples, temperature, limit=limit, batch_size=batch_size, name=name)

    def work() -> "Evaluated":
        with (
            _workplace(given, "reader", allow_code=allow_code) as opened,
            _session(opened) as session,
            progress_display(quiet=quiet, as_json=False) as voice,
        ):
            place = opened._replace(config=_without_search(opened.config)) if search == "none" else opened
            return _evaluate(
                place, _environment(place, session, allow_code), _weights(place, policy, model_path),
                options, questions(place.config, place.run_dir, split), voice,
            )  # fmt: skip

    event = outlive(work, _echo)
    if as_json:
        click.echo(msgspec.json.encode(event).decode())
    elif not quiet:
        click.echo("\n".join(metric_lines(event.summary)))


def _without_search(config: "Config") -> "Config":
    import msgspec

    search = msgspec.structs.replace(config.tools.search, backend="none")
    return msgspec.structs.replace(config, tools=msgspec.structs.replace(config.tools, search=search))


def _weights(place: Workplace, policy: str, model_path: str) -> "Weights":
    from core.errors import ConfigError
    from rollout.evaluate import Weights

    state = place.log.state()
    if model_path:
        return Weights(model_path, -1)
    if policy == "base":
        return Weights(place.opened.weights_uri, 0)
    if policy == "latest":
        return Weights(state.weights_uri, state.policy_version)
    known = {row.policy_version: row.weights_uri for row in place.log.policies()}
    if not policy.isdecimal() or int(policy) not in known:
        raise ConfigError(f"--policy {policy!r}: expected base, latest or one of 0 to {state.policy_version}")
    return Weights(known[int(policy)], int(policy))


def _code_loader(allow_code: Sequence[str]) -> Callable[[str], Any]:
    from rollout.usercode import load_function

    return lambda spec: load_function(spec, allow_code)


def _step_range(step: int | None, steps: str, every: bool, log: "Log") -> Sequence[int]:
    """Return the steps that --step, --steps A:B (B included) or --all name."""
    from core.errors import ConfigError
    from learner.replay import committed_steps

    if (step is not None) + bool(steps) + every != 1:
        raise ConfigError("name the steps: one of --step N, --steps A:B or --all")
    if step is not None:
        return [step]
    if every:
        return committed_steps(log, None, None) if log.state().committed_steps else []
    first, colon, last = steps.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise ConfigError(
            f"--steps {steps!r}: expected A:B such as 0:9 (both included; either may be left out)"
        )
    return committed_steps(log, int(first) if first else None, int(last) if last else None)


@main.command()
@_run_option
@_allow_code_option
@click.option("--step", type=click.IntRange(min=0), help="One step, told in full.")
@click.option("--steps", default="", metavar="A:B", help="Steps A to B, both included.")
@click.option("--all", "every", is_flag=True, help="Every committed step.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="Processes that share the steps.")
@click.option("--estimator", default="", help="What another estimator would have made of the step.")
@click.option("--rescore", is_flag=True, help="Score the recorded texts again.")
@click.option(
    "--trajectory", default="", metavar="UID/TREE/LEAF", help="Show one conversation, token by token."
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the steps as a page.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines.")
def replay(
    run_dir: Path, allow_code: tuple[str, ...], step: int | None, steps: str, every: bool, jobs: int,
    estimator: str, rescore: bool, trajectory: str, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Rebuild steps from the log: MATCH or MISMATCH.

    From rollout events alone, without a key or a network. Exit status 1 on a mismatch, 2 where user code that
    the log names is needed and not allowed.
    """
    from core.errors import ConfigError
    from store.log import open_log

    asked = [f"--{name}" for name, value in (
        ("trajectory", trajectory), ("estimator", estimator), ("rescore", rescore)) if value]  # fmt: skip
    if trajectory and (html is not None or as_json):
        raise ConfigError("--trajectory shows one conversation in the terminal: leave out --html and --json")
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are different questions: ask one at a time")
    _check_target(html)
    with open_log(run_dir, readonly=True) as log:
        if trajectory:
            _show_trajectory(log, trajectory, allow_code)
            return
        wanted = _step_range(step, steps, every, log)
        if html is not None:
            _write_page(log, html, wanted, 1000, allow_code)
        if not wanted and (estimator or rescore):
            raise ConfigError(f"{str(run_dir)!r} has no committed step yet: there is nothing to ask about")
        if estimator:
            _tell_counterfactuals(log, wanted, estimator, allow_code, as_json=as_json)
            return
        if rescore:
            sys.exit(_tell_rescored(log, wanted, allow_code, as_json=as_json))
        status = _audit(log, wanted, allow_code, jobs=jobs, whole=step is not None, as_json=as_json)
    sys.exit(status)


def _audit(
    log: "Log", wanted: Sequence[int], allow_code: Sequence[str], *, jobs: int, whole: bool, as_json: bool
) -> int:  # fmt: skip
    """Replay steps one at a time and tell each; return the exit status."""
    from learner.parallel import Means, audit
    from learner.telling import (
        audit_status,
        note_lines,
        report_json,
        report_lines,
        summary_line,
        verdict_of,
    )

    verdicts = []
    notes = []
    bar = click.progressbar(length=len(wanted), label="replaying", file=sys.stderr)
    with bar if len(wanted) > 1 and sys.stderr.isatty() else contextlib.nullcontext() as shown:
        means = Means(_code_loader, tuple(allow_code), _decoder(log))
        for report in audit(log, wanted, means, jobs):
            verdicts.append(verdict_of(report))
            notes += [(report.step, note) for note in report.notes]
            lines = [report_json(report)] if as_json else report_lines(report, whole=whole)
            click.echo("\n".join(lines))
            if shown is not None:
                shown.update(1)
    if not as_json and not whole:
        click.echo("\n".join([*note_lines(notes), summary_line(verdicts)]))
    return audit_status(verdicts)


def _config_of(log: "Log") -> "Config":
    from core.config import from_plain
    from core.errors import ConfigError

    opened = log.run_event()
    if opened is None:
        raise ConfigError(f"the log of {str(log.run_dir)!r} holds no run")
    return from_plain(opened.config)


def _decoder(log: "Log") -> Callable[[Sequence[int]], str]:
    """Return what spells tokens, loading the tokenizer only when something must be spelt."""
    import functools

    @functools.cache
    def tokenizer() -> Any:
        from engine.tokenizers import offline_tokenizer

        return offline_tokenizer(_config_of(log).engine)

    def decode(tokens: Sequence[int]) -> str:
        found = tokenizer()
        return " ".join(map(str, tokens)) if found is None else str(found.decode(list(tokens)))

    return decode


def _offline_tokenizer(log: "Log") -> Any:
    from core.errors import ConfigError
    from engine.tokenizers import offline_tokenizer

    settings = _config_of(log).engine
    found = offline_tokenizer(settings)
    if found is None:
        raise ConfigError(
            f"the tokenizer of {settings.base_model!r} is not on this machine; load it once online"
        )
    return found


def _tell_counterfactuals(
    log: "Log", wanted: Sequence[int], estimator: str, allow_code: Sequence[str], *, as_json: bool
) -> None:
    import msgspec

    from learner.counterfactual import counterfactual
    from learner.rebuild import rebuild, user_estimator
    from learner.telling import counterfactual_lines

    load = _code_loader(allow_code)
    user = user_estimator(estimator, load)
    for step in wanted:
        found = counterfactual(rebuild(log, log.plan(step), load), step, estimator, user)
        click.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(counterfactual_lines(found)))


def _tell_rescored(log: "Log", wanted: Sequence[int], allow_code: Sequence[str], *, as_json: bool) -> int:
    """Tell which rewards the run's scorer gives otherwise now; return the exit status."""
    import msgspec

    from learner.counterfactual import rescore
    from learner.rebuild import rebuild
    from learner.telling import rescored_line

    count = members = 0
    score = _scorer(log, allow_code)
    for step in wanted:
        batch = rebuild(log, log.plan(step), _code_loader(allow_code)).batch
        members += len(batch.members)
        for change in rescore(batch, score):
            count += 1
            click.echo(msgspec.json.encode(change).decode() if as_json else rescored_line(change))
    if not as_json:
        click.echo(f"{members} members of {len(wanted)} steps scored again: {count} differ")
    return 1 if count else 0


def _scorer(log: "Log", allow_code: Sequence[str]) -> Callable[["Trajectory"], float]:
    from rollout.reward import get_scorer

    settings = _config_of(log).reward
    scorer = get_scorer(settings.scorer, settings, allow_code)
    return lambda trajectory: scorer.score(trajectory).value


def _show_trajectory(log: "Log", place: str, allow_code: Sequence[str]) -> None:
    from rich.console import Console

    from core.errors import ConfigError
    from learner.show import show_trajectory

    uid, _, rest = place.partition("/")
    tree, _, leaf = rest.partition("/")
    if not (uid and tree.lstrip("t").isdecimal() and leaf):
        raise ConfigError(f"--trajectory {place!r}: expected UID/TREE/LEAF such as 000012.0/1/0.0.2")
    show_trajectory(
        log,
        uid,
        int(tree.lstrip("t")),
        leaf,
        _offline_tokenizer(log),
        Console(),
        load=_code_loader(allow_code),
    )


def _write_page(
    log: "Log", out: Path, steps: Sequence[int] | None, max_trajectories: int, allow_code: Sequence[str]
) -> None:
    from learner.page.render import write_page

    summary = write_page(
        log, _offline_tokenizer(log), out, steps=steps, max_trajectories=max_trajectories,
        load=_code_loader(allow_code),
    )  # fmt: skip
    _echo(
        f"wrote {summary.path}: {summary.steps} steps, {summary.groups} groups, {summary.trajectories} "
        f"trajectories, {summary.size / 1e6:.1f} MB" + (f"; {summary.cut}" if summary.cut else "")
    )


@main.command()
@_run_option
@_allow_code_option
@click.option("--html", "out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File.")
@click.option(
    "--max-trajectories", type=click.IntRange(min=1), default=1000, show_default=True, help="In it, at most."
)
def report(run_dir: Path, allow_code: tuple[str, ...], out: Path, max_trajectories: int) -> None:
    """Write the whole run as one self-contained page."""
    from store.log import open_log

    _check_target(out)
    with open_log(run_dir, readonly=True) as log:
        _write_page(log, out, None, max_trajectories, allow_code)


@main.command()
@_run_option
@click.option(
    "--head", metavar="HASH", help="A hash that --json printed before: it must still be in the chain."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def verify(run_dir: Path, head: str | None, as_json: bool) -> None:
    """Check every record, chain, digest and the books.

    Exit status 1 when something is wrong.
    """
    import msgspec

    from core.errors import ConfigError
    from store.verify import verify as verify_log

    if head is not None and not (len(head) == 64 and all(digit in "0123456789abcdef" for digit in head)):
        raise ConfigError(f"--head {head!r}: expected 64 hexadecimal digits, as `verify` prints them")
    findings = verify_log(run_dir, head)
    if as_json:
        click.echo(msgspec.json.encode({"findings": findings, "head": _head(run_dir, findings)}).decode())
    else:
        for finding in findings:
            click.echo(f"{finding.kind} {finding.key}: {finding.message}")
        count = f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"
        click.echo(count if findings else f"sound; head {_head(run_dir, findings)}")
    sys.exit(1 if findings else 0)


def _head(run_dir: Path, findings: Sequence[object]) -> str:
    from store.log import open_log

    if findings:
        return ""
    with open_log(run_dir, readonly=True) as log:
        return log.journal.head()


@main.command()
@_run_option
@_allow_code_option
@click.option("--rescore", is_flag=True, help="Also look for rewards that the text does not support.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def lint(run_dir: Path, allow_code: tuple[str, ...], rescore: bool, as_json: bool) -> None:
    """Look for what has bitten others.

    Exit status 1 when something was found.
    """
    import msgspec

    from learner.lint import Linter, lint_lines
    from learner.lint import lint as lint_run
    from store.log import open_log

    with open_log(run_dir, readonly=True) as log:
        score = _scorer(log, allow_code) if rescore else None
        findings = lint_run(log, Linter(rescore=score, load=_code_loader(allow_code)))
    click.echo(msgspec.json.encode(findings).decode() if as_json else "\n".join(lint_lines(findings)))
    sys.exit(1 if findings else 0)


@main.command()
@_run_option
@click.option("--errors", is_flag=True, help="Why wrong leaves are wrong.")
@click.option("--staleness", is_flag=True, help="How old trained groups were.")
@click.option("--budget", is_flag=True, help="What rollouts cost, trees beside chains.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def stats(run_dir: Path, errors: bool, staleness: bool, budget: bool, as_json: bool) -> None:
    """Tell the numbers of a run.

    All of them when none is named.
    """
    import msgspec

    from learner import stats as numbers
    from store.log import open_log

    every = not (errors or staleness or budget)
    found: dict[str, object] = {}
    lines: list[str] = []
    with open_log(run_dir, readonly=True) as log:
        if staleness or every:
            ages = numbers.staleness_report(log)
            found["staleness"] = ages
            lines += numbers.staleness_lines(ages)
        if budget or every:
            report = numbers.budget_report(numbers.groups_of(log))
            found["budget"] = numbers.budget_facts(report)
            lines += numbers.budget_lines(report)
        if errors or every:
            wrong = numbers.error_report(numbers.groups_of(log))
            found["errors"] = wrong
            lines += numbers.error_lines(wrong)
    click.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(lines))


@main.command()
@click.option(
    "--run",
    "run_dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="A run's; else a new one's.",
)
@click.option("--preset", default="", help=PRESET_HELP)
@click.option("--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file.")
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="One setting; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def settings(
    run_dir: Path | None, preset: str, config_file: Path | None, assignments: tuple[str, ...], as_json: bool
) -> None:
    """Print every setting and its value, as TOML.

    A new run's with the options given, or a run's frozen ones. `--config` takes what is printed.
    """
    import msgspec

    from core.errors import ConfigError
    from core.settings import build_config
    from core.toml import config_lines
    from store.log import open_log

    if run_dir is None:
        config = build_config(preset, _read_tables(config_file), assignments)
    elif preset or config_file or assignments:
        raise ConfigError("--run prints what that run has: leave out --preset, --config and --set")
    else:
        with open_log(run_dir, readonly=True) as log:
            config = _config_of(log)
    click.echo(msgspec.json.encode(config).decode() if as_json else "\n".join(config_lines(config)))


@main.group()
def estimators() -> None:
    """List advantage estimators, or compare them."""


@estimators.command("list")
def estimators_list() -> None:
    """Name every estimator with its formula."""
    from core.advantage import ESTIMATORS

    for name, function in ESTIMATORS.items():
        formula = (function.__doc__ or "").strip().splitlines()[0].removeprefix("Return ")
        click.echo(f"{name:<12} {formula}")


@estimators.command("compare")
@_run_option
@_allow_code_option
@click.argument("names", nargs=-1, required=True)
@click.option("--steps", default="", metavar="A:B", help="Steps A to B, both included; all when left out.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the comparison.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def estimators_compare(
    run_dir: Path,
    allow_code: tuple[str, ...],
    names: tuple[str, ...],
    steps: str,
    png: Path | None,
    as_json: bool,
) -> None:
    """Compare estimators on recorded rollouts.

    The first named is the reference.
    """
    import msgspec

    from core.errors import ConfigError
    from learner.compare import compare, compare_lines
    from store.log import open_log

    _check_target(png, PICTURES)
    with open_log(run_dir, readonly=True) as log:
        wanted = _step_range(None, steps, not steps, log)
        if not wanted:
            raise ConfigError(f"{str(run_dir)!r} has no committed step yet: there is nothing to compare")
        found = compare(log, wanted, names, _code_loader(allow_code))
    click.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(compare_lines(found)))
    if png is not None:
        from learner.drawing import draw_comparison

        draw_comparison(found, png)


@main.command()
@_run_option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def checkpoints(run_dir: Path, as_json: bool) -> None:
    """List saved states, how they did, and whether they still exist."""
    import msgspec

    from learner.checkpoints import checkpoint_lines, list_checkpoints
    from store.log import open_log

    with open_log(run_dir, readonly=True) as log:
        found = list_checkpoints(log)
        if found:
            found = list_checkpoints(log, _kept_at_service(log))
    click.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(checkpoint_lines(found)))


def _kept_at_service(log: "Log") -> set[str] | None:
    """Return the URIs that the run's service still has; None, and why is told, when it cannot be asked."""
    import time

    from core.config import from_plain
    from core.errors import EngineError
    from engine.client import connect

    opened = log.run_event()
    assert opened is not None
    try:
        with connect(from_plain(opened.config).engine, log.run_dir) as session:
            saved = session.list_checkpoints()
    except (EngineError, OSError) as exc:
        _echo(f"whether they still exist is not known: {exc}")
        return None
    now = time.time()
    return {one.uri for one in saved if one.expires_at is None or one.expires_at > now}


@main.command()
@_run_option
@_allow_code_option
@click.option("--group", "uid", default="", metavar="UID", help="One group's trees.")
@click.option("--trajectory", default="", metavar="UID/TREE/LEAF", help="One conversation, token by token.")
@click.option("--follow", is_flag=True, help="Stay, and show a live run.")
def show(run_dir: Path, allow_code: tuple[str, ...], uid: str, trajectory: str, follow: bool) -> None:
    """Look at a run in the terminal."""
    from rich.console import Console

    from core.errors import ConfigError
    from learner.show import show_group, show_run
    from store.log import open_log

    if bool(uid) + bool(trajectory) + follow > 1:
        raise ConfigError("--group, --trajectory and --follow show different things: name one")
    with open_log(run_dir, readonly=True) as log:
        if trajectory:
            _show_trajectory(log, trajectory, allow_code)
        elif uid:
            show_group(log, uid, Console(), load=_code_loader(allow_code))
        else:
            show_run(log, Console(), follow=follow)


@main.command("export")
@_run_option
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@click.option(
    "--format", "form", type=click.Choice(["bundle", "jsonl", "parquet"]), help="Default: by the ending."
)
def export_command(run_dir: Path, out: Path, form: str | None) -> None:
    """Write the complete groups to a file.

    bundle: byte for byte, for `import`. jsonl, parquet: one row per trajectory, also for `import`.
    """
    from store.log import open_log

    form = _file_format(out, form)
    _check_target(out)
    export, _ = _exchange(form)
    rows = "groups" if form == "bundle" else "trajectories"
    with open_log(run_dir, readonly=True) as log:
        click.echo(f"wrote {export(log, out)} {rows} to {out}")


@main.command("import")
@_run_option
@click.option("--from", "source", required=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="File that `export` wrote.")  # fmt: skip
@click.option(
    "--format", "form", type=click.Choice(["bundle", "jsonl", "parquet"]), help="Default: by the ending."
)
def import_command(run_dir: Path, source: Path, form: str | None) -> None:
    """Enter exported groups into a fresh log.

    The run that they belong to goes with them.
    """
    import shutil

    from store.log import open_log

    _, enter = _exchange(_file_format(source, form))
    new = not run_dir.exists()
    try:
        with open_log(run_dir, create=True) as log:
            click.echo(f"entered {enter(log, source)} groups into {run_dir}")
    except BaseException:
        if new:  # nobody else knows of it yet
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _file_format(path: Path, form: str | None) -> str:
    """Return the format that was named, or that the file's ending names."""
    from core.errors import ConfigError

    form = form or {".jsonl": "jsonl", ".parquet": "parquet", ".bundle": "bundle"}.get(path.suffix)
    if form is None:
        raise ConfigError(f"{str(path)!r}: name the --format, one of bundle, jsonl and parquet")
    return form


def _exchange(form: str) -> tuple[Callable[..., int], Callable[..., int]]:
    """Return how a format is written and read."""
    from core.errors import ConfigError

    match form:
        case "bundle":
            from store.bundlefile import export_bundles, import_bundles

            return export_bundles, import_bundles
        case "jsonl":
            from store.jsonl import export_jsonl, import_jsonl

            return export_jsonl, import_jsonl
        case _:
            try:
                from store.parquet import export_parquet, import_parquet
            except ImportError as error:
                raise ConfigError("Parquet needs pyarrow: pip install 'rolltape[parquet]'") from error
            return export_parquet, import_parquet


@main.command()
@_run_option
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="New directory.")
def backup(run_dir: Path, out: Path) -> None:
    """Copy the log, also while it is in use."""
    from store.copying import backup as copy_log

    click.echo(f"wrote {copy_log(run_dir, out)}")


@main.command()
@_run_option
def compact(run_dir: Path) -> None:
    """Rewrite the log without its free space.

    Nobody may have it open.
    """
    from store.copying import compact as compact_log

    done = compact_log(run_dir)
    click.echo(f"{done.before:,} → {done.after:,} bytes")


@main.command()
@_run_option
def rebuild(run_dir: Path) -> None:
    """Make the log's views anew from its journal."""
    from store.rebuilding import rebuild as rebuild_log

    click.echo(f"{rebuild_log(run_dir)} rows made anew")


@main.command()
@_folder_option
@click.option(
    "--train", multiple=True, type=click.Path(path_type=Path, exists=True), help="Parquet or JSONL."
)
@click.option(
    "--eval", "evaluation", multiple=True, type=click.Path(path_type=Path, exists=True), help="As --train."
)
@click.option("--modelscope", "name", default="", metavar="NAME", help="e.g. PeterJinGo/nq_hotpotqa_train.")
@click.option("--revision", default="master", show_default=True, help="With --modelscope.")
@click.option("--mix", default="search-r1", show_default=True, help="search-r1, single-hop, multi-hop, ...")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the mixture's choice.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def prepare(
    out: Path, train: tuple[Path, ...], evaluation: tuple[Path, ...], name: str, revision: str, mix: str,
    seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Turn published data sets into question files."""
    import msgspec

    from core.errors import ConfigError
    from rollout.download import download_questions
    from rollout.prepare import prepare as prepare_questions

    if name:
        files = download_questions(name, revision, out / "download")
        train += tuple(path for path in files if "train" in path.name)
        evaluation += tuple(path for path in files if "train" not in path.name)
    if not train or not evaluation:
        raise ConfigError("name the files: --train FILE and --eval FILE (repeatable), or --modelscope NAME")
    found = prepare_questions(out, train, evaluation, mix=mix, seed=seed, notify=_echo)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    for part, counts in found.counts.items():
        sources = "  ".join(f"{source} {count}" for source, count in counts.items())
        click.echo(f"{part}: {sum(counts.values())} questions  {sources}")
    for reason, count in found.dropped.items():
        click.echo(f"dropped {count}: {reason} (listed in {out / 'dropped.jsonl'})")


@main.command()
@click.option(
    "--run", "run_dir", type=click.Path(path_type=Path, file_okay=False), help="Run directory (new)."
)
@click.option("--steps", type=click.IntRange(min=1), default=25, show_default=True, help="Training steps.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=0,
    help="Ask only the first N held-out questions; 0 asks all.",
)
@click.option("--preset", default="demo", show_default=True, help="demo, or demo-tree.")
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="One setting; may be repeated."
)
def demo(run_dir: Path | None, steps: int, limit: int, preset: str, assignments: tuple[str, ...]) -> None:
    """Do the main job, offline, in minutes.

    rollout and learn as two processes, evaluations before and after, and a replay of every step.
    """
    import time

    from learner.demo import Demo, run_demo

    if run_dir is None:
        run_dir = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    command = [sys.executable, str(Path(__file__).resolve())]
    sys.exit(run_demo(Demo(command, run_dir, steps, preset, assignments, limit)))


@main.group()
def engine() -> None:
    """Look after the embedded engine."""


@engine.command("status")
@_run_option
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def engine_status(run_dir: Path, as_json: bool) -> None:
    """Show whether an engine runs, and what it holds."""
    import msgspec

    from engine.launch import status

    found = status(run_dir)
    plain = msgspec.to_builtins(found)
    if plain.get("address"):
        plain["address"].pop("token", None)
    if as_json:
        click.echo(msgspec.json.encode(plain).decode())
    else:
        click.echo("running" if found.running else "not running")
        facts = plain | (plain.pop("address") or {})
        for name, value in facts.items() if found.running else ():
            if name not in ("running", "address"):
                click.echo(f"  {name.replace('_', ' '):<16}  {value}")


@engine.command("stop")
@_run_option
@click.option("--force", is_flag=True, help="Even while commands use it; they will fail.")
def engine_stop(run_dir: Path, force: bool) -> None:
    """End the run's engine."""
    from engine.launch import stop

    click.echo("stopped" if stop(run_dir, force=force) else "it was not running")


@engine.command("serve")
@_run_option
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0 picks a free one.")
def engine_serve(run_dir: Path, port: int) -> None:
    """Run an engine for any PyTRIO program.

    In the foreground; prints the variables to set.
    """
    from engine.launch import serve

    serve(run_dir, port=port)


@engine.command("world")
@_folder_option
@click.option("--seed", type=int, default=0, show_default=True, help="Of the world's names and facts.")
def engine_world(out: Path, seed: int) -> None:
    """Write the generated world as JSONL."""
    from engine.embedded.world import write_world

    files = write_world(out, seed)
    click.echo(f"wrote {files.corpus} and {len(files.questions)} question files")


@engine.command("pretrain")
@_folder_option
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights and the training order.")
def engine_pretrain(out: Path, seed: int) -> None:
    """Rebuild the embedded engine's base model (some minutes)."""
    from engine.embedded.pretrain import pretrain

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            _echo(f"step {step}/{steps}  loss {loss:.4f}")

    click.echo(pretrain(out, seed=seed, progress=progress))


if __name__ == "__main__":
    main()
