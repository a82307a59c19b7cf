"""The description of a worker as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

from specpool.protocol.features import FeatureSpec

TENSOR_PARALLEL_SUMS = ("whole", "parts")
"""Ways in which ranks combine the results of sharded GEMMs."""

TRANSLATIONS = ("shared", "retokenized")
"""Methods of translating the target's tokens in a draft worker."""
TRANSLATE = "run it in a draft worker, which translates tokens"
"""Remedy for a draft with another tokenizer."""

HUB_CACHE_PREFIX, HUB_CACHE_SEPARATOR = "models--", "--"


class CacheLoad(NamedTuple):
    """Load of the KV cache, the changing part of a `WorkerInfo`."""

    slots_in_use: int
    kv_positions_free: int


class ModelWork(NamedTuple):
    """Work of one model since the start of its worker."""

    realign_ns: int
    """Nanoseconds spent on realignment."""
    passes: int
    """Forward passes."""
    tokens: int
    """Tokens that these passes have run."""


class TranslationInfo(NamedTuple):
    """How a draft worker translates a target's tokens."""

    translation_id: str
    method: str
    """One of `TRANSLATIONS`."""
    vocabulary_coverage: float
    refusal: str
    """Why the worker cannot translate the tokens. Empty if it can."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank of a sharded model, in bytes."""

    device: str
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's model, its capabilities, the state of its KV cache, and the pass durations measured at startup."""

    model: str = ""
    architecture: str = ""
    dtype: str = ""
    device: str = ""
    vocab_size: int = 0
    max_model_len: int = 0
    tokenizer_fingerprint: str = ""
    bitwise: bool = False
    parameters: int = 0
    embedding_parameters: int = 0
    slots_total: int = 0
    slots_in_use: int = 0
    kv_bytes_per_token: int = 0
    kv_bytes_total: int = 0
    state_bytes_total: int = 0
    """Bytes of recurrent states, of all slots and of the prefix cache."""
    kv_positions_total: int = 0
    kv_positions_free: int = 0
    kv_positions_multiple: int = 0
    kv_layout: str = ""
    weight_bytes: int = 0
    activation_bytes: int = 0
    step_seconds: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a pass by its number of rows. Empty if not measured."""
    step_cached: int = 0
    """Cached positions of each sequence in the measured passes."""
    seconds_per_cached: float = 0.0
    max_rows: int = 0
    """Maximum rows of a pass; 0: unlimited or unknown."""
    notes: tuple[str, ...] = ()
    """Notes for operators, one sentence each, such as a slow fallback."""
    weights_fingerprint: str = ""
    """Hash of the loaded weights."""
    numerics_fingerprint: str = ""
    """Hash of the logits of fixed tokens. Empty unless `bitwise`."""
    instance_id: str = ""
    """Id of the worker's process. Changes with each start."""
    tensor_parallel: int = 1
    """Number of ranks. All byte counts above are totals of all ranks."""
    tensor_parallel_sums: str = ""
    """One of `TENSOR_PARALLEL_SUMS` if the model is sharded."""
    weight_kinds: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the weights by storage type."""
    activations: str = ""
    """Format of the activations in GEMMs: a dtype, or "int8" for GEMMs with quantized weights."""
    ranks: tuple[RankMemory, ...] = ()
    """Memory of each rank if the model is sharded."""
    max_rounds_ahead: int = 0
    """Rounds that a coordinator may send before the response to an earlier one."""
    max_branches: int = 0
    """Maximum branches of an item of the draft worker."""
    supports_grammars: bool = False
    """Whether the worker follows the grammar in sampling parameters."""
    hidden_size: int = 0
    num_layers: int = 0
    returns_features: bool = False
    """Whether the target worker returns hidden states."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states the draft reads; empty: it reads none."""
    feature_width: int = 0
    """Values per state that the draft reads."""
    tokenizer_translation: str = ""
    """Method of translating the target's tokens; see `ModelInfo` in common.proto. Empty: no translation needed."""
    vocabulary_coverage: float = 0.0
    """If tokens are translated, the share of the target's vocabulary that is also in the draft's."""
    draft: "WorkerInfo | None" = None
    """The draft that the target worker carries."""

    @property
    def features(self) -> FeatureSpec | None:
        """The target's hidden states that the draft reads; None if it reads none."""
        return FeatureSpec(self.feature_layers, self.feature_width) if self.feature_layers else None

    @property
    def summary(self) -> str:
        """The model and its speed in one line."""
        dtype, other = self.dtype, self.activations not in ("", self.dtype)
        numbers = f"{dtype}, {self.activations} activations" if other else dtype
        parts = [
            f"{self.architecture} with {self.parameters / 1e6:,.0f}M parameters ({numbers}, {self.device})",
            f"{self.slots_total} sequences of up to {self.max_model_len} positions",
        ]
        if 1 in self.step_seconds:
            parts.append(f"{1e3 * self.step_seconds[1]:.1f} ms for a token")
        return ", ".join(parts)


def why_not_a_pair(draft: WorkerInfo, target: WorkerInfo, *, translates: bool = False) -> str | None:
    """Return why the draft cannot draft for the target; None if it can.

    `translates`: whether the process that runs the draft can translate tokens.
    """
    features = draft.features
    if draft.tokenizer_fingerprint != target.tokenizer_fingerprint:
        differ = f"the draft {draft.model} uses a different tokenizer than the target {target.model}"
        if features is not None:
            return f"{differ} and reads hidden states, which cannot be translated"
        return None if translates else f"{differ}; {TRANSLATE}"
    if features is None:
        return None
    if not target.returns_features:
        reason = f"hidden states, which the target {target.model} does not return"
    elif not all(0 < layer <= target.num_layers for layer in features.layers):
        layers = ", ".join(map(str, features.layers))
        reason = f"hidden states after layers {layers}, but the target {target.model} has {target.num_layers} layers"
    elif features.width != (width := len(features.layers) * target.hidden_size):
        reason = f"hidden states of {features.width} numbers, but those of the target {target.model} have {width}"
    else:
        return None
    return f"the draft {draft.model} reads {reason}"


def readable_name(model: str) -> str:
    """Return a hub id as it is, and of a path its last part: without .gguf, and as the hub id in the hub's cache."""
    path = PurePath(model)
    for part in path.parts:  # models--Qwen--Qwen3-8B/snapshots/COMMIT
        if part.startswith(HUB_CACHE_PREFIX):
            return part.removeprefix(HUB_CACHE_PREFIX).replace(HUB_CACHE_SEPARATOR, "/")
    if path.suffix == ".gguf":
        return path.stem
    is_hub_id = not path.is_absolute() and len(path.parts) <= 2 and path.parts[:1] != ("..",)
    return str(path) if is_hub_id else path.name or model
