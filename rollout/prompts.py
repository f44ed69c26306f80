"""Owns the named prompt templates and how a file overrides them. What a run uses is frozen into its log."""

import tomllib
from pathlib import Path

import msgspec

from core.errors import ConfigError

QUESTION = "{question}"
"""The place of the question in a user template."""


class PromptTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the policy is told."""

    system: str = ""
    """"" sends no system message."""
    user: str = QUESTION


DEMO = PromptTemplate(
    system=(
        "Answer the question. Use the search tool to find evidence; one call per turn. "
        "When you know the answer, end with one line: Answer: <short answer>"
    )
)
"""What the embedded engine's base model was pretrained with, for protocol qwen3_5."""

DEMO_TAGS = PromptTemplate(
    system=(
        "Answer the given question. Think inside <think> and </think>. To search, write <search> query "
        "</search>; results come between <information> and </information>. When you know the answer, "
        "write <answer> short answer </answer>."
    )
)
"""The same for protocol search_r1."""

SEARCH_R1 = PromptTemplate(
    system=(
        "You answer questions of fact with the help of a search tool.\n"
        "Search whenever you need evidence; you may search several times. Write short English queries.\n"
        "Make exactly one search call in a turn, then wait for its result before you go on.\n"
        "When you know the answer, end with exactly one non-empty line of this form:\n"
        "Answer: <your short answer>\n"
        "Never make a call and give the answer in the same turn.\n\n"
        "Example of a question that takes two searches:\n"
        "Question: In which country was the author of Pippi Longstocking born?\n"
        '1. Search for "Pippi Longstocking author".\n'
        "2. The result names Astrid Lindgren.\n"
        '3. Search for "Astrid Lindgren country of birth".\n'
        "4. The result names Sweden.\n"
        "5. In a turn of its own, answer:\n"
        "Answer: Sweden"
    )
)
"""Search-R1 on the hosted service: native tool calls, `Answer:` line, one worked example."""

TREE_GRPO = PromptTemplate(
    user=(
        "Answer the given question. Each time you get new information, first reason inside <think> and "
        "</think>. If you then find that you lack some knowledge, call a search engine with <search> query "
        "</search>; the top results come back between <information> and </information>. You can search as "
        "many times as you want. When no further knowledge is needed, give the answer inside <answer> and "
        "</answer>, without any explanation. For example, <answer> Beijing </answer>. Question: {question}\n"
    )
)
"""Search-R1's published tags, as Tree-GRPO uses them: everything in the user message."""

PROMPTS: dict[str, PromptTemplate] = {
    "demo": DEMO,
    "demo-tags": DEMO_TAGS,
    "search-r1": SEARCH_R1,
    "tree-grpo": TREE_GRPO,
}

DEFAULTS = {"qwen3_5": "search-r1", "hermes": "search-r1", "search_r1": "tree-grpo"}
"""Template by protocol, where the run names none."""


def load_prompt(name: str, protocol: str) -> PromptTemplate:
    """Return the template called `name`, the one in the TOML file `name`, or the protocol's own if "".

    Raises ConfigError when there is none, or when its user text has no place for the question.
    """
    name = name or DEFAULTS.get(protocol, "search-r1")
    if name in PROMPTS:
        return PROMPTS[name]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(PROMPTS)
        raise ConfigError(f"setting 'rollout.prompt': {name!r} is neither one of {known} nor a file")
    try:
        template = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), PromptTemplate)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"prompt file {name!r}: {error}; expected TOML with the strings system and user"
        ) from error
    return check_prompt(template)


def check_prompt(template: PromptTemplate) -> PromptTemplate:
    """Return the template; raises ConfigError unless the question has exactly one place in it."""
    if template.user.count(QUESTION) != 1:
        raise ConfigError(
            f"user template {template.user[:60]!r} holds {QUESTION} {template.user.count(QUESTION)} times, "
            "expected exactly once"
        )
    return template
