"""The fixed text around the variable parts of a trajectory, by tool protocol."""

from typing import Final, NamedTuple

from transformers import PreTrainedTokenizerFast

from engine.embedded.scripts import Script
from engine.embedded.spelling import EOS
from engine.embedded.world import PROMPTS, SEARCH_TOOL

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


def qwen_frame(tokenizer: PreTrainedTokenizerFast) -> Frame:
    """Cut a rendering of the Qwen3.5 template apart at its variable parts."""
    call = {"function": {"name": "search", "arguments": {"query": GAP}}}
    opening = [
        {"role": "system", "content": PROMPTS["qwen3_5"]},
        {"role": "user", "content": GAP},
    ]
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": GAP},
    ]
    text = tokenizer.apply_chat_template(
        [*opening, *turn],
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


def search_r1_frame(tokenizer: PreTrainedTokenizerFast) -> Frame:
    """Tags inside one assistant turn, as in Search-R1 and Tree-GRPO."""
    messages = [
        {"role": "system", "content": PROMPTS["search_r1"]},
        {"role": "user", "content": GAP},
    ]
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, tokenize=False
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


def frames(tokenizer: PreTrainedTokenizerFast) -> dict[str, Frame]:
    """Frames of the protocols that the base model is trained in."""
    return {"qwen3_5": qwen_frame(tokenizer), "search_r1": search_r1_frame(tokenizer)}


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
