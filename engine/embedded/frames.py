"""The fixed text around the variable parts of a trajectory, by tool protocol."""

from typing import Final, NamedTuple

from transformers import PreTrainedTokenizerFast

from engine.embedded.prompts import QUESTION, SEARCH_TOOL, Prompt
from engine.embedded.scripts import Script
from engine.embedded.spelling import EOS

GAP: Final = "\x00"


class Frame(NamedTuple):
    """The fixed text around the parts of a trajectory in one tool protocol.

    The forms are format strings with one place.
    """

    before_question: str
    after_question: str
    thought: str
    """Form of a thought before a call or an answer; empty if there is none."""
    query: str
    """Form of a call, with what ends the generation."""
    results: tuple[str, str]
    """Text before and after the content of an observation, up to the next generation."""
    answer: str
    """Form of an answer line."""
    ends_turn: bool
    """Whether a call ends the assistant's turn with the end-of-turn token."""


def _opening(prompt: Prompt) -> list[dict[str, object]]:
    system: list[dict[str, object]] = [{"role": "system", "content": prompt.system}]
    user: dict[str, object] = {"role": "user", "content": prompt.user.replace(QUESTION, GAP)}
    return [*(system if prompt.system else []), user]


def _qwen_frame(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> Frame:
    """Cut a rendering of the Qwen3.5 template apart at its variable parts."""
    call = {"function": {"name": "search", "arguments": {"query": GAP}}}
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": GAP},
    ]
    text = tokenizer.apply_chat_template(
        [*_opening(prompt), *turn],
        tools=[SEARCH_TOOL],
        add_generation_prompt=True,
        enable_thinking=False,
        tokenize=False,
    )
    before_question, middle, observed, after_results = text.split(GAP)
    after_query, before_results = observed.split(EOS, maxsplit=1)
    after_question, before_query = middle.split("<tool_call>")
    return Frame(
        before_question=before_question,
        after_question=after_question,
        thought="",
        query=f"<tool_call>{before_query}{{}}{after_query}{EOS}",
        results=(before_results, after_results),
        answer="Answer: {}",
        ends_turn=True,
    )


def _search_r1_frame(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> Frame:
    """Tags inside one assistant turn, as in Search-R1 and Tree-GRPO."""
    text = tokenizer.apply_chat_template(
        _opening(prompt), add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    before_question, after_question = text.split(GAP)
    return Frame(
        before_question=before_question,
        after_question=after_question,
        thought="<think> {} </think>\n",
        query="<search> {} </search>",
        results=("\n\n<information>", "</information>\n\n"),
        answer="<answer> {} </answer>",
        ends_turn=False,
    )


def make_frame(tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> Frame:
    """Find the fixed text of trajectories that open with `prompt`."""
    if prompt.protocol == "qwen3_5":
        return _qwen_frame(tokenizer, prompt)
    return _search_r1_frame(tokenizer, prompt)


def cut_script(frame: Frame, script: Script) -> list[tuple[str, bool]]:
    """Cut a script's text into stretches, each with whether the agent wrote it."""
    stretches = [(frame.before_question + script.question + frame.after_question, False)]
    for turn in script.turns:
        if turn.query is None:
            lines = [frame.answer.format(s.text) if s.marked else s.text for s in turn.final]
            thought = frame.thought.format(turn.final[0].text)
            stretches.append((thought + "\n".join(lines) + EOS, True))
        else:
            call = frame.thought.format(turn.query) + frame.query.format(turn.query)
            before, after = frame.results
            stretches += [(call, True), (f"{before}{turn.observation}{after}", False)]
    return stretches
