"""Extracts the text part of vision-language checkpoints: its configuration and weight names. Imports no torch."""

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from specpool.engine.config.sources import UnsupportedModelError

WRAPPER = "specpool_wrapper"
"""Configuration key of a text part that holds the model type of the whole checkpoint."""
TEXT_NOTE = "serves the text part; images are not supported"
TEXT_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "mistral3": "mistral",
        "qwen2_vl": "qwen2",
        "qwen2_5_vl": "qwen2",
        "qwen3_vl": "qwen3",
        "gemma3": "gemma3_text",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
    }
)
"""Model type of the language model with the same layers as the text part, by checkpoint model type."""
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
    }
)
"""Prefixes of text weights, mapped to those of a language model. Some checkpoints already use the latter."""
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "dtype", "torch_dtype")


def text_part(config: dict[str, Any], text: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the text part of a vision-language configuration. Other configurations are returned unchanged.

    `text`: the text part with transformers' defaults; None: the text part of `config` as stated. Raises
    UnsupportedModelError if `config` has no text part.
    """
    wrapper = config.get("model_type")
    if not isinstance(wrapper, str) or wrapper not in TEXT_TYPES:
        return config
    if text is None:
        text = _stated_text(config, wrapper)
    kind = text.get("model_type", wrapper)
    # For text, all mrope sections have equal positions, which is a plain rotary embedding.
    ropes = {key: _plain_rope(text[key]) for key in ("rope_parameters", "rope_scaling") if text.get(key)}
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    return {
        **{key: value for key, value in text.items() if key != "architectures"},
        **ropes,
        **shared,
        # transformers ties the head unless the files contain a separate one.
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "model_type": TEXT_TYPES[wrapper] if kind.startswith(wrapper) else kind,
        WRAPPER: wrapper,
    }


def _stated_text(config: dict[str, Any], wrapper: str) -> dict[str, Any]:
    stated = config.get("text_config")
    if stated is None and wrapper.startswith("qwen2"):  # older checkpoints state the text part beside the vision part
        return {key: config[key] for key in config if key != "vision_config"}
    if not isinstance(stated, dict):
        raise UnsupportedModelError(f"text_config of this {wrapper} model is {reprlib.repr(stated)}, not an object")
    kind = stated.get("model_type", wrapper)
    if not isinstance(kind, str):
        raise UnsupportedModelError(
            f"text_config.model_type of this {wrapper} model is {reprlib.repr(kind)}, not a string"
        )
    return stated


def text_name(name: str) -> str:
    """Map the name of a stored text weight to the language model. Other names are returned unchanged."""
    prefix = next(filter(name.startswith, RENAMED), "")
    return RENAMED.get(prefix, "") + name.removeprefix(prefix)


def is_text_weight(name: str) -> bool:
    """Whether a weight with this stored name belongs to the text part."""
    return text_name(name).startswith(("lm_head.", "model.embed_tokens.", "model.layers.", "model.norm."))


def _plain_rope(rope: Any) -> Any:
    if not isinstance(rope, dict):
        return rope
    plain = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    return {key: "default" if value == "mrope" else value for key, value in plain.items()}
