"""The embedded engine's model as its server sees it: the one module to import from.

BaseModel is the shipped model, TrainableModel one training run (LoRA weights, accumulated
gradient, AdamW state), SamplerModel one set of merged weights for generation. All of it is
synchronous, single-threaded numpy; the server decides on which thread it runs. Results depend
only on the arguments and the order of the calls, never on time, batching or other runs.
"""

from engine.embedded.base_model import BaseModel
from engine.embedded.calls import (
    AdamParams,
    Example,
    ForwardResult,
    InputError,
    Loss,
    SampleRequest,
    SampleResult,
    Sequence_,
    Totals,
)
from engine.embedded.sampling import SamplerModel
from engine.embedded.trainable import TrainableModel

__all__ = [
    "AdamParams",
    "BaseModel",
    "Example",
    "ForwardResult",
    "InputError",
    "Loss",
    "SampleRequest",
    "SampleResult",
    "SamplerModel",
    "Sequence_",
    "Totals",
    "TrainableModel",
]
