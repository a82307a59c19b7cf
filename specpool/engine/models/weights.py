"""Downloads and reads a model's weights, as stored or with transformers, and refuses incomplete checkpoints."""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from specpool.engine.config.hub import cached_file
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, gguf_file_of, source_of
from specpool.engine.models.checkpoint_quantization import HINT, format_of, is_scale, without_quantization
from specpool.engine.models.config import NO_SAFETENSORS, load_config
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.gguf_tensors import LazyWeight
from specpool.engine.models.packed_weights import packed_weights
from specpool.engine.models.stored_model import build_stored_model, check_tied_head, dequantize_model
from specpool.engine.models.stored_weights import EMBEDDING, HEAD, GgufWeights, read_generation_config, stored_weights
from specpool.engine.models.vision_language import RENAMED, WRAPPER, is_text_weight
from specpool.engine.models.weight_files import check_weights, read_tensor, safetensors_files
from specpool.engine.weights.quantized import Weight

FILES = [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "model-*-of-*.safetensors", "model.safetensors-*-of-*.safetensors"]


def download_weights(options: EngineOptions, report: Callable[[str], None]) -> None:
    """Download the weights of a hub model that are not in its cache, and report that first."""
    if Path(options.model).exists() or _are_cached(options):
        return
    report("downloading weights")
    with suppress(Exception):  # loading the model raises it again, and explains it
        snapshot_download(options.model, revision=options.revision, allow_patterns=FILES)


