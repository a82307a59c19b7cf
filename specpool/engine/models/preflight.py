"""Checks of options that need no torch, so that a wrong setting fails in the first second. Loading checks the rest."""

import json
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specpool.engine.config.device_names import check_device_name
from specpool.engine.config.options import MIN_MODEL_LEN, EngineOptions
from specpool.engine.config.sources import CONFIG, GGUF_MAGIC, UnsupportedModelError, source_of

TOKENIZER = "tokenizer.json"
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
"""Endings of the architectures with a causal language-model head."""

OPTION_NAMES: Mapping[str, str] = MappingProxyType({})


class InvalidOptionError(UnsupportedModelError):
    """An option cannot be used; the message begins with its name."""

    def __init__(self, option: str, reason: object, names: Mapping[str, str] = OPTION_NAMES) -> None:
        """`names`: what the settings of this command call options."""
        super().__init__(f"{names.get(option, option).replace('_', '-')}: {reason}")


def check_options(options: EngineOptions, names: Mapping[str, str] = OPTION_NAMES) -> None:
    """Raise InvalidOptionError for an option that cannot work. A hub model is looked up once.

    `names`: what the settings of this command call options, such as {"model": "target"}.
    """
    option = "device"
    try:
        for name in options.device.split(","):
            check_device_name(name.strip())
        option = "model"
        config = _read_config(options)
        if config is not None:
            refusal = why_not_a_decoder(
                config.get("model_type"), config.get("architectures"), config.get("is_encoder_decoder") is True
            )
            if refusal is not None:
                raise UnsupportedModelError(refusal)
            option = "max_model_len"
            _check_length(options, config)
            option = "kv_memory" if options.memory_budget is None else "memory_budget"
            _check_memory(options, config)
    except (UnsupportedModelError, OSError, ValueError) as error:
        raise InvalidOptionError(option, error, names) from None


def check_same_tokenizer(target: EngineOptions, draft: EngineOptions, draft_option: str = "draft") -> None:
    """Raise InvalidOptionError if both models are local and their vocabularies differ."""
    files = [_local_file(options, TOKENIZER) for options in (target, draft)]
    contents = [file.read_bytes() for file in files if file is not None]
    if len(contents) < len(files) or contents[0] == contents[1]:
        return
    try:
        vocabularies = [json.loads(content)["model"]["vocab"] for content in contents]
    except (ValueError, LookupError, TypeError):
        return  # loading says what is wrong with the file
    if vocabularies[0] != vocabularies[1]:
        raise InvalidOptionError(draft_option, f"{draft.model} has another tokenizer than the target {target.model}")


def why_not_a_decoder(model_type: object, architectures: object, is_encoder_decoder: bool) -> str | None:
    """Return why a model is not a decoder-only language model; None if it is, or if it names no architectures."""
    if is_encoder_decoder:
        return f"a {model_type} model is an encoder-decoder; only decoder-only models are served"
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if names and not any(name.endswith(LANGUAGE_MODELS) for name in names):
        return f"a {model_type} model has no causal language-model head (architectures: {', '.join(names)})"
    return None


def _read_config(options: EngineOptions) -> dict[str, Any] | None:
    """Return the model's config.json; None for a GGUF file, which contains its configuration."""
    source = source_of(options.model, options.revision)
    if "gguf_file" in source:
        with open(options.model, "rb") as file:
            if file.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise UnsupportedModelError(f"{options.model} is not a GGUF file")
        return None
    path = Path(options.model)
    if path.is_dir():
        file = path / CONFIG
    else:
        from specpool.engine.config.hub import hub_config  # takes a while to import

        file = hub_config(options.model, options.revision)
    try:
        config = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnsupportedModelError(f"{file} is not a JSON file: {error}") from None
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{file} has no JSON object")
    return config


def _check_length(options: EngineOptions, config: dict[str, Any]) -> None:
    limit, length = config.get("max_position_embeddings"), options.max_model_len
    if type(limit) is int and length is not None and length > limit:
        raise UnsupportedModelError(f"{length} exceeds the {limit} positions of {options.model}")


def _check_memory(options: EngineOptions, config: dict[str, Any]) -> None:
    """Compare the memory with a lower bound for one sequence."""
    memory = options.kv_memory if options.memory_budget is None else options.memory_budget
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    layers, kv_heads = config.get("num_hidden_layers"), config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or (hidden // heads if type(hidden) is type(heads) is int and heads else None)
    sizes = (layers, kv_heads, head_dim)
    if memory is None or not all(type(size) is int and size > 0 for size in sizes):
        return
    positions = options.max_model_len or MIN_MODEL_LEN
    rank_heads = ceil(kv_heads / options.tensor_parallel)
    bytes_each = 4 if options.dtype == "float32" else 2
    needed = 2 * layers * rank_heads * head_dim * bytes_each * positions
    if memory < needed:
        sequence = f"sequence of {positions} positions, which needs at least {needed:,} bytes"
        raise UnsupportedModelError(f"{memory.human_readable()} holds no {sequence}")


def _local_file(options: EngineOptions, name: str) -> Path | None:
    path = Path(options.model)
    if path.is_dir():
        return path / name if (path / name).is_file() else None
    if path.exists():
        return None
    from specpool.engine.config.hub import cached_file

    return cached_file(options.model, options.revision, name)
