"""Owns what each trainer event does to its training run; everything here runs on the compute thread.

A payload that does not hold is refused before anything changes, so a failed event leaves the run as
it was: the gradient, the weights and the payload digest are those of the events that succeeded.
"""

import math

import numpy as np
from numpy.typing import NDArray

from engine.embedded import wire
from engine.embedded.calls import (
    AdamParams,
    Example,
    FloatArray,
    ForwardResult,
    InputError,
    Loss,
    Totals,
)
from engine.embedded.checkpoints import CheckpointStore, Kind
from engine.embedded.compute import BaseModel, TrainableModel
from engine.embedded.digests import Call, as_metrics, datum_digest, payload_digest
from engine.embedded.wire import Refused

Result = dict[str, object]
INT32 = np.iinfo(np.int32)


class Usage:
    """Token counts of one event, as the protocol reports them."""

    def __init__(self) -> None:
        self.input_tokens = 0


class Trainer:
    """The model side of one training run."""

    def __init__(self, base: BaseModel, store: CheckpointStore, training_run: str) -> None:
        self._base = base
        self._store = store
        self._training_run = training_run
        self._model: TrainableModel | None = None
        self._steps = 0
        self._calls: list[Call] = []

    def execute(self, kind: wire.EventType, step: int, payload: bytes, usage: Usage) -> Result:
        """Run one event and return its result; raises Refused or InputError."""
        match kind:
            case "trainer.init_run":
                return self._init(wire.decode_msgpack(payload, wire.InitRun))
            case "trainer.forward" | "trainer.forward_backward":
                backward = kind == "trainer.forward_backward"
                request = wire.decode_msgpack(payload, wire.Forward)
                return self._forward(request, step if backward else None, usage)
            case "trainer.optimize_step":
                return self._optimize(wire.decode_msgpack(payload, wire.OptimizeStep).adam_params)
            case "trainer.save_state" | "trainer.save_weights":
                full = kind == "trainer.save_state"
                return self._save(wire.decode_msgpack(payload, wire.Save), full=full)
            case "trainer.end_run":
                self._model = None
                return {}

    def _ready(self) -> TrainableModel:
        if self._model is None:
            raise Refused(409, "run_not_initialized", "this training run has no weights yet")
        return self._model

    def _init(self, request: wire.InitRun) -> Result:
        if self._model is not None:
            raise Refused(409, "run_initialized", "this training run has its weights already")
        if request.checkpoint_uri is None:
            lora = request.lora_config
            self._model = TrainableModel.create(
                self._base,
                rank=lora.rank,
                seed=lora.seed or 0,
                train_attn=lora.train_attn,
                train_mlp=lora.train_mlp,
                train_unembed=lora.train_unembed,
            )
            return {}
        record = self._store.find(request.checkpoint_uri)
        arrays = self._store.load(record)
        optimizer = request.load_optimizer
        self._model = TrainableModel.from_state(self._base, arrays, load_optimizer=optimizer)
        self._steps = record.step
        return {}

    def _forward(self, request: wire.Forward, step: int | None, usage: Usage) -> Result:
        model = self._ready()
        shift = 1 if request.auto_shift else 0
        examples = [_example(datum, shift) for datum in request.data]
        totals = Totals(
            request.gradient_accumulation.total_samples,
            request.gradient_accumulation.total_active_tokens,
            request.gradient_accumulation.total_advantage_tokens,
        )
        loss = Loss(request.loss.type, request.loss.config)
        usage.input_tokens = sum(len(example.inputs) for example in examples)
        if step is None:
            return _forward_result(model.forward(examples, loss, totals), shift)
        digests = [datum_digest(datum) for datum in request.data]
        result = model.forward_backward(examples, loss, totals)
        if not self._calls or self._calls[-1].step != step:
            self._calls.append(Call(step))
        self._calls[-1].digests.extend(digests)
        return _forward_result(result, shift)

    def _optimize(self, adam: wire.Adam) -> Result:
        values = (
            adam.learning_rate,
            adam.beta1,
            adam.beta2,
            adam.eps,
            adam.weight_decay,
            adam.grad_clip_norm,
        )
        if not all(math.isfinite(value) for value in values):
            raise Refused(400, "invalid_input", f"Adam parameters must be finite, got {values!r}")
        metrics = self._ready().optim_step(AdamParams(*values))
        metrics |= as_metrics(payload_digest(self._calls))
        self._calls = []
        self._steps += 1
        return {"metrics": metrics}

    def _save(self, request: wire.Save, *, full: bool) -> Result:
        kind: Kind = "state" if full else "weights"
        arrays = self._ready().state_dict(optimizer=full)
        record = self._store.save(self._training_run, kind, request, arrays, step=self._steps)
        checkpoint = {
            "uri": record.uri,
            "checkpoint_cuid": record.cuid,
            "size_bytes": record.size_bytes,
            "model_id": str(self._base.folder),
        }
        return {"checkpoint": checkpoint}


def _ids(values: list[int], name: str) -> NDArray[np.int32]:
    if min(values) < INT32.min or max(values) > INT32.max:
        raise InputError(f"{name} holds ids that do not fit 32 bits")
    return np.asarray(values, dtype=np.int32)


def _floats(values: list[float] | None, name: str, length: int, shift: int) -> FloatArray | None:
    if values is None:
        return None
    if len(values) != length:
        raise InputError(f"{name} has {len(values)} values for {length} input tokens")
    with np.errstate(over="ignore"):
        array = np.asarray(values, dtype=np.float32)
    if not np.isfinite(array).all():
        raise InputError(f"{name} must be finite float32 values")
    return array[shift:]


def _example(datum: wire.WireDatum, shift: int) -> Example:
    """Return the arrays of one datum; with auto_shift, input t predicts target t + 1."""
    tokens = datum.model_input.tokens()
    length = len(tokens)
    if len(datum.target_ids) != length:
        raise InputError(f"target_ids has {len(datum.target_ids)} ids for {length} input tokens")
    if length <= shift:
        raise InputError("auto_shift needs at least two tokens in every datum")
    return Example(
        inputs=_ids(tokens, "model_input")[: length - shift],
        targets=_ids(datum.target_ids, "target_ids")[shift:],
        weights=_floats(datum.weights, "weights", length, shift),
        logprobs=_floats(datum.logprobs, "logprobs", length, shift),
        advantages=_floats(datum.advantages, "advantages", length, shift),
    )


def _forward_result(result: ForwardResult, shift: int) -> Result:
    """Return the wire form; logprobs stand at their target's index, 0 where auto_shift drops one."""
    outputs = []
    for logprobs in result.logprobs:
        aligned = np.concatenate([np.zeros(shift, np.float32), logprobs]) if shift else logprobs
        tensor = {
            "dtype": "<f4",
            "shape": list(aligned.shape),
            "encoding": "raw_le",
            "data": np.ascontiguousarray(aligned, dtype="<f4").tobytes(),
        }
        outputs.append({"logprobs": tensor})
    metrics = {
        "loss_sum": float(result.loss_sum),
        "loss_mean": float(result.loss_mean),
        "token_count": int(result.token_count),
    }
    if not all(math.isfinite(value) for value in metrics.values()):
        raise Refused(400, "loss_not_finite", f"the loss is not finite: {metrics!r}")
    return {"loss_fn_outputs": outputs, "metrics": metrics}
