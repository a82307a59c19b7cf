"""Maps GGUF metadata to model configurations. Every key that affects results is applied, or the file is refused.

transformers drops many of these keys. Sources: ggml's docs/gguf.md for names; llama.cpp's src/llama-model.cpp and
src/models/ for defaults, and for the keys that each architecture reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isclose
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config_values import check_gguf_sizes
from specpool.engine.models.gguf_reader import ARCHITECTURE, GgufFile
from specpool.engine.models.gguf_rope import HELP, ROPE_KEYS, refusal, rope_parameters

WINDOW, BASE_OF_WINDOWS, WINDOW_PATTERN = (
    "attention.sliding_window",
    "rope.freq_base_swa",
    "attention.sliding_window_pattern",
)
HEADS, KEY_LENGTH, VALUE_LENGTH = "attention.head_count", "attention.key_length", "attention.value_length"
CAP = "final_logit_softcapping"
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    HEADS: "num_attention_heads",
}
RMS_NORM = {**SIZES, "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
"""Names of ids in the file, and their fields of a configuration, whose classes have ids of other vocabularies."""
OPTIONAL = {"vocab_size": "vocab_size", "attention.head_count_kv": "num_key_value_heads", KEY_LENGTH: "head_dim"}


def _layer_norm(epsilon: str) -> dict[str, str]:
    return {**SIZES, "attention.layer_norm_epsilon": epsilon}


@dataclass(frozen=True)
class Family:
    """The keys of an architecture's files, without the architecture prefix."""

    required: Mapping[str, str]  # configuration field by key
    optional: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    rotary: bool = True
    partial: bool = False  # whether the rotary embedding may cover only part of each head
    free_head_dim: bool = True  # whether head_dim may differ from hidden_size / num_attention_heads
    scaled_by_width: int | None = None  # Gemma: layers of the model that scales scores by hidden_size


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(RMS_NORM),
        "qwen2": Family(RMS_NORM),
        "qwen3": Family(RMS_NORM),
        "qwen2moe": Family(
            {**RMS_NORM, **EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
        ),
        "qwen3moe": Family({**RMS_NORM, **EXPERTS}),
        "phi3": Family(
            RMS_NORM, {"rope.scaling.original_context_length": "original_max_position_embeddings"}, partial=True
        ),
        "gemma3": Family(
            {**RMS_NORM, WINDOW: "sliding_window"}, {CAP: CAP}, {WINDOW_PATTERN: (6,)}, scaled_by_width=62
        ),
        "starcoder2": Family(_layer_norm("norm_epsilon")),
        "gpt2": Family(
            {**_layer_norm("layer_norm_epsilon"), "feed_forward_length": "n_inner"}, rotary=False, free_head_dim=False
        ),
    }
)
"""The architectures whose GGUF files are served."""

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.scale": (0,),
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "embedding_scale": (0, 1),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "leading_dense_block_count": (0,),
        "logit_scale": (0, 1),
        "nextn_predict_layers": (0,),
        "residual_scale": (0, 1),
        "use_parallel_residual": (False,),
    }
)
"""Values that do not affect the results of any architecture."""
WITHOUT_EFFECT = frozenset(
    {
        "attention.layer_norm_epsilon",  # of architectures with the other kind of norm
        "attention.layer_norm_rms_epsilon",
        "pooling_type",  # for embeddings
        "tensor_data_layout",  # all files of an architecture have the same layout
    }
)
"""Keys that no served architecture reads."""
KINDS = {"expert_": "a mixture of experts", "ssm.": "a state-space hybrid", "shortconv.": "a convolution hybrid"}


