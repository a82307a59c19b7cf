"""Checks of options that need no torch, so that a wrong setting fails in the first second. Loading checks the rest."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ByteSize

from specpool.engine.config.architectures import DELTA_NETS, FEATURES, RECURRENT_LAYERS, why_not_supported
from specpool.engine.config.device_names import check_device_name
from specpool.engine.config.options import MIN_MODEL_LEN, MTP, EngineOptions
from specpool.engine.config.recurrent_sizes import read_recurrent_sizes
from specpool.engine.config.sources import CONFIG, GGUF_MAGIC, UnsupportedModelError, source_of
from specpool.engine.config.target_options import TargetOptions
from specpool.engine.models.embedded_pair import draft_weights, existing_model
from specpool.engine.models.model_files import (
    MAX_CONFIG_BYTES,
    find_file,
    read_config_file,
    read_json,
    stored_names,
)
from specpool.engine.models.mtp_format import MTP_FILES, mtp_layout, no_mtp_weights, why_no_mtp
from specpool.engine.models.vision_language import text_name, text_part
from specpool.protocol.rounds import MAX_LOOKUP_TOKENS
from specpool.protocol.worker_info import TRANSLATE, WorkerInfo, why_not_a_pair

TOKENIZER = "tokenizer.json"
OPTION_NAMES: Mapping[str, str] = MappingProxyType({})
KIMI_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "linear_num_heads": "num_heads",
        "linear_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
)
"""Keys of sizes in the `linear_attn_config` of Kimi Linear, by their names in transformers."""


class InvalidOptionError(UnsupportedModelError):
    """An option cannot be used; the message begins with its name."""

    def __init__(self, option: str, reason: object, names: Mapping[str, str] = OPTION_NAMES) -> None:
        """`names`: what the settings of this command call options."""
        super().__init__(f"{names.get(option, option).replace('_', '-')}: {reason}")


def check_options(options: EngineOptions, names: Mapping[str, str] = OPTION_NAMES) -> None:
    """Raise InvalidOptionError for an option that cannot work. A hub model is looked up once.

    `names`: what the settings of this command call options, such as {"model": "target"}.
    """
    with _naming("device", names):
        for name in options.device.split(","):
            check_device_name(name.strip())
    with _naming("model", names):
        config = _read_config(options)
    if config is None:
        return
    with _naming("max_model_len", names):
        _check_length(options, config)
    for name, limit in options.memory_limits.items():
        with _naming(name, names):
            _check_memory(limit, options, config)


def check_target(options: TargetOptions, names: Mapping[str, str] = OPTION_NAMES) -> None:
    """Raise InvalidOptionError if an option of a target, or of the draft that it carries, cannot work.

    `names`: as in `check_options`.
    """
    check_options(options, names)
    if options.model == MTP or FEATURES in _local_config(options):
        raise InvalidOptionError("model", f"{options.model} is a draft that reads hidden states, not a target", names)
    if (draft := options.draft_options) is not None:
        check_options(draft, {**names, "model": "draft", "kv_memory": "draft_kv_memory"})
        check_pair(options, draft)


def check_pair(
    target: EngineOptions,
    draft: EngineOptions,
    names: Mapping[str, str] = OPTION_NAMES,
    *,
    translates: bool = False,
) -> None:
    """Raise InvalidOptionError if both models are local and the draft does not fit the target.

    `names`: as in `check_options`. `translates`: whether a draft worker runs the draft. If so, tokenizers may differ.
    """
    if draft.model == MTP:
        return  # it is part of the target
    sizes, features = _local_config(target), _local_config(draft).get(FEATURES)
    if not translates:
        check_same_tokenizer(target, draft, TRANSLATE, names)
    elif features is not None:
        check_same_tokenizer(target, draft, "hidden states cannot be translated", names)
    if not sizes or not isinstance(features, dict) or not isinstance(features.get("layers"), list):
        return  # loading reports the error
    reads = WorkerInfo(draft.model, feature_layers=tuple(features["layers"]), feature_width=_size(features, "width"))
    reason = why_not_a_pair(
        reads,
        WorkerInfo(
            target.model,
            returns_features=True,
            num_layers=_size(sizes, "num_hidden_layers"),
            hidden_size=_size(sizes, "hidden_size"),
        ),
    )
    if reason is not None:
        raise InvalidOptionError("draft", reason, names)


def check_same_tokenizer(
    target: EngineOptions, draft: EngineOptions, remedy: str, names: Mapping[str, str] = OPTION_NAMES
) -> None:
    """Raise InvalidOptionError with a remedy if both models are local and their vocabularies differ."""
    files = [_tokenizer_file(options) for options in (target, draft)]
    contents = [file.read_bytes() for file in files if file is not None]
    if len(contents) < len(files) or contents[0] == contents[1]:
        return
    try:
        vocabularies = [json.loads(content)["model"]["vocab"] for content in contents]
    except (ValueError, LookupError, TypeError, RecursionError):
        return  # loading reports the error
    if vocabularies[0] != vocabularies[1]:
        reason = f"{draft.model} uses a different tokenizer than {target.model}; {remedy}"
        raise InvalidOptionError("draft", reason, names)


@contextmanager
def _naming(option: str, names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        raise InvalidOptionError(option, reason, names) from None
    except (UnsupportedModelError, ValueError) as error:
        raise InvalidOptionError(option, error, names) from None


def _read_config(options: EngineOptions) -> dict[str, Any] | None:
    """Return the configuration of a language model; None if it is not in a file of its own."""
    if options.mtp_target is not None:
        return _mtp_config(options.mtp_target)
    if options.model != MTP and options.model.lower() == MTP and not Path(options.model).exists():
        raise UnsupportedModelError(f'{options.model}: the MTP layer of a target is called "{MTP}"')
    model = existing_model(options.model)
    if model is None:
        draft_weights()  # from which the pair will be created
        return None
    source = source_of(model, options.revision)
    if "gguf_file" in source:
        file = Path(source["pretrained_model_name_or_path"], source["gguf_file"])
        with file.open("rb") as gguf:
            if gguf.read(len(GGUF_MAGIC)) != GGUF_MAGIC:
                raise UnsupportedModelError(f"{file} is not a GGUF file")
        return None
    config = read_config_file(model, options.revision)
    refusal = why_not_supported(config.get)
    if refusal is not None:
        raise UnsupportedModelError(refusal)
    return config


def _mtp_config(target: EngineOptions) -> dict[str, Any]:
    """Return the configuration of a target's MTP layer. UnsupportedModelError: the target has none."""
    config = _read_config(target)
    if config is None:
        raise UnsupportedModelError(f"mtp: {target.model} is a GGUF file; {MTP_FILES}")
    if (reason := why_no_mtp(config.get)) is not None:
        raise UnsupportedModelError(f"mtp: {reason}")
    layers, names = _size(config, "num_hidden_layers"), stored_names(target.model, target.revision)
    prefix = mtp_layout(config["model_type"], layers).prefix
    if layers and names is not None and not any(text_name(name).startswith(prefix) for name in names):
        raise UnsupportedModelError(f"mtp: {no_mtp_weights(target.model, prefix)}")
    return {**config, "num_hidden_layers": 1, "layer_types": ["full_attention"]}


