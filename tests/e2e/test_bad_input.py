"""Bad input: one clear line, exit status 2, no traceback, nothing changed."""

import os
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT, Finished, cli


def refused(done: Finished, *words: str) -> None:
    """Check that a command refused its input in one line that holds `words`."""
    assert done.status == 2, done.out + done.err
    assert "Traceback" not in done.err
    lines = [line for line in done.err.splitlines() if line.startswith("rolltape: ")]
    assert len(lines) == 1, done.err
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--preset", "dem"), ("'dem'", "'demo'")),
        (("--preset", "demo", "--set", "learner.learning_rat=1"), ("'learner.learning_rate'",)),
        (("--preset", "demo", "--set", "learner.loss=pp"), ("'pp'", "'ppo'")),
        (("--preset", "demo", "--set", "rollout.group_size=0"), ("at least 1",)),
        (("--preset", "demo", "--set", "data.train=nowhere.jsonl"), ("nowhere.jsonl",)),
        (("--preset", "demo", "--set", "tools.search.corpus=nowhere.jsonl"), ("nowhere.jsonl",)),
        (("--preset", "demo", "--set", "rollout.protocol=qwen"), ("'qwen'",)),
        (("--preset", "demo", "--set", "reward.scorer=os:getcwd"), ("--allow-code",)),
        (("--preset", "demo", "--set", "rollout.prompt=nowhere"), ("'nowhere'",)),
        (("--preset", "demo", "--set", "learner.estimator=grop"), ("'grop'", "'grpo'")),
        (("--preset", "demo", "--set", "rollout.tree.expand=worst"), ("'worst'", "uncertainty")),
        (("--preset", "demo", "--set", 'tools.declared=["serch"]'), ("'serch'", "calculator")),
        (("--preset", "demo", "--set", "tools.search.backend=retrieval"), ("tools.search.url",)),
        (("--preset", "demo", "--set", "tools.search.url=localhost:8000"), ("'localhost:8000'", "http://")),
        (("--preset", "demo", "--set", "tools.search.backend=zhihu"), ("ZHIHU_SEARCH_KEYS",)),
        (("--preset", "demo", "--set", "tools.search.timeout=0"), ("more than 0",)),
        (("--preset", "demo", "--set", "tools.search.corpus=empty.jsonl"), ("empty.jsonl", "no passages")),
        (("--preset", "demo", "--set", "tools.search.corpus=odd.jsonl"), ("odd.jsonl line 1",)),
        (("--preset", "demo", "--set", 'tools.declared=["search", "search"]'), ("twice",)),
        (("--preset", "demo", "--set", "learner.learning_rate=inf"), ("finite",)),
        (("--preset", "demo", "--set", "learner.loss_config={clip=3.0}"), ("'clip'", "takes no settings")),
        (
            ("--preset", "demo", "--set", "learner.loss=gspo", "--set", "learner.loss_config.beta=1"),
            ("'beta'",),
        ),
        (("--preset", "demo", "--set", "run.seed=-1"), ("'run.seed'", "at least 0")),
        (("--preset", "demo", "--set", "run.seed=99999999999999999999"), ("'run.seed'", "at most")),
        (("--preset", "demo", "--set", "rollout.temperature=0.5"), ("allow_off_distribution",)),
        (("--preset", "demo", "--set", "rollout.top_k=-7"), ("'rollout.top_k'",)),
        (("--preset", "demo", "--set", "engine.base_model=Qwen/Qwen3.5-4B"), ("engine.kind=pytrio",)),
        (("--preset", "demo", "--set", "budget.money=-1"), ("'budget.money'",)),
        (("--preset", "demo", "--set", "run.preset=search-r1"), ("'demo'", "'search-r1'")),
        (("--set", "run.preset=dem"), ("'dem'", "'demo'")),
        (("--config", "nowhere.toml"), ("nowhere.toml",)),
        ((), ("--preset",)),
    ],
)
def test_a_wrong_setting_is_one_line_and_writes_nothing(
    tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Nothing is made before every setting was checked."""
    run_dir = tmp_path / "run"
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "odd.jsonl").write_text('{"id": 1}\n')
    given = [
        word.replace("=empty", f"={tmp_path}/empty").replace("=odd", f"={tmp_path}/odd") for word in arguments
    ]
    refused(cli("rollout", "--run", run_dir, *given), *words)
    assert not run_dir.exists()


def test_a_malformed_questions_file_names_the_line(tmp_path: Path) -> None:
    """The third line is no JSON."""
    good = '{"id": "%d", "question": "Who?", "answers": ["me"], "data_source": "x"}\n'
    questions = tmp_path / "q.jsonl"
    questions.write_text(good % 1 + good % 2 + "{oops\n")
    run_dir = tmp_path / "run"
    refused(
        cli("rollout", "--run", run_dir, "--preset", "demo", "--set", f"data.train={questions}"),
        "q.jsonl",
        "3",
    )
    assert not run_dir.exists()


def test_no_write_permission_is_said(tmp_path: Path) -> None:
    """A file stands where the run directory should be made, which stops root as well."""
    (tmp_path / "file").write_text("")
    refused(cli("rollout", "--run", tmp_path / "file" / "run", "--preset", "demo"), "run directory")


def test_another_configuration_shows_both_values(finished_run: Path) -> None:
    """A conflicting setting is an error with the frozen and the wanted value; the same one is not."""
    done = cli("learn", "--run", finished_run, "--set", "learner.loss=ppo")
    refused(done, "learner.loss", "'importance_sampling'", "'ppo'")
    refused(cli("rollout", "--run", finished_run, "--preset", "search-r1"), "'demo'", "'search-r1'")
    assert cli("learn", "--run", finished_run, "--preset", "demo").status == 0


@pytest.mark.parametrize("content", [b"", b"not a log" * 1000, b"\0" * 8192])
@pytest.mark.parametrize("command", [("replay", "--all"), ("verify",), ("learn", "--max-steps", "1")])
def test_a_foreign_or_empty_log_is_refused_and_not_changed(
    tmp_path: Path, content: bytes, command: tuple[str, ...]
) -> None:
    """Files at the log's place that Rolltape did not write stay as they are."""
    log = tmp_path / "run" / "log"
    log.mkdir(parents=True)
    (log / "data.mdb").write_bytes(content)
    name, *rest = command
    done = cli(name, "--run", tmp_path / "run", *rest)
    assert done.status in ((1, 2) if name == "verify" else (2,)), done.out + done.err
    assert "Traceback" not in done.err
    assert (log / "data.mdb").read_bytes() == content


def test_a_missing_run_is_one_line(tmp_path: Path) -> None:
    """Commands that read need a run."""
    for command in (("replay", "--all"), ("verify",), ("stats",), ("lint",), ("checkpoints",)):
        name, *rest = command
        refused(cli(name, "--run", tmp_path / "none", *rest), "none")
    assert not (tmp_path / "none").exists()


def test_a_step_that_was_never_committed_is_one_line(finished_run: Path) -> None:
    """The error names the steps that there are."""
    refused(cli("replay", "--run", finished_run, "--step", 99), "99")
    refused(cli("replay", "--run", finished_run, "--steps", "1:9"), "0 to 2")
    refused(cli("replay", "--run", finished_run), "--all")


def test_the_hosted_service_without_credentials_says_what_to_do_at_once(tmp_path: Path) -> None:
    """No retries, no network: the error names both ways to sign in."""
    home = tmp_path / "home"
    home.mkdir()
    env = {name: value for name, value in ENVIRONMENT.items() if name != "PYTRIO_API_KEY"} | {
        "HOME": str(home)
    }
    started = time.monotonic()
    done = cli(
        "rollout", "--run", tmp_path / "run", "--preset", "search-r1", "--set", "engine.kind=pytrio",
        "--set", "engine.base_model=Qwen/Qwen3.5-4B", env=env,
    )  # fmt: skip
    refused(done, "trio login", "PYTRIO_API_KEY")
    assert time.monotonic() - started < 20
    assert not (tmp_path / "run").exists()


def test_help_names_every_command() -> None:
    """The help of the program and of each command answers without a run."""
    done = cli("--help")
    names = "rollout learn replay demo eval show stats verify estimators engine lint report checkpoints"
    for name in names.split():
        assert name in done.out
        assert cli(name, "--help").status == 0
    assert os.linesep in done.out


def test_changed_questions_are_refused(tmp_path: Path, run_dir: Path) -> None:
    """A ticket's question is fixed by the file; a file that changed since would ask others."""
    line = '{"id": "%d", "question": "Who is %d?", "answers": ["me"], "data_source": "x"}\n'
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(line % (n, n) for n in range(8)))
    given = ("--preset", "demo", "--set", f"data.train={questions}")
    assert cli("learn", "--run", run_dir, *given, "--max-steps", 0).status == 0
    questions.write_text("".join(line % (n, n + 1) for n in range(8)))
    refused(cli("rollout", "--run", run_dir), "q.jsonl", "changed")