def config_fields(file: GgufFile) -> dict[str, Any]:
    """Return the configuration fields that a file defines, including llama.cpp's defaults.

    Raises UnsupportedModelError, naming the key, for a value that cannot be applied.
    """
    family, keys = _family(file), _keys(file)
    fields = {name: keys[key] for key, name in {**family.required, **_optional(family)}.items() if key in keys}
    if CAP in fields:
        fields[CAP] = fields[CAP] or None
    fields |= {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in SPECIAL_TOKENS.items()}
    heads = keys[HEADS]
    fields.setdefault("num_key_value_heads", heads)
    head_dim = fields.setdefault("head_dim", keys["embedding_length"] // heads)
    if keys.get(VALUE_LENGTH, head_dim) != head_dim:
        raise refusal(file, VALUE_LENGTH, f"it must equal the key length of {head_dim}")
    if head_dim < 1 or (not family.free_head_dim and head_dim * heads != keys["embedding_length"]):
        key = KEY_LENGTH if KEY_LENGTH in keys else HEADS
        raise refusal(file, key, f"it does not fit the embedding_length of {keys['embedding_length']}")
    fields.update(_window(file, family, keys))
    if family.scaled_by_width is not None:
        wide = keys["block_count"] == family.scaled_by_width
        fields["query_pre_attn_scalar"] = keys["embedding_length"] // heads if wide else head_dim
    if family.rotary:
        rope = rope_parameters(file, keys, head_dim, family.partial)
        windows = {"rope_type": "default", "rope_theta": keys.get(BASE_OF_WINDOWS, 10_000.0)}
        nested = {"full_attention": rope, "sliding_attention": windows}
        fields["rope_parameters"] = nested if file.architecture == "gemma3" else rope
    return fields


def check_config(file: GgufFile, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if the config.json in a file's folder contradicts the file."""
    family, keys = _family(file), _keys(file)
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for key, name in {**family.required, **_optional(family), "rope.freq_base": "rope_theta"}.items():
        stated: Any = keys.get(key)
        configured: Any = getattr(config, name, rope.get(name))
        # A configuration may allow more positions than the file states, or pad the vocabulary.
        if key in ("context_length", "vocab_size") or None in (stated, configured):
            continue
        if not isclose(stated, configured, rel_tol=1e-5):  # the file's numbers are float32
            raise UnsupportedModelError(
                f"the configuration does not match {file.path.name}: "
                f"{name} is {configured}, but the file's {key} is {stated}"
            )
    if rope.get("rope_type", "default") == "default":
        scaled = rope_parameters(file, keys, keys.get(KEY_LENGTH, keys["embedding_length"] // keys[HEADS]), False)
        if scaled["rope_type"] != "default":
            raise UnsupportedModelError(
                f"the configuration does not match {file.path.name}: it has no scaling in rope_parameters, but the "
                f"file scales positions (type {scaled['rope_type']})"
            )


def _family(file: GgufFile) -> Family:
    if file.metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(f"{file.path}: general.type is {file.metadata['general.type']}, not model; {HELP}")
    family = FAMILIES.get(file.architecture)
    if family is None:
        names = [key.removeprefix(f"{file.architecture}.") for key, value in file.metadata.items() if value != 0]
        kind = next((f" ({kind})" for name in names for start, kind in KINDS.items() if name.startswith(start)), "")
        raise UnsupportedModelError(
            f"{file.path}: {ARCHITECTURE} is {file.architecture}{kind}; GGUF files are served for "
            f"{', '.join(FAMILIES)}; serve the model's safetensors files instead, or {HELP}"
        )
    return family


def _keys(file: GgufFile) -> dict[str, Any]:
    """Return the values by key without the architecture prefix. Refuses keys that the architecture does not read."""
    family, prefix = _family(file), f"{file.architecture}."
    check_gguf_sizes(file.metadata, str(file.path))
    keys = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    applied = {*family.required, *_optional(family), VALUE_LENGTH, WINDOW}
    applied |= ROPE_KEYS if family.rotary else set()
    applied |= {BASE_OF_WINDOWS} if file.architecture == "gemma3" else set()
    for key, value in keys.items():
        if key in applied:
            if value is None:
                raise refusal(file, key, "only one value for all layers is supported")
        elif value not in family.neutral.get(key, NEUTRAL.get(key, ())) and key not in WITHOUT_EFFECT:
            kind = next((kind for start, kind in KINDS.items() if key.startswith(start)), "")
            reason = f"it is not supported for {file.architecture} models and may change their results"
            if kind:
                reason = f"the model is {kind}, which {file.architecture} files do not support"
            raise refusal(file, key, reason)
    for key in (*family.required, *(key for key in family.optional if key in keys)):
        _check_number(file, key, keys)
    return keys


def _check_number(file: GgufFile, key: str, keys: Mapping[str, Any]) -> None:
    if key not in keys:
        raise UnsupportedModelError(f"{file.path}: {file.architecture}.{key} is missing; convert the model again")
    fraction = key == CAP or key.endswith("epsilon")
    if type(keys[key]) not in ((int, float) if fraction else (int,)) or keys[key] < (not fraction):
        raise refusal(file, key, "it must be a positive number" if fraction else "it must be a positive whole number")


def _optional(family: Family) -> Mapping[str, str]:
    return {**OPTIONAL, **family.optional}


def _window(file: GgufFile, family: Family, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the sliding window. A window of 0 means none."""
    window = keys.get(WINDOW, 0)
    if type(window) is not int or window < 0:
        raise refusal(file, WINDOW, "it must be a whole number, at least 0")
    if not window and file.architecture == "qwen2moe":  # otherwise transformers builds a mask that no layer uses
        return {"use_sliding_window": False}
    fields: dict[str, Any] = {"sliding_window": window or None, "use_sliding_window": window > 0}
    if window and file.architecture.startswith("qwen"):  # transformers derives layer_types before it knows the window
        fields["layer_types"] = ["sliding_attention"] * keys["block_count"]
    return fields
