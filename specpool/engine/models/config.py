"""Loads a model's configuration and refuses unsupported models."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from specpool.engine.config.architectures import (
    MODELS_PAGE,
    RECURRENT_LAYERS,
    unsupported,
    why_layers_not_supported,
    why_not_supported,
)
from specpool.engine.config.options import MIN_MODEL_LEN, EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, first_line, gguf_file_of, source_of
from specpool.engine.models.checkpoint_quantization import why_unsupported_quantization, without_quantization
from specpool.engine.models.config_values import LIMITS, check_sizes, check_types
from specpool.engine.models.eagle_format import SPECULATOR
from specpool.engine.models.gguf_header import GgufError
from specpool.engine.models.gguf_keys import gguf_config
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.model_files import read_config_file
from specpool.engine.models.mtp_format import MTP_FILES, why_no_mtp
from specpool.engine.models.vision_language import WRAPPER, text_part
from specpool.engine.passes.dry_run import unsupported_attention
from specpool.engine.passes.families import (
    LATENT,
    MIXTURES,
    WINDOWED,
    expert_count,
    why_not_fusable,
    why_not_shardable,
    window_of,
)

UNSTATED_MAX_MODEL_LEN = 4096
"""Maximum positions of a model that states none. No default is shorter, except the model's own limit."""
ONE_LAYER: Mapping[str, object] = MappingProxyType(
    {"layer_types": ["full_attention"], "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
)
"""Values that make the only layer of a configuration like an MTP layer."""
NO_SAFETENSORS = "it has no model.safetensors; only safetensors and GGUF files are read, because others can run code"


def load_config(options: EngineOptions) -> PreTrainedConfig:
    """Load a model's configuration, or that of a target's MTP layer.

    Raises UnsupportedModelError if the model cannot be served, or its target has no MTP layer.
    """
    if options.mtp_target is not None:
        return _mtp_config(options.mtp_target)
    source = source_of(options.model, options.revision)
    try:
        config = _read_config(options, source)
        check_types(config, options.model)
        refusal = _why_never_served(config, options)
        if refusal is None:
            refusal = _why_not_at_length(config, resolve_max_model_len(config, options))
    except UnsupportedModelError:
        raise
    except GgufError as error:
        raise UnsupportedModelError(str(error)) from error
    except Exception as error:  # the files may contain anything
        raise UnsupportedModelError(f"{options.model} is not a usable model: {explain(error)}") from error
    if refusal is not None:
        raise UnsupportedModelError(refusal)
    return config


def resolve_max_model_len(config: PreTrainedConfig, options: EngineOptions) -> int:
    """Return the maximum number of positions in a sequence, ignoring memory.

    The default is all positions of the model, or as many as its rotary embedding allows, but not fewer than
    UNSTATED_MAX_MODEL_LEN if the model has them. Raises UnsupportedModelError if the model has fewer positions than the
    options ask for.
    """
    limit = _own_max_model_len(config)
    if options.max_model_len is not None:
        if options.max_model_len > limit:
            raise UnsupportedModelError(
                f"--max-model-len {options.max_model_len} exceeds the model's {limit} positions"
            )
        return options.max_model_len
    if options.kv_layout == "padded":  # every sequence takes the columns of the longest
        return min(limit, UNSTATED_MAX_MODEL_LEN)
    # Serving fewer positions than this must be asked for.
    return min(limit, max(UNSTATED_MAX_MODEL_LEN, _rotary_limit(config) or limit))


def explain_max_model_len(config: PreTrainedConfig, options: EngineOptions, chosen: int) -> str:
    """Return why an engine serves `chosen` positions."""
    own, resolved = _own_max_model_len(config), resolve_max_model_len(config, options)
    if options.max_model_len is not None:
        return f"as set; the model has {own}"
    if chosen < resolved:
        return f"the model has {own}; limited by KV memory"
    if chosen < own:
        reason = "padded layout" if options.kv_layout == "padded" else "rotary embedding"
        return f"the model has {own}; limited by its {reason}"
    return "all positions of the model"


def explain(error: Exception) -> str:
    """Return why transformers failed. Messages about unsafe files are replaced by clearer ones."""
    reason = first_line(error)
    if "contains custom code" in reason:
        return f"it needs its own code, which is never run; {MODELS_PAGE}"
    if "no file named model.safetensors" in reason or "a file named model.safetensors" in reason:
        return NO_SAFETENSORS
    return f"unknown or missing key {reason}" if isinstance(error, KeyError) else reason


def rope_variants(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return `rope_parameters`, and those of each layer type if it has several."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def _mtp_config(target: EngineOptions) -> PreTrainedConfig:
    """Return the configuration of a model that consists of the MTP layer of a target."""
    config, reason = load_config(target), None
    if gguf_file_of(target.model) is not None:
        reason = f"{target.model} is a GGUF file; {MTP_FILES}"
    reason = reason or why_no_mtp(lambda name: getattr(config, name, None))
    if reason is not None:
        raise UnsupportedModelError(f"mtp: {reason}")
    values = {**without_quantization(config).to_dict(), "num_hidden_layers": 1}
    values |= {name: value for name, value in ONE_LAYER.items() if values.get(name) is not None}
    return type(config)(**values)


def _text_config(wrapper: PreTrainedConfig, stated: dict[str, Any]) -> PreTrainedConfig:
    """Return a vision-language model's text part as the configuration of a language model."""
    text = wrapper.get_text_config(decoder=True).to_dict()
    values = text_part({**stated, "model_type": wrapper.model_type}, text)
    config: PreTrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    config._commit_hash = getattr(wrapper, "_commit_hash", None)  # so that loading reads the same revision
    return config


def _read_config(options: EngineOptions, source: Mapping[str, Any]) -> PreTrainedConfig:
    """Read a configuration. Refuse files that transformers would read slowly or reject with less clear errors."""
    if "gguf_file" in source:
        return gguf_config(GgufFile(Path(source["pretrained_model_name_or_path"], source["gguf_file"])))
    stated = read_config_file(options.model, options.revision)
    if SPECULATOR in stated:
        speculator: PreTrainedConfig = AutoConfig.for_model(stated["model_type"]).from_dict(stated)
        return speculator
    if WRAPPER in stated and stated["model_type"] not in CONFIG_MAPPING:
        raise UnsupportedModelError(unsupported(stated[WRAPPER], f"a text part of type {stated['model_type']}"))
    config: PreTrainedConfig = AutoConfig.from_pretrained(**source)
    return _text_config(config, stated) if WRAPPER in stated else config


def _why_never_served(config: PreTrainedConfig, options: EngineOptions) -> str | None:
    """Return why no options can serve this model; None if some may. Raises UnsupportedModelError for invalid sizes."""

    def read(name: str) -> object:  # including class defaults
        return getattr(config, name, None)

    model_type = config.model_type
    refusal = why_not_supported(read) or why_layers_not_supported(read) or why_unsupported_quantization(config)
    if refusal is not None:
        return refusal
    # GGUF files name no architecture; transformers then picks its class for the model type.
    if not read("architectures") and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"this {model_type} model has no causal language-model head (architectures: none); {MODELS_PAGE}"
    check_sizes({name: read(name) for name in LIMITS}, options.model)  # all architectures use these names
    if not read("num_attention_heads"):
        return unsupported(model_type, "no attention")
    if (invalid := _invalid_layers(config)) is not None:
        return f"this {model_type} model has {invalid}; {MODELS_PAGE}"
    obstacle = why_not_fusable(config) or (None if options.fused else "--fused is off")
    if model_type in RECURRENT_LAYERS and obstacle is not None:
        return f"this {model_type} model runs only in the fused pass, but {obstacle}; {MODELS_PAGE}"
    # Drafts that read hidden states need the fused pass, which reports a more specific error.
    ignores_window = window_of(config) is not None and model_type not in WINDOWED
    is_tried = (ignores_window or why_not_shardable(config) is not None) and options.target_model is None
    feature = unsupported_attention(config, resolve_max_model_len(config, options)) if is_tried else None
    return None if feature is None else unsupported(model_type, feature)


def _invalid_layers(config: PreTrainedConfig) -> str | None:
    """Describe an invalid window or expert count; None if all are valid."""
    window, chosen = window_of(config), getattr(config, "num_experts_per_tok", None)
    if window is not None and window < 1:
        return f"sliding_window {window}; it must be at least 1"
    types: list[str] = getattr(config, "layer_types", None) or []
    if window is None and config.model_type in WINDOWED and "sliding_attention" in types:
        return "sliding_attention layers, but no sliding_window"
    if config.model_type in RECURRENT_LAYERS and not types:
        return "no layer_types, so its kinds of layers are unknown"
    experts = expert_count(config)
    if experts == 0 and config.model_type in MIXTURES - {"qwen3_next"}:  # all of its layers may be dense
        return "0 experts; it must have at least 1"
    if experts and getattr(config, "n_shared_experts", None) == 0 and config.model_type in MIXTURES:
        return "n_shared_experts 0; it must be at least 1"
    if experts and chosen is None and config.model_type in MIXTURES:
        num_dense = getattr(config, "first_k_dense_replace", None) or 0
        if num_dense < config.num_hidden_layers:
            return "no num_experts_per_tok"
    if experts and isinstance(chosen, int) and not 1 <= chosen <= experts:
        return f"num_experts_per_tok {chosen}; it must be from 1 to its {experts} experts"
    groups, top_groups = getattr(config, "n_group", None), getattr(config, "topk_group", None)
    if config.model_type in LATENT and getattr(config, "topk_method", None) != "greedy" and experts:
        missing = [name for name, value in (("n_group", groups), ("topk_group", top_groups)) if value is None]
        if missing:
            return f"no {missing[0]}, which its choice of experts needs"
    return _invalid_groups(experts, chosen, groups, top_groups)


def _invalid_groups(experts: int, chosen: object, groups: object, top_groups: object) -> str | None:
    """Describe invalid expert groups; None if a router can choose from them."""
    if not (experts and isinstance(chosen, int) and isinstance(groups, int) and isinstance(top_groups, int)):
        return None
    if groups > 1 and experts < 2 * groups:
        return f"n_group {groups}; it must be 1 or at most half of its {experts} experts"
    if groups < 1 or experts % groups or not 1 <= top_groups <= groups:
        return (
            f"n_group {groups} and topk_group {top_groups}; n_group must divide its {experts} experts, "
            "and topk_group must be from 1 to n_group"
        )
    if chosen > (available := top_groups * experts // groups):
        return f"num_experts_per_tok {chosen}, but its best groups have only {available} experts"
    return None


def _why_not_at_length(config: PreTrainedConfig, max_model_len: int) -> str | None:
    limit = _rotary_limit(config)
    if limit is None or limit >= max_model_len:
        return None
    feature = f"re-encodes the positions of a whole batch once one exceeds {limit}"
    if limit < MIN_MODEL_LEN:
        return f"this {config.model_type} model {feature}, fewer than the minimum of {MIN_MODEL_LEN}; {MODELS_PAGE}"
    return f"this {config.model_type} model {feature}; serve it with --max-model-len {limit} (see docs/models.md)"


def _own_max_model_len(config: PreTrainedConfig) -> int:
    return getattr(config, "max_position_embeddings", None) or UNSTATED_MAX_MODEL_LEN


def _rotary_limit(config: PreTrainedConfig) -> int | None:
    """Return the length beyond which the rotary embedding changes for a whole batch; None if it never does."""
    ropes = rope_variants(config)
    switches = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    return min(switches, default=None)
