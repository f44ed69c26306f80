"""Owns the command line: parses, builds the objects of one run, calls one function per command.

Heavy imports stand inside the commands, so that `--help` answers at once. Every user error becomes one
line on stderr and exit status 2; 1 means that a check found something (MISMATCH, a verify finding).
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

if TYPE_CHECKING:
    from core.config import Config
    from core.events import RunOpened
    from engine.client import Session
    from rollout.environment import Environment
    from store.log import Log, Role

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

F = TypeVar("F", bound=Callable[..., Any])

RUN_WAIT_SECONDS = 600.0
"""How long a command that names no preset waits for another one to create the run."""


class Given(NamedTuple):
    """What the user said about a run's configuration."""

    run_dir: Path
    preset: str
    tables: Mapping[str, object]
    assignments: Sequence[str]
    resume_from: str = ""


class Workplace(NamedTuple):
    """An open run: its log and its frozen configuration."""

    run_dir: Path
    log: "Log"
    config: "Config"
    opened: "RunOpened"


class _Group(click.Group):
    """Turns our errors into one line and exit status 2."""

    def invoke(self, ctx: click.Context) -> Any:
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


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="rolltape", message="rolltape %(version)s")
def main() -> None:
    """Event-sourced rollouts and a replayable trainer for LLM-agent reinforcement learning."""


def _run_option(function: F) -> F:
    return click.option(
        "--run", "run_dir", required=True, type=click.Path(path_type=Path, file_okay=False), help="Run directory."
    )(function)


def _config_options(function: F) -> F:
    """Add --run, --preset, --config and --set, and hand the command one `given`."""

    def command(
        run_dir: Path, preset: str, config_file: Path | None, assignments: tuple[str, ...], **rest: object
    ) -> Any:
        return function(Given(run_dir, preset, _read_tables(config_file), assignments), **rest)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__dict__.update(function.__dict__)
    command = click.option(
        "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="One setting; may be repeated."
    )(command)
    command = click.option(
        "--config", "config_file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings."
    )(command)
    command = click.option("--preset", default="", help="Named settings to start from, such as demo or search-r1.")(
        command
    )
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
    from core.config import from_plain
    from core.errors import ConfigError
    from core.settings import conflicts
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
        config = from_plain(opened.config)
        lines = conflicts(config, given.preset, given.tables, given.assignments)
        if lines:
            raise ConfigError(
                f"the run at {str(given.run_dir)!r} has another configuration; " + "; ".join(lines)
                + " (leave the setting out, or use another --run)"
            )
        yield Workplace(given.run_dir, log, config, opened)


def _wait_for_run(run_dir: Path) -> None:
    import time

    from core.errors import ConfigError

    click.echo(f"waiting for `rollout --run {run_dir} --preset NAME` to create the run …", err=True)
    deadline = time.monotonic() + RUN_WAIT_SECONDS
    while not _exists(run_dir):
        if time.monotonic() > deadline:
            raise ConfigError(f"no run appeared at {str(run_dir)!r} within {RUN_WAIT_SECONDS:.0f} s; pass --preset")
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
    from rollout.environment import freeze, prepare_world
    from store.log import open_log

    config = freeze(build_config(given.preset, given.tables, given.assignments), allow_code)
    _check_writable(given.run_dir)
    with connect(config.engine, given.run_dir) as session:
        prepare_world(config, given.run_dir)
        event = RunOpened(
            schema=SCHEMA_VERSION,
            config=to_plain(config),
            config_digest=config_digest(config),
            fingerprints=code_fingerprints() | session.fingerprints(),
            base_model=session.model_name,
            seed=config.run.seed,
            run_id=uuid.uuid4().hex,
            weights_uri=given.resume_from,
            at=time.time(),
        )
    with open_log(given.run_dir, create=True) as log:
        log.open_run(event)


def _check_writable(run_dir: Path) -> None:
    from core.errors import ConfigError

    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the run directory {str(run_dir)!r}: {error.strerror}") from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"no permission to write into the run directory {str(run_dir)!r}")


def _echo(line: str) -> None:
    click.echo(line, err=True)


@contextlib.contextmanager
def _session(place: Workplace) -> Iterator["Session"]:
    from engine.client import connect

    with connect(place.config.engine, place.run_dir) as session:
        yield session


def _environment(place: Workplace, session: "Session", allow_code: Sequence[str], **changes: Any) -> "Environment":
    from rollout.environment import build_environment

    return build_environment(
        place.config, session, place.run_dir, cache=place.log, allow_code=frozenset(allow_code), **changes
    )


def _allow_code_option(function: F) -> F:
    return click.option(
        "--allow-code", multiple=True, metavar="MODULE:FUNCTION", help="User code that may be imported; repeatable."
    )(function)


@main.command()
@_config_options
@_allow_code_option
@click.option("--quiet", is_flag=True, help="No progress lines.")
@click.option("--json", "as_json", is_flag=True, help="Progress as JSON lines.")
def rollout(given: Given, allow_code: tuple[str, ...], quiet: bool, as_json: bool) -> None:
    """Sample trajectories for the run until the learner's goal is reached."""
    from rollout.display import progress_display
    from rollout.environment import questions
    from rollout.run import Options, run_rollouts

    with (
        _workplace(given, "rollout", allow_code=allow_code) as place,
        _session(place) as session,
        progress_display(quiet=quiet, as_json=as_json) as voice,
    ):
        ending = _run_async(
            run_rollouts,
            place.log,
            place.config,
            questions(place.config, place.run_dir, "train"),
            _environment(place, session, allow_code),
            voice,
            Options(allow_code=allow_code),
        )
    _echo(f"rollout: ended: {ending}")


