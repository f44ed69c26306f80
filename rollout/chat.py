"""Owns token in, token out: prompts, and what follows a sampled turn, for one tokenizer and protocol.

The next prompt = previous prompt + sampled ids + the closing tokens that the sampler did not already return
+ the rendered observation. Sampled ids are never re-tokenised. Retrieved text and questions are data: they
can never become protocol tokens (see encoding.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from core.arrays import Int32
from rollout.encoding import Encoder, Message, Piece, Tokenizer
from rollout.observations import Block, Fitted, fit, plain_block, strip_pieces, text_of
from rollout.prompts import QUESTION, PromptTemplate, check_prompt
from rollout.protocols import Parsed, ToolProtocol
from rollout.rendering import QUESTION_MARK, RESULT_MARK, find_frames, make_render
from rollout.toolspec import ToolSpec

INFORMATION_HEAD = "\n\n<information>"
INFORMATION_TAIL = "</information>\n\n"
"""Search-R1's frame of a result inside an assistant turn."""


class Exchange(NamedTuple):
    """A turn of the past: what the policy wrote and what it was told."""

    text: str
    content: str


class Rendered(NamedTuple):
    """What follows a sampled turn."""

    tokens: Int32
    """int32 [n]: closing tokens + observation + next generation prompt."""
    content: str
    """The observation's text, without the frame."""
    prompt_reset: Int32 | None = None
    """int32 [m]: the whole next prompt, where history is rewritten as the template would."""


class Chat:
    """One way of talking: tokenizer, protocol, tools and prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        protocol: ToolProtocol,
        tools: Sequence[ToolSpec],
        template: PromptTemplate,
        *,
        enable_thinking: bool = False,
        rewrite_history: bool = False,
    ) -> None:
        self.protocol = protocol
        self.tools = tuple(tools)
        self.encoder = Encoder(tokenizer)
        declared = self.tools if protocol.declares_tools else ()
        self._render = make_render(tokenizer, declared, enable_thinking=enable_thinking)
        self._opening = _opening(check_prompt(template))
        self._frames = find_frames(self._render, self._opening, tool_role=protocol.declares_tools)
        self._closing = self.encoder.encode((Piece(self._frames.closing, trusted=True),))
        self._rewrites = rewrite_history and self._frames.rewrites
        end = tokenizer.eos_token
        self.stop = (*protocol.stop(self.tools), *([end] if end else []))

    def __repr__(self) -> str:
        return f"<Chat {self.protocol.name}, tools {', '.join(tool.name for tool in self.tools) or 'none'}>"

    @property
    def opened(self) -> bool:
        """Whether the generation prompt ends inside a thinking block."""
        return self._frames.opened

    def first_prompt(self, question: str) -> Int32:
        """Return the prompt of a question, int32 [n], generation prompt included."""
        frames = self._frames
        head, tail = Piece(frames.prompt_head, trusted=True), Piece(frames.prompt_tail, trusted=True)
        return self.encoder.encode((head, Piece(question.strip()), tail))

    def text(self, tokens: Int32) -> str:
        """Return the text of sampled tokens, without special tokens."""
        return self.encoder.decode(tokens)

    def parse(self, text: str, stop_reason: str) -> Parsed:
        """Return the protocol's verdict on a sampled turn."""
        return self.protocol.parse(text, self.tools, stop_reason=stop_reason, opened=self.opened)

    def kept_tokens(self, sampled: Int32, text: str, parsed: Parsed) -> int:
        """Return how many leading tokens hold the turn up to the end of its action (all, as a rule)."""
        if not self.protocol.corrects_invalid or parsed.kept >= len(text):
            return len(sampled)
        low, high = 0, len(sampled)
        while low < high:
            middle = (low + high) // 2
            if len(self.text(sampled[:middle])) >= parsed.kept:
                high = middle
            else:
                low = middle + 1
        return low

    def fit_results(self, blocks: Sequence[Block], max_tool_tokens: int) -> Fitted:
        """Return the results that fit into `max_tool_tokens` tokens of content."""
        return fit(self.encoder, blocks, max_tool_tokens)

    def after_observation(
        self, sampled: Int32, pieces: Block, *, question: str = "", past: Sequence[Exchange] = ()
    ) -> Rendered:
        """Return what follows a turn whose tool answered `pieces` (of fit_results).

        `question` and `past`, this turn included with content "", matter only where history is rewritten.
        """
        pieces = strip_pieces(pieces)
        if self.protocol.declares_tools:
            frame = self._frames.result_head, self._frames.result_tail
        else:
            frame = INFORMATION_HEAD, INFORMATION_TAIL
        body = (Piece(frame[0], trusted=True), *pieces, Piece(frame[1], trusted=True))
        rendered = Rendered(self._follow(sampled, body), text_of(pieces))
        if not self._rewrites:
            return rendered
        current = past[-1]._replace(content=rendered.content)
        return rendered._replace(prompt_reset=self._whole(question, [*past[:-1], current]))

    def after_invalid(self, sampled: Int32, problem: str) -> Rendered:
        """Return the correction that follows an invalid turn, for protocols that correct."""
        content = self.protocol.correction(problem)
        return Rendered(self._follow(sampled, (Piece(content, trusted=True),)), content)

    def _follow(self, sampled: Int32, body: Sequence[Piece]) -> Int32:
        """Join the missing closing tokens and the body; a turn that goes on is not closed."""
        returned = _overlap(sampled, self._closing)
        closing = self._closing[returned:]
        if not self.protocol.declares_tools:
            # The tags' observations stand inside the assistant's turn: reopen it if the policy ended it.
            if not returned:
                return self.encoder.encode(body)
            body = (Piece(self._frames.generation, trusted=True), *body)
        return np.concatenate([closing, self.encoder.encode(body)])

    def _whole(self, question: str, past: Sequence[Exchange]) -> Int32:
        """Render the whole conversation as the template would, its data kept apart."""
        messages = list(self._opening)
        for exchange in past:
            messages.append({"role": "assistant", "content": exchange.text})
            messages.append({"role": "tool", "content": RESULT_MARK})
        text = self._render(messages, True)
        head, _, rest = text.partition(QUESTION_MARK)
        pieces = [Piece(head, trusted=True), Piece(question.strip())]
        stretches = rest.split(RESULT_MARK)
        for stretch, exchange in zip(stretches, past, strict=False):
            pieces += [Piece(stretch, trusted=True), Piece(exchange.content)]
        pieces.append(Piece(stretches[-1], trusted=True))
        return self.encoder.encode(pieces)


def _opening(template: PromptTemplate) -> list[Message]:
    user: Message = {"role": "user", "content": template.user.replace(QUESTION, QUESTION_MARK)}
    if not template.system:
        return [user]
    return [{"role": "system", "content": template.system}, user]


def _overlap(tokens: Int32, closing: Int32) -> int:
    """Return how many of the closing tokens the sampled ones already end with."""
    for length in range(min(len(tokens), len(closing)), 0, -1):
        if np.array_equal(tokens[-length:], closing[:length]):
            return length
    return 0


__all__ = ["Chat", "Exchange", "Rendered", "plain_block"]
