"""Maps GGUF metadata to model configurations. Every key that affects results is applied, or the file is refused.

transformers drops many of these keys.
"""

from collections.abc import Mapping
from math import isclose
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config_values import MAX_ROWS, check_gguf_sizes
from specpool.engine.models.gguf_families import (
    ATTENTION_CAP,
    BASE_OF_WINDOWS,
    CAP,
    FAMILIES,
    HEADS,
    KEY_LENGTH,
    NEUTRAL,
    NEXTN,
    OPTIONAL,
    VALUE_LENGTH,
    WEIGHTS_NORM,
    WEIGHTS_SCALE,
    WINDOW,
    WINDOW_PATTERN,
    WITHOUT_EFFECT,
    Family,
    family_of,
)
from specpool.engine.models.gguf_reader import ARCHITECTURE, GgufFile
from specpool.engine.models.gguf_rope import HELP, ROPE_KEYS, positive, refusal, rope_parameters

SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
"""Names of ids in the file, and their fields of a configuration, whose classes have ids of other vocabularies."""
TOKENS = "tokenizer.ggml.tokens"
FRACTIONS = (CAP, ATTENTION_CAP, WEIGHTS_SCALE)
"""Keys whose values may be fractions or 0."""
FROM_ZERO = ("leading_dense_block_count", NEXTN, "expert_group_count", "expert_group_used_count")
UNITS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
"""Neutral values of fields whose key is 0."""
KINDS = {"expert_": "a mixture of experts", "ssm.": "a state-space hybrid", "shortconv.": "a convolution hybrid"}


def config_fields(file: GgufFile) -> dict[str, Any]:
    """Return the configuration fields that a file defines, including llama.cpp's defaults.

    Raises UnsupportedModelError, naming the key, for a value that cannot be applied.
    """
    family, fields = _family(file), _fields_without_rope(file)
    return {**fields, "rope_parameters": _rope(file, fields["head_dim"])} if family.rotary else fields


