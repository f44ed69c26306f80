"""Sampling: independent of the batch, honest logprobs, and every way to stop."""

import math

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from engine.embedded.base_model import BASE_FOLDER
from engine.embedded.calls import AdamParams, Example, InputError, Loss, SampleRequest, Totals
from engine.embedded.choice import draw, filtered_weights, uniforms
from engine.embedded.compute import BaseModel, SamplerModel, TrainableModel

BASE = BaseModel.load()
SAMPLER = SamplerModel.from_base(BASE)


def encode(text: str) -> np.ndarray:
    """Token ids of a text."""
    return np.array(BASE.tokenizer.encode(text).ids, np.int32)


def demo_prompt(question: str = "Who is the mayor of Melk?") -> np.ndarray:
    """Render a prompt that the model knows what to do with."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BASE_FOLDER)
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    return encode(text)


def mixed_requests(count: int, seed: int = 0) -> list[SampleRequest]:
    """Draw requests of many lengths, sample counts and settings."""
    rng = np.random.default_rng(seed)
    return [
        SampleRequest(
            rng.integers(0, BASE.vocab_size, int(length)).astype(np.int32),
            max_tokens=int(rng.integers(1, 40)),
            num_samples=int(rng.integers(1, 5)),
            seed=number,
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
            top_p=float(rng.choice([1.0, 0.8])),
            top_k=int(rng.choice([-1, 20])),
            stop_token_ids=(10,),
        )
        for number, length in enumerate(rng.integers(1, 400, count))
    ]


def trainer_logprobs(model: TrainableModel, prompt: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Ask the trainer for the logprobs of sampled tokens."""
    row = np.concatenate([prompt, np.array(tokens, np.int32)])
    example = Example(row[:-1], row[1:])
    result = model.forward([example], Loss("cross_entropy", {}), Totals(1, 1, 1))
    return result.logprobs[0][len(prompt) - 1 :]