def _run_async(function: Callable[..., Any], *arguments: Any) -> Any:
    import anyio

    return anyio.run(function, *arguments)


@main.command()
@_config_options
@_allow_code_option
@click.option("--max-steps", type=click.IntRange(min=0), default=None, help="Stop after this many committed steps.")
@click.option("--resume-from", default="", metavar="URI", help="State to start from, before the first step.")
@click.option("--yes", is_flag=True, help="Recover without asking, whatever has to be sent again.")
@click.option("--quiet", is_flag=True, help="No line per step.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line per step.")
def learn(
    given: Given, allow_code: tuple[str, ...], max_steps: int | None, resume_from: str, yes: bool, quiet: bool,
    as_json: bool,
) -> None:
    """Train on completed groups, one optimizer step per logical batch."""
    from core.errors import ConfigError
    from learner.loop import Options, run_learner
    from learner.telling import tell_step
    from learner.work import Hooks

    with _workplace(given, "learner", wait=True, allow_code=allow_code) as place:
        goal = max_steps if max_steps is not None else place.log.state().max_steps
        if goal is None:
            raise ConfigError("how far should it train? Pass --max-steps N (later starts remember it)")
        with _session(place) as session:
            hooks = Hooks(
                notify=_echo,
                committed=lambda planned, committed: tell_step(committed, goal, quiet=quiet, as_json=as_json),
                confirm=lambda question: yes or (sys.stdin.isatty() and click.confirm(question)),
                load_code=_code_loader(allow_code),
            )
            ending = run_learner(place.log, session, place.config, goal, hooks, Options(resume_from=resume_from))
    _echo(f"learn: {ending.committed_steps} steps are committed; stopped: {ending.reason}")


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
        raise ConfigError(f"--steps {steps!r}: expected A:B such as 0:9 (both included; either may be left out)")
    return committed_steps(log, int(first) if first else None, int(last) if last else None)


@main.command()
@_run_option
@_allow_code_option
@click.option("--step", type=click.IntRange(min=0), help="One step.")
@click.option("--steps", default="", metavar="A:B", help="Steps A to B, both included.")
@click.option("--all", "every", is_flag=True, help="Every committed step.")
@click.option("--json", "as_json", is_flag=True, help="One JSON report per step.")
def replay(
    run_dir: Path, allow_code: tuple[str, ...], step: int | None, steps: str, every: bool, as_json: bool
) -> None:
    """Rebuild steps from rollout events alone and compare them with what was recorded."""
    from learner.fingerprints import code_fingerprints
    from learner.replay import Auditor, replay_steps
    from learner.telling import report_json, report_lines, summary_line
    from store.log import open_log

    with open_log(run_dir, readonly=True) as log:
        auditor = Auditor(log, code_fingerprints(), _code_loader(allow_code))
        matches = []
        for report in replay_steps(auditor, _step_range(step, steps, every, log)):
            matches.append(report.match)
            lines = [report_json(report)] if as_json else report_lines(report, whole=step is not None)
            click.echo("\n".join(lines))
    if not as_json and step is None:
        click.echo(summary_line(matches))
    sys.exit(0 if all(matches) else 1)


@main.command()
@click.option("--run", "run_dir", type=click.Path(path_type=Path, file_okay=False), help="Run directory (new).")
@click.option("--steps", type=click.IntRange(min=1), default=25, show_default=True, help="Training steps.")
@click.option("--preset", default="demo", show_default=True)
def demo(run_dir: Path | None, steps: int, preset: str) -> None:
    """The main job, offline: rollout and learn as two processes, evaluations, and a full replay."""
    import time

    from learner.demo import run_demo

    if run_dir is None:
        run_dir = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    command = [sys.executable, str(Path(__file__).resolve())]
    sys.exit(run_demo(command, run_dir, steps, preset))


@main.group()
def engine() -> None:
    """The embedded engine: status, stop, serve, world, pretrain."""


@engine.command("status")
@_run_option
@click.option("--json", "as_json", is_flag=True)
def engine_status(run_dir: Path, as_json: bool) -> None:
    """Show whether the run's engine is running, and what it holds."""
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
        for name, value in plain.items():
            click.echo(f"  {name}: {value}")


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
    """Run an engine in the foreground, for any PyTRIO program; prints the variables to set."""
    from engine.launch import serve

    serve(run_dir, port=port)


@engine.command("world")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", type=int, default=0, show_default=True)
def engine_world(out: Path, seed: int) -> None:
    """Write the generated world: questions and corpus as JSONL."""
    from engine.embedded.world import write_world

    files = write_world(out, seed)
    click.echo(f"wrote {files.corpus} and {len(files.questions)} question files")


@engine.command("pretrain")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", type=int, default=0, show_default=True)
def engine_pretrain(out: Path, seed: int) -> None:
    """Rebuild the embedded engine's base model (some minutes)."""
    from engine.embedded.pretrain import pretrain

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            _echo(f"step {step}/{steps}  loss {loss:.4f}")

    click.echo(pretrain(out, seed=seed, progress=progress))


if __name__ == "__main__":
    main()
