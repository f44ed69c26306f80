"""One training run: LoRA factors, accumulated gradient and optimizer state."""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from engine.embedded.adamw import AdamW, check_params, global_norm
from engine.embedded.base_model import BaseModel, weights_digest
from engine.embedded.calls import (
    IGNORED_TARGET,
    AdamParams,
    Example,
    ForwardResult,
    InputError,
    Loss,
    Totals,
)
from engine.embedded.chunks import run_examples
from engine.embedded.lora import LoraConfig, factor_gradients, init_factors, merge
from engine.embedded.losses import active_tokens, loss_scale, resolve_loss
from engine.embedded.model import Weights


class TrainableModel:
    """LoRA weights of one training run on a base model."""

    def __init__(self, base: BaseModel, lora: LoraConfig, factors: Weights) -> None:
        self.base = base
        self.lora = lora
        self.factors = factors
        self.optimizer = AdamW(factors)
        self.gradient: Weights = {}
        self._merged: Weights | None = None

    @classmethod
    def create(
        cls,
        base: BaseModel,
        *,
        rank: int,
        seed: int,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
    ) -> Self:
        """Fresh adapters: the merged model equals the base. Raises InputError for a bad rank."""
        lora = LoraConfig(rank, train_attn, train_mlp, train_unembed)
        return cls(base, lora, init_factors(base.weights, base.config, lora, seed))

    def __repr__(self) -> str:
        return f"TrainableModel(rank {self.lora.rank}, {self.optimizer.step_count} steps)"

    def merged(self) -> Weights:
        """Weights with the adapters added in, kept until the next step."""
        if self._merged is None:
            self._merged = merge(self.base.weights, self.factors, self.lora.scale)
        return self._merged

    def _check(self, examples: Sequence[Example]) -> None:
        if not examples:
            raise InputError("a forward call needs at least one datum, got none")
        for number, example in enumerate(examples):
            name = f"datum {number}"
            self.base.check_tokens(example.inputs, f"{name}: inputs")
            labels = np.where(example.targets == IGNORED_TARGET, 0, example.targets)
            self.base.check_tokens(labels, f"{name}: targets")
            for field, values in example._asdict().items():
                if values is None:
                    continue
                if values.shape != example.inputs.shape:
                    raise InputError(
                        f"{name}: {field} has shape {values.shape}, inputs {example.inputs.shape}"
                    )
                if not np.isfinite(values).all():
                    raise InputError(f"{name}: {field} must be finite")

    def _run(self, examples: Sequence[Example], loss: Loss, totals: Totals, *, learn: bool) -> ForwardResult:
        self._check(examples)
        loss = resolve_loss(loss)
        scale = loss_scale(loss, totals)
        result = run_examples(self.merged(), self.base.config, examples, loss, scale if learn else None)
        if learn:
            update = factor_gradients(self.factors, result.grads, self.lora.scale)
            for name, grad in update.items():
                self.gradient[name] = self.gradient[name] + grad if name in self.gradient else grad
        count = sum(active_tokens(example, loss) for example in examples)
        mean = result.loss_sum / count if count else 0.0
        return ForwardResult(result.logprobs, result.loss_sum, mean, count)

    def forward(self, examples: Sequence[Example], loss: Loss, totals: Totals) -> ForwardResult:
        """Measure current logprobs and losses; nothing changes. Raises InputError for bad input."""
        return self._run(examples, loss, totals, learn=False)

    def forward_backward(self, examples: Sequence[Example], loss: Loss, totals: Totals) -> ForwardResult:
        """As forward, and adds the gradient of the loss (see losses.py) to the accumulated one."""
        return self._run(examples, loss, totals, learn=True)

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW step with the accumulated gradient, which is then cleared.

        Without any gradient the step is taken with zeros. Returns grad_norm, update_norm,
        weight_norm and the step count. Raises InputError for bad settings or a non-finite gradient
        (which is then dropped; the weights stay as they were).
        """
        check_params(params)
        grads = self.gradient or {name: np.zeros_like(x) for name, x in self.factors.items()}
        self.gradient = {}
        metrics = self.optimizer.step(self.factors, grads, params)
        self._merged = None
        metrics["weight_norm"] = global_norm(self.factors)
        metrics["step"] = float(self.optimizer.step_count)
        return metrics

    def state_dict(self, *, optimizer: bool) -> dict[str, np.ndarray]:
        """Arrays for np.savez, in a fixed order; the gradient in progress is not part of it."""
        flags = [self.lora.train_attn, self.lora.train_mlp, self.lora.train_unembed]
        arrays: dict[str, np.ndarray] = {
            "meta.base": np.frombuffer(bytes.fromhex(self.base.fingerprint), np.uint8),
            "meta.lora": np.array([self.lora.rank, *flags], np.int64),
        }
        arrays |= {f"lora.{name}": x for name, x in self.factors.items()}
        if optimizer:
            arrays["adam.step"] = np.array(self.optimizer.step_count, np.int64)
            arrays |= {f"adam.first.{name}": x for name, x in self.optimizer.first.items()}
            arrays |= {f"adam.second.{name}": x for name, x in self.optimizer.second.items()}
        return {name: x.copy() for name, x in arrays.items()}

    @classmethod
    def from_state(cls, base: BaseModel, arrays: Mapping[str, np.ndarray], *, load_optimizer: bool) -> Self:
        """Restore a run. Raises InputError if the state is of another base model or incomplete."""
        lora, factors = read_state(base, arrays)
        model = cls(base, lora, factors)
        if load_optimizer:
            model.optimizer.step_count = int(_stored(arrays, "adam.step"))
            for name in factors:
                model.optimizer.first[name] = _stored(arrays, f"adam.first.{name}").copy()
                model.optimizer.second[name] = _stored(arrays, f"adam.second.{name}").copy()
        return model

    def digest(self) -> str:
        """SHA-256 hex of the LoRA weights."""
        return weights_digest(self.factors)


def _stored(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise InputError(f"the checkpoint holds no {name!r}: was it saved with save_weights?")
    return arrays[name]


def read_state(base: BaseModel, arrays: Mapping[str, np.ndarray]) -> tuple[LoraConfig, Weights]:
    """LoRA settings and factors of a state. Raises InputError if it does not fit `base`."""
    fingerprint = bytes(_stored(arrays, "meta.base")).hex()
    if fingerprint != base.fingerprint:
        raise InputError(
            f"the checkpoint belongs to base model {fingerprint[:12]}, this engine runs "
            f"{base.fingerprint[:12]}"
        )
    rank, attn, mlp, unembed = (int(value) for value in _stored(arrays, "meta.lora"))
    lora = LoraConfig(rank, bool(attn), bool(mlp), bool(unembed))
    factors: Weights = {}
    for name, fresh in init_factors(base.weights, base.config, lora, seed=0).items():
        stored = _stored(arrays, f"lora.{name}")
        if stored.shape != fresh.shape or stored.dtype != fresh.dtype:
            raise InputError(f"the checkpoint's {name} is {stored.dtype}{stored.shape}: not this model's")
        factors[name] = stored.copy()
    return lora, factors
