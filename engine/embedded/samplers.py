"""Owns the weights that are sampled: a small cache of merged models, and requests made plain."""

import secrets
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from engine.embedded import wire
from engine.embedded.calls import SampleRequest, SampleResult
from engine.embedded.checkpoints import CheckpointStore
from engine.embedded.compute import BaseModel, SamplerModel
from engine.embedded.wire import Refused

KEPT_MODELS = 8
"""Merged models kept in memory; a learner and its rollouts use two or three at a time."""


class Samplers:
    """Merged weights by URI; used from the compute thread only."""

    def __init__(self, base: BaseModel, store: CheckpointStore) -> None:
        self._base = base
        self._store = store
        self._models: OrderedDict[str, SamplerModel] = OrderedDict()

    def sample(self, weights: str, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        """Return one result per request; raises Refused 404 when the checkpoint is gone."""
        return self._model(weights).sample(requests)

    def _model(self, weights: str) -> SamplerModel:
        record = self._store.find(weights) if weights else None
        key = record.cuid if record else ""
        model = self._models.get(key)
        if model is None:
            if record is None:
                model = SamplerModel.from_base(self._base)
            else:
                model = SamplerModel.from_state(self._base, self._store.load(record))
            self._models[key] = model
        self._models.move_to_end(key)
        while len(self._models) > KEPT_MODELS:
            self._models.popitem(last=False)
        return model


def sample_request(sample: wire.Sample) -> SampleRequest:
    """Return the model's form of a wire request; raises Refused. Without a seed, a random one."""
    params = sample.sampling_params
    tokens = sample.prompt.tokens()
    bounds = np.iinfo(np.int32)
    for ids, name in ((tokens, "the prompt"), (params.stop_token_ids, "stop_token_ids")):
        if ids and not (bounds.min <= min(ids) and max(ids) <= bounds.max):
            raise Refused(400, "invalid_input", f"{name} holds ids that do not fit 32 bits")
    if any(not stop for stop in params.stop):
        raise Refused(400, "invalid_input", "a stop string must not be empty")
    return SampleRequest(
        prompt=np.asarray(tokens, dtype=np.int32),
        max_tokens=params.max_tokens,
        num_samples=sample.num_samples,
        seed=secrets.randbelow(2**63) if params.seed is None else params.seed,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        return_prompt_logprobs=sample.return_prompt_logprobs,
        topk_prompt_logprobs=sample.topk_prompt_logprobs,
    )


def sample_answer(sample: wire.Sample, sampling_run: str, result: SampleResult) -> dict[str, object]:
    """Return the JSON answer of one sampling request."""
    sequences = [
        {
            "tokens": sequence.tokens,
            "logprobs": sequence.logprobs if sample.return_token_logprobs else [],
            "text": sequence.text if sample.return_text else None,
            "stop_reason": sequence.stop_reason,
        }
        for sequence in result.sequences
    ]
    prompt_tokens = len(sample.prompt.tokens())
    return {
        "request_id": sample.request_id,
        "sampling_run": sampling_run,
        "sequences": sequences,
        "prompt_logprobs": result.prompt_logprobs,
        "topk_prompt_logprobs": result.topk_prompt_logprobs,
        "usage": {
            "input_tokens": prompt_tokens,
            "output_tokens": sum(len(sequence.tokens) for sequence in result.sequences),
        },
    }
