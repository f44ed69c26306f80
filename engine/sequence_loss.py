"""Owns GSPO, a loss on whole sequences, sent as a cross entropy whose weights are its gradient.

L = −(1/n) Σ_i min(s_i A_i, clip(s_i, low, high) A_i) over the n datums of a call, with
s_i = exp(mean over the datum's trained tokens of (logprob − sampled_logprob)). The gradient with respect to
the trainer's logprobs is exact, so this equals the SDK's forward_backward_custom, and needs no torch. The
trainer's own logprobs come from one more forward pass.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytrio
from pytrio.types.forward.tensor_data import TensorData

from core.arrays import Float32
from core.datum import DatumArrays

LOSS = "gspo"
CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
DEFAULTS: Mapping[str, float] = {CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4}
"""Bounds of the ratio itself, named like the SDK's. The GSPO paper's: a mean over tokens moves little."""


def sequence_weights(
    datums: Sequence[DatumArrays], logprobs: Sequence[Float32], config: Mapping[str, float]
) -> list[Float32]:
    """Return −dL/dlogprob per token, float32 [n] per datum; 0 where a datum is clipped or not trained.

    `logprobs` are the trainer's. A datum's A is the mean of its trained tokens' advantages.
    """
    settings = {**DEFAULTS, **config}
    low, high = settings[CLIP_LOW], settings[CLIP_HIGH]
    weights = []
    for datum, current in zip(datums, logprobs, strict=True):
        trained = datum.advantages != 0
        count = int(trained.sum())
        result = np.zeros(len(trained), dtype=np.float32)
        if count:
            gaps = current[trained].astype(np.float64) - datum.logprobs[trained]
            ratio = float(np.exp(gaps.mean()))
            advantage = float(datum.advantages[trained].astype(np.float64).mean())
            clipped = min(max(ratio, low), high) * advantage < ratio * advantage
            if not clipped:
                result[trained] = advantage * ratio / (count * len(datums))
        weights.append(result)
    return weights


def surrogate(datum: pytrio.Datum, weights: Float32) -> pytrio.Datum:
    """Return the cross-entropy datum whose gradient is that of the sequence loss."""
    tensor = TensorData.model_construct(
        _fields_set={"data", "dtype", "shape"},
        data=weights.tolist(),
        dtype="float32",
        shape=[len(weights)],
    )
    inputs = {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": tensor}
    return pytrio.Datum.model_construct(
        _fields_set={"model_input", "loss_fn_inputs"}, model_input=datum.model_input, loss_fn_inputs=inputs
    )
