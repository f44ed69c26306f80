"""The prompts and the tool that the base model is trained with.

They are the templates that rollouts use by the same names; a test keeps the two equal. A foreign prompt
works too, but costs more tokens and finds a less able model.
"""

from typing import Final, NamedTuple

QUESTION: Final = "{question}"
"""The place of the question in a user text."""


class Prompt(NamedTuple):
    """What opens a conversation."""

    protocol: str
    system: str
    user: str = QUESTION


DEMO: Final = Prompt(
    "qwen3_5",
    "Answer the question. Use the search tool to find evidence; one call per turn. "
    "When you know the answer, end with one line: Answer: <short answer>",
)
DEMO_TAGS: Final = Prompt(
    "search_r1",
    "Answer the given question. Think inside <think> and </think>. To search, write <search> query "
    "</search>; results come between <information> and </information>. When you know the answer, "
    "write <answer> short answer </answer>.",
)
SEARCH_R1: Final = Prompt(
    "qwen3_5",
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
    "Answer: Sweden",
)
TREE_GRPO: Final = Prompt(
    "search_r1",
    "",
    "Answer the given question. Each time you get new information, first reason inside <think> and "
    "</think>. If you then find that you lack some knowledge, call a search engine with <search> query "
    "</search>; the top results come back between <information> and </information>. You can search as "
    "many times as you want. When no further knowledge is needed, give the answer inside <answer> and "
    "</answer>, without any explanation. For example, <answer> Beijing </answer>. Question: {question}\n",
)
PROMPTS: Final = {
    "demo": DEMO,
    "demo-tags": DEMO_TAGS,
    "search-r1": SEARCH_R1,
    "tree-grpo": TREE_GRPO,
}

SEARCH_TOOL: Final[dict[str, object]] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search for evidence. Use a concise query.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "The search query."}},
            "required": ["query"],
        },
    },
}
"""The tool as handed to the chat template."""


def fixed_texts() -> list[str]:
    """Texts of the prompts without the questions, as the chat template renders them."""
    texts = [prompt.system for prompt in PROMPTS.values() if prompt.system]
    return [*texts, TREE_GRPO.user.split(QUESTION)[0].rstrip()]
