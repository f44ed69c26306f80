"""What README and the guides tell people to type: the README's commands run, every other one is understood."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import cli as program
from core.settings import PRESETS
from engine import launch
from tests.e2e.conftest import DEADLINE, ENVIRONMENT, ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("python cli.py ", "rolltape ")
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python cli\.py|rolltape) [^`]+)`")


def blocks(document: Path) -> Iterator[list[str]]:
    """Yield the command lines of each code block, continued lines joined, comments and prompts left out."""
    for block in FENCE.findall(document.read_text()):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        found = [line.strip().removeprefix("$ ") for line in lines]
        if commands := [line for line in found if line.startswith(OURS)]:
            yield commands


def words(line: str) -> list[str]:
    """Return the arguments of one of our command lines; what stands in brackets may be left out."""
    told = shlex.split(re.sub(r"\[[^]]*\]|> \S+", "", line), comments=True)
    return told[2:] if told[0] == "python" else told[1:]


def everywhere() -> list[str]:
    """Return every command line of ours in every document."""
    listed = [line for document in DOCUMENTS for commands in blocks(document) for line in commands]
    return listed + [line for document in DOCUMENTS for line in INLINE.findall(document.read_text())]


@pytest.mark.parametrize("line", everywhere())
def test_every_command_line_in_the_documents_is_understood(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands, options and the types of their values are those of the program; nothing is run."""
    for name in ("a.bundle", "questions.jsonl", "run.toml"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    command: click.Command = program.main
    left = [word for word in words(line) if word != "…"]
    while isinstance(command, click.Group):
        name = left[0] if left and left[0] in command.commands else "ask"  # what `eval` does by default
        left = left[1:] if name != "ask" else left
        command = command.commands[name]
    if not left and any(parameter.required for parameter in command.params):
        return  # the command is named, not used
    with command.make_context(line, left):
        pass


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Give a folder as a reader has it: the program in it, and questions and passages of one's own."""
    for name in ("cli.py", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    asked = [
        {"id": str(n), "question": f"Who wrote book {n}?", "answers": [f"Author {n}"], "data_source": "books"}
        for n in range(12)
    ]
    passages = [{"id": str(n), "contents": f"Book {n} was written by Author {n}."} for n in range(12)]
    for names, rows in ((("questions.jsonl", "train.jsonl"), asked), (("corpus.jsonl",), passages)):
        for name in names:
            (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    for run in (tmp_path / "runs").glob("*"):
        launch.stop(run, force=True)


def run_block(place: Path, commands: list[str]) -> dict[str, str]:
    """Run a block as two terminals would: `rollout` beside what follows it; return what each line printed."""
    home = place / "home"
    home.mkdir(exist_ok=True)
    env = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("ZHIHU")}
    env |= {"HOME": str(home), "COLUMNS": "80"}
    beside: dict[str, subprocess.Popen[str]] = {}
    told: dict[str, str] = {}
    try:
        for line in commands:
            process = subprocess.Popen(
                [sys.executable, "cli.py", *words(line)],
                cwd=place,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            if words(line)[0] == "rollout":
                beside[line] = process
                continue
            told[line] = process.communicate(timeout=DEADLINE)[0]
            assert process.returncode == 0, f"{line}\n{told[line]}"
        for line, process in beside.items():
            told[line] = process.communicate(timeout=DEADLINE)[0]
            hosted = "engine.kind=pytrio" in line
            assert process.returncode == (2 if hosted else 0), f"{line}\n{told[line]}"
            assert not hosted or "trio login" in told[line]
    finally:
        for process in beside.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
    return told


@pytest.mark.timeout(400)
def test_the_readme_works_from_top_to_bottom(place: Path) -> None:
    """Every command of ours in the README, in its order; the table of steps is the one that it shows."""
    readme = ROOT / "README.md"
    told: dict[str, str] = {}
    for commands in blocks(readme):
        told |= run_block(place, commands)
    learn = next(text for line, text in told.items() if "learn --run runs/a --max-steps 10" in line)
    text = readme.read_text()
    told_steps = [line for line in learn.splitlines() if line[:5] in {" step", " 0/10", " 9/10"}]
    assert len(told_steps) == 3
    assert told_steps[0] in text, "the table that the README shows"
    assert "10 steps are committed; stopped: goal" in learn
    assert any("MATCH" in text for line, text in told.items() if "replay" in line)


def test_the_help_names_every_preset() -> None:
    """Its text is written out, so that --help need not load the settings; it names all of them and no other."""
    first, _, second = program.PRESET_HELP.rstrip(".").partition(" with X ")
    names = first.replace(" and ", " ").replace(" or ", ", ").split(", ")
    kinds = second.split(", ")
    told = {
        kind.join(name.rsplit("X", 1)) for name in names for kind in (kinds if name.endswith("X") else [""])
    }
    assert told == set(PRESETS)