def _are_cached(options: EngineOptions) -> bool:
    cached = partial(cached_file, options.model, options.revision)
    if (index := cached(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return cached(SAFE_WEIGHTS_NAME) is not None
    return all(map(cached, set(json.loads(index.read_bytes())["weight_map"].values())))


# Keep transformers from asking the hub to convert a checkpoint and loading the proposed conversion.
os.environ["DISABLE_SAFETENSORS_CONVERSION"] = "true"

MAX_NAMES = 3  # maximum names of weights in a message


def read_weights(
    model: str,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    revision: str | None = None,
    **arguments: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a model with all weights in one dtype on one device, and the loading report of its weights.

    `arguments`: passed on to transformers, whose errors pass through.
    """
    options = EngineOptions(model=model, revision=revision)
    stored = stored_weights(options, config)
    if stored is None:
        return read_with_transformers(options, config, device, dtype, **arguments)
    loaded, report = build_stored_model(stored, config, **arguments)
    return dequantize_model(loaded, device, dtype), report


def read_embeddings(options: EngineOptions) -> Weight:
    config = load_config(options)
    stored = stored_weights(options, config)
    weight = None if stored is None else stored.find(EMBEDDING)
    if weight is not None:
        return weight
    model, _ = read_weights(options.model, config, torch.device("cpu"), torch.bfloat16, options.revision)
    embeddings: Any = model.get_input_embeddings()
    dense: torch.Tensor = embeddings.weight.detach()
    return dense


def read_weight(options: EngineOptions, config: PreTrainedConfig, name: str) -> Weight:
    """Read one weight of a safetensors model, or of a model whose weights can stay as stored. UnsupportedModelError."""
    stored = stored_weights(options, config)
    names = [name, EMBEDDING] if name == HEAD and config.tie_word_embeddings else [name]
    for each in names:
        weight = read_tensor(options, config, each) if stored is None else stored.find(each)
        if weight is not None:
            return weight
    raise UnsupportedModelError(f"{options.model} has no {name} that can be read by itself")


def read_with_transformers(
    options: EngineOptions, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, **arguments: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a model onto a device with transformers, and its loading report."""
    if not hasattr(config, WRAPPER):
        return _read(options, config, device, dtype, arguments)
    renamed = {f"^{re.escape(old)}": new for old, new in RENAMED.items()}
    with _muted():
        model, report = _read(options, config, device, dtype, {**arguments, "config": config, "key_mapping": renamed})
    report["unexpected_keys"] = [name for name in report["unexpected_keys"] if is_text_weight(name)]
    # The configuration may not say whether the files contain an output head.
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    model.config.tie_word_embeddings = ends[0].weight is ends[1].weight
    return model, report


def _read(
    options: EngineOptions,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    arguments: dict[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    check_weights(options, config)
    # With a device map, transformers reads onto a GPU tensor by tensor, so the host never holds the whole model. Shards
    # are cut on the host from mapped files, whose other parts are never read.
    placement = {"device_map": {"": device}} if device.type == "cuda" and "quantization_config" not in arguments else {}
    arguments = {**placement, **arguments, **loading_arguments(dtype)}
    packed, gguf = format_of(config), gguf_file_of(options.model)
    if gguf is not None:
        weights = gguf_weights(GgufFile(gguf), config)
        return read_lazily(options, config, weights, device, arguments)
    if packed is not None:
        download_weights(options, lambda phase: None)
        if not (files := safetensors_files(options)):
            raise UnsupportedModelError(NO_SAFETENSORS)
        return read_lazily(options, without_quantization(config), packed_weights(files, packed), device, arguments)
    loaded: Any = AutoModelForCausalLM.from_pretrained(**{**source_of(options.model, options.revision), **arguments})
    model, report = loaded
    return model.to(device), report


def gguf_weights(file: GgufFile, config: PreTrainedConfig) -> Mapping[str, LazyWeight]:
    """Return the weights of a GGUF file by name, with the configured shapes. Raises UnsupportedModelError."""
    stored = GgufWeights(file, config)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    expected = model.state_dict()
    weights = stored.lazy(expected)
    check_tied_head(stored, config)
    tied = {HEAD} if config.tie_word_embeddings else set()
    shapes = {name: (weight.shape, expected[name].shape) for name, weight in weights.items()}
    check_complete(
        {
            "missing_keys": expected.keys() - weights.keys() - tied,
            "mismatched_keys": [(name, *pair) for name, pair in shapes.items() if tuple(pair[0]) != tuple(pair[1])],
            "unexpected_keys": stored.unread,
        }
    )
    check_all_used({"unexpected_keys": stored.unread})
    return {name: weight for name, weight in weights.items() if name not in tied}


def loading_arguments(dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments with which transformers reads any model."""
    return {
        "dtype": dtype,
        "output_loading_info": True,
        "use_safetensors": True,  # checkpoints in pickle format can run code
        "ignore_mismatched_sizes": True,  # check_complete refuses them; transformers would only warn
    }


def read_lazily(
    options: EngineOptions,
    config: PreTrainedConfig,
    weights: Mapping[str, Any],
    device: torch.device,
    arguments: dict[str, Any],
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Read a model from weights by name, and return its loading report.

    transformers asks for `weight[...]` tensor by tensor, which dequantizes one at a time. `options`: of the model that
    provides the generation configuration.
    """
    built: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # AutoModelForCausalLM requires a folder
    lazy = {"config": config, "state_dict": dict(weights)}
    model, report = built.from_pretrained(None, **{**arguments, **lazy})
    model.generation_config = read_generation_config(options) or model.generation_config
    return model.to(device), report


@contextmanager
def _muted() -> Iterator[None]:
    """Suppress the transformers warning that lists every unused weight of a vision tower."""
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_lists_no_unused)
    try:
        yield
    finally:
        log.removeFilter(_lists_no_unused)


def _lists_no_unused(record: logging.LogRecord) -> bool:
    return "UNEXPECTED" not in record.getMessage()


def check_complete(report: dict[str, Any]) -> None:
    """Refuse a checkpoint that transformers completed with random weights, or whose scales it ignored.

    Other unused weights, such as those of further heads, are harmless.
    """
    missing = {name: name for name in report["missing_keys"]}
    for name, stored, expected in report["mismatched_keys"]:
        missing[name] = f"{name} (of shape {list(expected)}, not {list(stored)})"
    if missing:
        names = _join([missing[name] for name in sorted(missing)])
        raise UnsupportedModelError(f"the files lack {len(missing)} of the model's weights: {names}")
    scales = sorted(filter(is_scale, report["unexpected_keys"]))
    if scales:
        raise UnsupportedModelError(
            f"the weights are quantized, as {scales[0]} shows, but the configuration does not say how; {HINT}"
        )


def check_routers(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a router correction is not finite: the logits would not show it."""
    for name, numbers in model.state_dict().items():
        if name.endswith("e_score_correction_bias") and not numbers.isfinite().all():
            raise UnsupportedModelError(f"{name} has NaN or infinite values")


def check_all_used(report: dict[str, Any]) -> None:
    """Refuse a stored checkpoint with weights that the model does not use, because it belongs to another model."""
    unused = report["unexpected_keys"]
    if unused:
        raise UnsupportedModelError(
            f"the files have {len(unused)} weights that the configured model does not use: {_join(unused)}"
        )


def _join(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
