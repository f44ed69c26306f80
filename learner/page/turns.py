"""Owns one turn's block: tokens packed, texts cut to their limit, call, observation and score beside them."""

from typing import NamedTuple

from core.arrays import view_tokens
from core.events import Observed, Rewarded
from core.nodes import NUMBER_BYTES, Node
from learner.page.derive import NodeCredit
from learner.page.model import Limits, NodeBlock, ObservationBlock, ScoreBlock
from learner.page.packing import Vocabulary, pack_floats

NAME = 200
"""Characters of a name: of a tool, a scorer, a document, a setting."""


class Inks(NamedTuple):
    """What every block of a page is written with."""

    vocabulary: Vocabulary
    limits: Limits


class Packed(NamedTuple):
    """Tokens as they stand on the page."""

    text: str
    total: int
    """Tokens there were."""
    cut: int
    """Of these, not on the page."""


def pack(raw: bytes, inks: Inks) -> Packed:
    """Return stored token bytes packed, without those beyond the limit."""
    tokens = view_tokens(raw)
    kept = tokens[: inks.limits.turn_tokens]
    return Packed(inks.vocabulary.pack(kept), len(tokens), len(tokens) - len(kept))


def cut(text: str, limit: int) -> str:
    """Return `text`, or its first `limit` characters and a remark on how many are missing."""
    return (
        text if len(text) <= limit else f"{text[:limit]}… [{len(text) - limit:,} more characters in the log]"
    )


def node_block(
    node: Node, place: tuple[int, int], credit: NodeCredit | None, inks: Inks, kl: bool
) -> NodeBlock:
    """Return one turn's block; `place` is its parent's position and its depth."""
    sample, answer, limit = node.sample, node.answer, inks.limits.text
    tokens = pack(sample.tokens, inks)
    kept = (tokens.total - tokens.cut) * NUMBER_BYTES
    call = node.tool_call
    return NodeBlock(
        node=node.node,
        parent=place[0],
        depth=place[1],
        tokens=tokens.text,
        logprobs=pack_floats(sample.sampled_logprobs[:kept]),
        reference=pack_floats(node.reference.logprobs[:kept]) if kl and node.reference else None,
        tokens_cut=tokens.cut,
        count=tokens.total,
        advantage=credit.advantage if credit else None,
        members=credit.members if credit else 0,
        tool=cut(call.tool, NAME) if call else None,
        arguments=[(cut(name, NAME), cut(str(value), limit)) for name, value in call.arguments.items()]
        if call
        else [],
        observation=_observation(node.observation, inks) if node.observation else None,
        outcome=answer.outcome.value if answer else None,
        answer=cut(answer.answer, limit) if answer and answer.answer is not None else None,
        detail=cut(answer.detail, limit) if answer else "",
        score=_score(node.reward) if node.reward else None,
        node_score=_score(node.node_reward) if node.node_reward else None,
        stop_reason=cut(sample.stop_reason, NAME),
        seed=sample.seed,
        request=sample.request,
        sample_index=sample.sample_index,
        policy_version=sample.policy_version,
        seconds=sample.seconds,
    )


def _observation(seen: Observed, inks: Inks) -> ObservationBlock:
    tokens = pack(seen.tokens, inks)
    reset = pack(seen.prompt_reset, inks) if seen.prompt_reset is not None else None
    return ObservationBlock(
        tokens=tokens.text,
        tokens_cut=tokens.cut,
        reset=reset.text if reset else None,
        reset_cut=reset.cut if reset else 0,
        ok=seen.ok,
        status=cut(seen.status, NAME),
        error=cut(seen.error, inks.limits.text),
        backend=cut(seen.backend, NAME),
        latency=seen.latency,
        cached=seen.cached,
        truncated=seen.truncated,
        documents=[cut(document, NAME) for document in seen.document_ids[:100]],
    )


def _score(rewarded: Rewarded) -> ScoreBlock:
    return ScoreBlock(
        value=rewarded.value,
        scorer=cut(rewarded.scorer, NAME),
        version=cut(rewarded.scorer_version, NAME),
        components=[(cut(name, NAME), value) for name, value in sorted(rewarded.components.items())],
    )
