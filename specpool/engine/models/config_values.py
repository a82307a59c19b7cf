"""Types and limits of the values in a model's configuration, checked before anything is built from them. No torch."""

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from specpool.engine.config.sources import UnsupportedModelError

MAX_LAYERS, MAX_HEADS, MAX_HIDDEN, MAX_ROWS, MAX_POSITIONS, MAX_TAPS = 2**12, 2**16, 2**20, 2**24, 2**31, 2**6
MULTIPLES = (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads"))
"""Pairs of sizes of which the first must be a multiple of the second."""
LIMITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), MAX_LAYERS),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "head_dim"), MAX_HEADS),
        **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), MAX_HEADS),
        **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), MAX_HEADS),
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), MAX_HEADS),
        **dict.fromkeys(("linear_conv_kernel_dim", "short_conv_kernel_size", "conv_L_cache"), MAX_TAPS),
        **dict.fromkeys(("hidden_size", "n_embd", "d_model", "kv_lora_rank", "q_lora_rank"), MAX_HIDDEN),
        **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "vocab_size"), MAX_ROWS),
        **dict.fromkeys(("shared_expert_intermediate_size", "block_multiple_of"), MAX_ROWS),
        **dict.fromkeys(("max_position_embeddings", "n_positions"), MAX_POSITIONS),
    }
)
"""Maximum of each size in a configuration, by its names in different architectures."""
GGUF_LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "block_count": MAX_LAYERS,
        "attention.head_count": MAX_HEADS,
        "attention.head_count_kv": MAX_HEADS,
        "attention.key_length": MAX_HEADS,
        "attention.value_length": MAX_HEADS,
        "rope.dimension_count": MAX_HEADS,
        "rope.scaling.original_context_length": MAX_POSITIONS,
        "embedding_length": MAX_HIDDEN,
        "feed_forward_length": MAX_ROWS,
        "vocab_size": MAX_ROWS,
        "context_length": MAX_POSITIONS,
    }
)
"""Maximum of each size in the metadata of a GGUF file, by its key without the architecture."""


class _Rope(BaseModel, strict=True):
    beta_fast: float | None = Field(None, ge=0, allow_inf_nan=False)
    beta_slow: float | None = Field(None, ge=0, allow_inf_nan=False)
    factor: float | None = Field(None, gt=0, allow_inf_nan=False)
    mscale: float | None = Field(None, ge=0, allow_inf_nan=False)
    mscale_all_dim: float | None = Field(None, ge=0, allow_inf_nan=False)
    original_max_position_embeddings: int | None = Field(None, ge=1)
    partial_rotary_factor: float | None = Field(None, gt=0, le=1)
    rope_theta: float | None = Field(None, gt=0, allow_inf_nan=False)
    rope_type: str | None = None
    full_attention: "_Rope | None" = None  # by layer type
    sliding_attention: "_Rope | None" = None


class _LinearAttention(BaseModel, strict=True):
    """The `linear_attn_config` of Kimi Linear, which counts layers from 1."""

    full_attn_layers: list[PositiveInt] | None = None
    kda_layers: list[PositiveInt] | None = None


class _Types(BaseModel, from_attributes=True, strict=True):
    """Types of the values that the engine reads, because transformers does not check them all."""

    architectures: list[str] | None = None
    attn_output_gate: bool | None = None
    block_ffn_dim_multiplier: float | None = Field(None, gt=0, le=16)
    attn_logit_softcapping: float | None = Field(None, gt=0)
    decoder_sparse_step: int | None = Field(None, ge=1)
    final_logit_softcapping: float | None = Field(None, gt=0)
    full_attention_interval: int | None = Field(None, ge=1)
    is_encoder_decoder: bool | None = None
    layer_types: list[str] | None = None
    mlp_only_layers: list[int] | None = None
    model_type: str | None = None
    mtp_num_hidden_layers: int | None = Field(None, ge=0)
    mtp_use_dedicated_embeddings: bool | None = None
    norm_eps: float | None = Field(None, ge=0, allow_inf_nan=False)
    n_routed_experts: int | None = Field(None, ge=0)
    n_shared_experts: int | None = Field(None, ge=0)
    num_experts: int | None = Field(None, ge=0)
    num_local_experts: int | None = Field(None, ge=0)
    num_nextn_predict_layers: int | None = Field(None, ge=0)
    query_pre_attn_scalar: float | None = Field(None, gt=0)
    rms_norm_eps: float | None = Field(None, ge=0, allow_inf_nan=False)
    rope_parameters: _Rope | None = None
    sliding_window: int | None = None
    swiglu_limit: float | None = Field(None, gt=0)
    use_sliding_window: bool | None = None


class _JsonTypes(_Types):
    """Further types in config.json, which transformers converts."""

    dtype: str | None = None
    linear_attn_config: _LinearAttention = _LinearAttention()
    quantization_config: dict[str, Any] | None = None
    rope_scaling: _Rope | None = None
    torch_dtype: str | None = None


def check_types(config: object, where: str) -> None:
    """Raise UnsupportedModelError for a value of the wrong type.

    `config`: config.json as a dict, or a configuration of transformers. `where`: the beginning of the message.
    """
    try:
        (_JsonTypes if isinstance(config, dict) else _Types).model_validate(config)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UnsupportedModelError(f"{where}: {key} is {reprlib.repr(problem['input'])}: {problem['msg']}") from None


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedModelError for a size that is not a whole number within its limits. Unset sizes are allowed.

    `where`: the beginning of the message, such as a file name.
    """
    for name, limit in LIMITS.items():
        value = config.get(name)
        # Some architectures have a list with one size per layer.
        for size in value if isinstance(value, list) and name.endswith("intermediate_size") else [value]:
            if size is not None:
                _check_size(name, size, limit, where)
    for name, part in config.items():
        if isinstance(part, Mapping) and name.endswith("_config"):
            check_sizes(part, f"{where}: {name}")
    for name, divisor in MULTIPLES:
        heads, groups = config.get(name), config.get(divisor)
        if heads and groups and heads % groups:
            raise UnsupportedModelError(f"{where}: {name} is {heads}, not a multiple of {divisor} {groups}")


def check_gguf_sizes(metadata: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedModelError for a size in a GGUF file that is not a whole number within its limits.

    `metadata`: with None for arrays, which may hold one size per layer.
    """
    for key, value in metadata.items():
        name = key.partition(".")[2]  # transformers accepts any architecture before the first dot
        if name in GGUF_LIMITS and (value is not None or name == "block_count"):
            _check_size(key, value, GGUF_LIMITS[name], where)


def _check_size(name: str, size: object, limit: int, where: str) -> None:
    if type(size) is not int or not 1 <= size <= limit:
        shown = "an array" if size is None else reprlib.repr(size)
        raise UnsupportedModelError(f"{where}: {name} is {shown}; it must be a whole number from 1 to {limit:,}")
