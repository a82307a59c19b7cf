"""The description of a worker as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

TENSOR_PARALLEL_SUMS = ("whole", "parts")
"""Ways in which ranks sum their products."""


class CacheLoad(NamedTuple):
    """How full a KV cache is: the part of a `WorkerInfo` that changes."""

    slots_in_use: int
    kv_positions_free: int


@dataclass(frozen=True)
class StepCosts:
    """The durations of a worker's passes, as `WorkerInfo` has them."""

    step_seconds: Mapping[int, float]
    """Seconds by rows; empty if they were not measured."""
    step_cached: int
    seconds_per_cached: float
    max_rows: int


@dataclass(frozen=True)
class RankMemory:
    """The memory of one of the ranks among which a model is divided, in bytes."""

    device: str
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class WorkerInfo:
    """The model, the present state of its KV cache, and the durations of passes measured when the model was loaded."""

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    tokenizer_fingerprint: str
    bitwise: bool
    parameters: int
    embedding_parameters: int
    slots_total: int
    slots_in_use: int
    kv_bytes_per_token: int
    kv_bytes_total: int
    kv_positions_total: int
    kv_positions_free: int
    kv_positions_multiple: int
    kv_layout: str
    weight_bytes: int
    activation_bytes: int
    step_seconds: Mapping[int, float]
    step_cached: int
    seconds_per_cached: float
    max_rows: int
    notes: tuple[str, ...] = ()
    """What an operator should know, one sentence each, such as a fallback that makes the model slow."""
    weights_fingerprint: str = ""
    """Hash of the weights as they were loaded."""
    numerics_fingerprint: str = ""
    """Hash of the logits of fixed tokens; empty unless `bitwise`."""
    instance_id: str = ""
    """Id of the worker's process; a new one after each start."""
    tensor_parallel: int = 1
    """Number of ranks among which the model is divided; all bytes above are those of all ranks together."""
    tensor_parallel_sums: str = ""
    """One of `TENSOR_PARALLEL_SUMS` if the model is divided."""
    weight_kinds: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the weights by the kind in which they are kept."""
    ranks: tuple[RankMemory, ...] = ()
    """Memory of each rank if the model is divided."""

    def with_load(self, load: CacheLoad) -> "WorkerInfo":
        """This description with another load."""
        return replace(self, **load._asdict())