def _local_config(options: EngineOptions) -> dict[str, Any]:
    """Return the configuration of a local model; empty if the model has no config file."""
    model = existing_model(options.model)
    file = None if model is None else find_file(model, options.revision, CONFIG)
    return {} if file is None else text_part(read_json(file, MAX_CONFIG_BYTES))


def _check_length(options: EngineOptions, config: dict[str, Any]) -> None:
    limit, length = config.get("max_position_embeddings"), options.max_model_len
    if type(limit) is int and length is not None and length > limit:
        raise UnsupportedModelError(f"{length} exceeds the {limit} positions of {options.model}")


def _check_memory(limit: int, options: EngineOptions, config: dict[str, Any]) -> None:
    """Compare a limit of memory with a lower bound for one sequence, and for the recurrent states of all slots."""
    heads = _size(config, "num_attention_heads")
    layers, kv_heads = _attending_layers(config), _size(config, "num_key_value_heads") or heads
    head_dim = _size(config, "head_dim") or (_size(config, "hidden_size") // heads if heads else 0)
    positions = options.max_model_len or MIN_MODEL_LEN
    rank_heads = ceil(kv_heads / options.tensor_parallel)
    bytes_each = 4 if options.dtype == "float32" else 2
    latent = _size(config, "kv_lora_rank") + _size(config, "qk_rope_head_dim")
    # A layer with latent attention may cache one vector instead of keys and values.
    features = latent if _size(config, "kv_lora_rank") else 2 * rank_heads * head_dim
    states = options.max_sequences * _slot_bytes(config, bytes_each)
    needed = layers * features * bytes_each * positions + states
    if limit < needed:
        shared = (
            f" and the recurrent states of {options.max_sequences} sequences, which need" if states else ", which needs"
        )
        sequence = f"sequence of {positions} positions{shared} at least {ByteSize(needed).human_readable()}"
        raise UnsupportedModelError(f"{ByteSize(limit).human_readable()} is too small for a {sequence}")


def _slot_bytes(config: dict[str, Any], itemsize: int) -> int:
    """Return a lower bound of the recurrent states of a slot in bytes; 0 if all layers attend."""
    layers = _size(config, "num_hidden_layers") - _attending_layers(config)
    if not layers:
        return 0
    if isinstance(of_kimi := config.get("linear_attn_config"), dict):
        config = {**config, **{name: of_kimi.get(key) for name, key in KIMI_SIZES.items()}}
    sizes = read_recurrent_sizes(config["model_type"], layers, partial(_size, config))
    return sizes.slot_bytes(itemsize, rows=MAX_LOOKUP_TOKENS)


def _attending_layers(config: dict[str, Any]) -> int:
    layers, types = _size(config, "num_hidden_layers"), config.get("layer_types")
    if config.get("model_type") not in RECURRENT_LAYERS:
        return layers
    if isinstance(types, list):
        return types.count("full_attention")
    if config["model_type"] in DELTA_NETS:
        return layers // (_size(config, "full_attention_interval") or 4)
    of_kimi = config.get("linear_attn_config")
    attending = of_kimi.get("full_attn_layers") if isinstance(of_kimi, dict) else config.get("full_attn_idxs")
    return len(attending) if isinstance(attending, list) else layers


def _size(config: dict[str, Any], name: str) -> int:
    """Return a size; 0 if the configuration does not give it, so its class has a default."""
    size = config.get(name)
    return size if type(size) is int else 0


def _tokenizer_file(options: EngineOptions) -> Path | None:
    options = options.mtp_target or options
    model = existing_model(options.model)
    return None if model is None else find_file(model, options.revision, TOKENIZER)