def _fields_without_rope(file: GgufFile) -> dict[str, Any]:
    family, keys = _family(file), _keys(file)
    fields = {name: keys[key] for key, name in {**family.required, **_optional(family)}.items() if key in keys}
    fields |= {cap: fields[cap] or None for cap in (CAP, ATTENTION_CAP) if cap in fields}
    fields |= {name: fields[name] or one for name, one in UNITS.items() if name in fields}
    fields = {**_stated_by_tensors(file, family), **fields, **family.fixed}
    if nextn := keys.get(NEXTN, 0):  # layers for multi-token prediction
        if nextn >= keys["block_count"]:
            raise refusal(file, NEXTN, f"it must be less than the block_count of {keys['block_count']}")
        fields["num_hidden_layers"] = keys["block_count"] - nextn
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
    return fields


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` of all layers, or of each type of layers."""
    family, keys = _family(file), _keys(file)
    rope = rope_parameters(file, keys, head_dim, family.partial)
    if file.architecture == "gpt-oss" and rope["rope_type"] == "yarn":
        rope["truncate"] = False  # llama.cpp rounds the bounds of YaRN; the model does not
    if file.architecture != "gemma3":
        return rope
    windows = {"rope_type": "default", "rope_theta": positive(file, keys, BASE_OF_WINDOWS, 10_000.0)}
    return {"full_attention": rope, "sliding_attention": windows}


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """Return the configuration of a file. Raises UnsupportedModelError like `config_fields`."""
    config: PreTrainedConfig = AutoConfig.for_model(_family(file).model_type, **config_fields(file))
    return config


def check_config(file: GgufFile, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if the config.json in a file's folder contradicts the file."""
    family, fields = _family(file), _fields_without_rope(file)
    rope = _full(getattr(config, "rope_parameters", None) or {})
    fields["rope_theta"] = _keys(file).get("rope.freq_base")
    for key, name in {**family.required, **_optional(family), "rope.freq_base": "rope_theta"}.items():
        stated: Any = fields.get(name)
        configured: Any = getattr(config, name, rope.get(name))
        # A configuration may allow more positions than the file states, or pad the vocabulary.
        if key in ("context_length", "vocab_size") or None in (stated, configured):
            continue
        if not isclose(stated, configured, rel_tol=1e-5):  # the file's numbers are float32
            raise UnsupportedModelError(
                f"the configuration does not match {file.path.name}: "
                f"{name} is {configured}, but the file's {key} is {stated}"
            )
    if family.rotary and rope.get("rope_type", "default") == "default":
        scaled = _full(_rope(file, fields["head_dim"]))
        if scaled["rope_type"] != "default":
            raise UnsupportedModelError(
                f"the configuration does not match {file.path.name}: it has no scaling in rope_parameters, but the "
                f"file scales positions (type {scaled['rope_type']})"
            )


def ignored_tensors(file: GgufFile) -> set[str]:
    """Return the tensors of the multi-token prediction layers."""
    keys = _keys(file)
    extra = {f"blk.{keys['block_count'] - 1 - number}" for number in range(keys.get(NEXTN, 0))}
    return {name for name in file.tensors if ".".join(name.split(".")[:2]) in extra}


def _full(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `rope_parameters` of layers that attend to all positions."""
    full: Mapping[str, Any] = rope.get("full_attention", rope)
    return full


def _family(file: GgufFile) -> Family:
    if file.metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(f"{file.path}: general.type is {file.metadata['general.type']}, not model; {HELP}")
    family = family_of(file)
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
    stated = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    keys: dict[str, Any] = {**family.defaults, **stated}
    applied = {*family.required, *_optional(family), *family.equal, VALUE_LENGTH, WINDOW}
    applied |= ROPE_KEYS if family.rotary else set()
    applied |= {WINDOW_PATTERN} if family.pattern is not None else set()
    applied |= {BASE_OF_WINDOWS} if file.architecture == "gemma3" else set()
    for key, value in keys.items():
        if key in applied:
            if value is None:
                raise refusal(file, key, "only one value for all layers is supported")
        elif value not in family.neutral.get(key, NEUTRAL.get(key, ())) and key not in WITHOUT_EFFECT:
            kind = next((kind for start, kind in KINDS.items() if key.startswith(start)), "")
            reason = f"it is not supported for {file.architecture} models and may change their results"
            if kind and (file.architecture != "llama" or not key.startswith("expert_")):  # Mixtral
                reason = f"the model is {kind}, which {file.architecture} files do not support"
            raise refusal(file, key, reason)
    for key in (*family.required, *(key for key in (*family.optional, WINDOW_PATTERN) if key in keys)):
        _check_number(file, key, keys)
    for key, other in family.equal.items():
        if keys.get(key, keys[other]) != keys[other]:
            raise refusal(file, key, f"it must equal the {other} of {keys[other]}")
    return keys


def _check_number(file: GgufFile, key: str, keys: Mapping[str, Any]) -> None:
    if key not in keys:
        raise UnsupportedModelError(f"{file.path}: {file.architecture}.{key} is missing; convert the model again")
    value, kind = keys[key], type(keys[key])
    if key == WEIGHTS_NORM:
        reason = None if kind is bool else "it must be true or false"
    elif key in FRACTIONS or key.endswith("epsilon"):
        reason = None if kind in (int, float) and value >= 0 else "it must be a positive number"
    else:
        valid = kind is int and (key not in FROM_ZERO) <= value <= MAX_ROWS
        reason = None if valid or key == "context_length" else "it must be a positive whole number"
    if reason is not None:
        raise refusal(file, key, reason)


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
    if family.pattern is not None:
        pattern = keys.get(WINDOW_PATTERN, family.pattern)
        kinds = [(layer + 1) % pattern > 0 for layer in range(keys["block_count"])]
        fields["layer_types"] = ["sliding_attention" if kind else "full_attention" for kind in kinds]
    if window and file.architecture.startswith("qwen"):  # transformers derives layer_types before it knows the window
        fields["layer_types"] = ["sliding_attention"] * keys["block_count"]
    return fields


def _stated_by_tensors(file: GgufFile, family: Family) -> dict[str, Any]:
    """Return the fields that follow from which tensors a file has."""
    fields: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in file.tensors}
    if TOKENS in file.arrays:
        fields["vocab_size"] = file.arrays[TOKENS].count
    if family.model_type == "glm4_moe":
        fields["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    return fields