def test_results_do_not_depend_on_the_batch() -> None:
    """Alone, with 40 others of other lengths, or in another order: equal tokens and logprobs, to the bit."""
    requests = mixed_requests(41)
    together = SAMPLER.sample(requests)
    order = np.random.default_rng(1).permutation(len(requests))
    shuffled = SAMPLER.sample([requests[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place] == together[i]
    for request, result in zip(requests, together, strict=True):
        assert SAMPLER.sample([request]) == [result]


def test_fewer_samples_are_the_first_of_more() -> None:
    """Sample j of a request is the same whatever num_samples is."""
    request = SampleRequest(demo_prompt(), 30, num_samples=8, seed=7)
    eight = SAMPLER.sample([request])[0].sequences
    three = SAMPLER.sample([request._replace(num_samples=3)])[0].sequences
    assert eight[:3] == three
    assert len({tuple(s.tokens) for s in eight}) > 1


def test_seed_and_prompt_choose_the_draws() -> None:
    """Draws differ by seed, sample index and prompt, and are a prefix of longer ones."""
    prompt = np.array([1, 2, 3], np.int32)
    first = uniforms(1, 0, prompt, 4)
    assert (uniforms(1, 0, prompt, 9)[:4] == first).all()
    for other in (uniforms(2, 0, prompt, 4), uniforms(1, 1, prompt, 4), uniforms(1, 0, prompt[:2], 4)):
        assert (other != first).all()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_logprobs_are_the_trainers_at_any_temperature(temperature: float) -> None:
    """Sampled logprobs are of the untempered, unfiltered distribution, within 1e-5 of the trainer's."""
    model = TrainableModel.create(BASE, rank=8, seed=3)
    rng = np.random.default_rng(0)
    examples = [Example(*(rng.integers(0, BASE.vocab_size, (2, 20)).astype(np.int32)))]
    model.forward_backward(examples, Loss("cross_entropy", {}), Totals(1, 20, 0))
    model.optim_step(AdamParams(learning_rate=1e-2))
    sampler = SamplerModel.from_state(BASE, model.state_dict(optimizer=False))
    request = SampleRequest(demo_prompt(), 40, 4, 5, temperature, top_p=0.9, top_k=50)
    for sequence in sampler.sample([request])[0].sequences:
        gap = trainer_logprobs(model, request.prompt, sequence.tokens) - sequence.logprobs
        assert np.abs(gap).max() < 1e-5


def test_long_contexts_decode_like_the_trainer() -> None:
    """Across cache growth, up to the last position of the context, logprobs stay the trainer's."""
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, BASE.vocab_size, BASE.context - 200).astype(np.int32)
    request = SampleRequest(prompt, 5000, seed=1, temperature=5.0)
    sequence = SAMPLER.sample([request])[0].sequences[0]
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", 200)
    model = TrainableModel.create(BASE, rank=4, seed=0)
    gap = trainer_logprobs(model, prompt, sequence.tokens) - sequence.logprobs
    assert np.abs(gap).max() < 1e-5


def test_temperature_zero_takes_the_most_probable_token() -> None:
    """Greedy tokens are the first of the top-k list at their position."""
    prompt = demo_prompt()
    sequence = SAMPLER.sample([SampleRequest(prompt, 12, temperature=0.0)])[0].sequences[0]
    whole = np.concatenate([prompt, np.array(sequence.tokens, np.int32)])
    request = SampleRequest(whole, 1, return_prompt_logprobs=True, topk_prompt_logprobs=3)
    result = SAMPLER.sample([request])[0]
    assert result.topk_prompt_logprobs is not None
    assert result.prompt_logprobs is not None
    for position, token in enumerate(sequence.tokens, start=len(prompt)):
        top = result.topk_prompt_logprobs[position]
        assert top is not None
        assert top[0][0] == token
        assert top[0][1] == pytest.approx(result.prompt_logprobs[position])
        assert top[0][1] >= top[1][1] >= top[2][1]
    assert result.prompt_logprobs[0] is None
    assert result.topk_prompt_logprobs[0] is None


def test_the_end_of_turn_token_is_returned_and_has_no_text() -> None:
    """A finished turn ends with the end-of-turn id and its logprob; the text leaves it out."""
    result = SAMPLER.sample([SampleRequest(demo_prompt(), 200, 8, 0)])[0]
    finished = [s for s in result.sequences if s.stop_reason == "stop"]
    assert finished
    for sequence in finished:
        assert sequence.tokens[-1] == BASE.eos
        assert BASE.eos not in sequence.tokens[:-1]
        assert "<|im_end|>" not in sequence.text
        assert len(sequence.logprobs) == len(sequence.tokens)
        assert sequence.text.encode() == b"".join(BASE.token_bytes[t] for t in sequence.tokens[:-1])


def test_a_stop_string_may_span_tokens() -> None:
    """A sequence ends with the token that completes a stop string, and not before."""
    prompt = demo_prompt()
    free = SAMPLER.sample([SampleRequest(prompt, 60, temperature=0.0)])[0].sequences[0]
    pieces = [BASE.token_bytes[t].decode() for t in free.tokens]
    text = "".join(pieces[:4])
    stop = text[len(pieces[0]) - 1 : len(text) - len(pieces[3]) + 1]
    stopped = SAMPLER.sample([SampleRequest(prompt, 60, temperature=0.0, stop=("@@", stop))])[0]
    assert stopped.sequences[0].tokens == free.tokens[:4]
    assert stopped.sequences[0].stop_reason == "stop"


def test_a_special_token_works_as_a_stop_string() -> None:
    """Stopping at "<|im_end|>" by name is the same as stopping at the end of the turn."""
    request = SampleRequest(demo_prompt(), 60, 2, 1)
    assert SAMPLER.sample([request]) == SAMPLER.sample([request._replace(stop=("<|im_end|>",))])


def test_a_stop_id_ends_the_sequence() -> None:
    """The stop id itself is the last token."""
    free = SAMPLER.sample([SampleRequest(demo_prompt(), 60, temperature=0.0)])[0].sequences[0]
    request = SampleRequest(demo_prompt(), 60, temperature=0.0, stop_token_ids=(free.tokens[2],))
    assert SAMPLER.sample([request])[0].sequences[0].tokens == free.tokens[:3]


def test_max_tokens_ends_with_length() -> None:
    """A sequence that is cut says so."""
    sequence = SAMPLER.sample([SampleRequest(demo_prompt(), 1, temperature=0.0)])[0].sequences[0]
    assert (len(sequence.tokens), sequence.stop_reason) == (1, "length")


def test_filters_keep_the_head_of_the_distribution() -> None:
    """Top_k counts tokens, top_p probability; the token that crosses top_p is kept."""
    logits = np.log(np.array([0.1, 0.5, 0.15, 0.25]))
    assert np.flatnonzero(filtered_weights(logits, 1.0, 1.0, 2)).tolist() == [1, 3]
    assert np.flatnonzero(filtered_weights(logits, 1.0, 0.6, -1)).tolist() == [1, 3]
    assert np.flatnonzero(filtered_weights(logits, 1.0, 1e-9, -1)).tolist() == [1]
    assert np.flatnonzero(filtered_weights(logits, 1.0, 0.7, 2)).tolist() == [1, 3]
    tempered = filtered_weights(logits, 0.5, 1.0, -1)
    assert tempered[1] / tempered[3] == pytest.approx(4.0)


def test_draws_follow_the_distribution_and_never_take_weight_zero() -> None:
    """Inversion maps equal parts of [0, 1) to tokens in proportion to their weights."""
    weights = np.array([0.0, 1.0, 0.0, 3.0, 0.0], np.float32)
    points = (np.arange(1000) + 0.5) / 1000
    drawn = [draw(weights, float(u)) for u in points]
    assert drawn.count(1) == 250
    assert drawn.count(3) == 750
    assert draw(weights, 0.0) == 1
    assert draw(weights, math.nextafter(1.0, 0.0)) == 3


def test_sampled_frequencies_match_the_logprobs() -> None:
    """Over many samples the first token's frequencies agree with the reported probabilities."""
    result = SAMPLER.sample([SampleRequest(demo_prompt(), 1, num_samples=1000, seed=3)])[0]
    counts: dict[int, int] = {}
    probability: dict[int, float] = {}
    for sequence in result.sequences:
        token = sequence.tokens[0]
        counts[token] = counts.get(token, 0) + 1
        probability[token] = math.exp(sequence.logprobs[0])
    for token, count in counts.items():
        p = probability[token]
        assert abs(count / 1000 - p) < 5 * math.sqrt(p * (1 - p) / 1000) + 0.002


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": np.array([], np.int32)}, "prompt must be a non-empty row"),
        ({"prompt": np.array([-1], np.int32)}, "holds token id -1; ids go from 0"),
        ({"prompt": np.array([10**6], np.int32)}, "holds token id 1000000"),
        ({"prompt": np.zeros(2048, np.int32)}, "leaves no room for a continuation"),
        ({"prompt": np.zeros(2049, np.int32)}, "has 2049 tokens; the context holds 2048"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"num_samples": 0}, "num_samples must be 1 to 1024, got 0"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0, got -1.0"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"temperature": 1e-9}, "use 0 for greedy"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_k": -2}, "top_k must be -1"),
        ({"topk_prompt_logprobs": 10**6}, "topk_prompt_logprobs must be 0 to"),
        ({"stop": ("",)}, "stop strings must not be empty"),
    ],
)
def test_bad_requests_are_named(change: dict[str, object], message: str) -> None:
    """A request that cannot be computed is an InputError that gives its number and the value."""
    request = SampleRequest(encode("a"), 1)._replace(**change)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"request 1: .*{message}"):
        SAMPLER.sample([SampleRequest(encode("a"), 1), request])
