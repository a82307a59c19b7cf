"""Checks a model's safetensors files, and what a configuration claims about them, before weights are read."""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, first_line, gguf_file_of
from specpool.engine.models.checkpoint_quantization import format_of
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.model_files import MAX_HEADER_BYTES, MAX_INDEX_BYTES, find_file, read_json
from specpool.engine.models.packed_weights import packed_weights
from specpool.engine.models.vision_language import text_name

MAX_MISSING = 2
"""Maximum ratio of configured weights to stored ones. Loading names the missing ones, but allocates them first."""


@dataclass(frozen=True)
class StoredSizes:
    """What a model's files contain."""

    tensors: int
    weights: int  # stored elements; each may pack several quantized weights


def stored_sizes(options: EngineOptions) -> StoredSizes | None:
    """Read the headers of a model's weights; None if there are no such files. Raises UnsupportedModelError.

    Raises GgufError for an invalid GGUF file.
    """
    gguf = gguf_file_of(options.model)
    if gguf is not None:
        shapes = [tensor.shape for tensor in GgufFile(gguf).tensors.values()]
    else:
        files = safetensors_files(options)
        if not files:
            return None
        shapes = [shape for file in files for shape in _read_shapes(file)]
    return StoredSizes(len(shapes), sum(map(prod, shapes)))


def read_tensor(options: EngineOptions, config: PreTrainedConfig, name: str) -> torch.Tensor | None:
    """Read one weight from a model's safetensors files; None if it is missing. UnsupportedModelError."""
    if (packed := format_of(config)) is not None:
        weights = packed_weights(safetensors_files(options), packed)
        weight = next((weight for stored, weight in weights.items() if text_name(stored) == name), None)
        return None if weight is None else weight[...]
    for path in safetensors_files(options):
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118
                if text_name(stored) == name:
                    tensor: torch.Tensor = file.get_tensor(stored)
                    return tensor
    return None


def check_layers(config: PreTrainedConfig, tensors: int) -> None:
    """Refuse a configuration with more layers than the files have tensors. UnsupportedModelError."""
    layers = getattr(config, "num_hidden_layers", None) or 0
    if layers > tensors:
        raise UnsupportedModelError(f"num_hidden_layers is {layers:,}, but the files have {tensors:,} tensors")


def check_weights(options: EngineOptions, config: PreTrainedConfig) -> None:
    """Refuse a configuration with far more weights than the files. UnsupportedModelError, GgufError."""
    stored = stored_sizes(options)
    if stored is None:
        return
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    configured = sum(weight.numel() for weight in model.parameters())
    packed = format_of(config)
    if configured > MAX_MISSING * stored.weights * (1 if packed is None else packed.packing):
        raise UnsupportedModelError(
            f"the configured model has {configured:,} weights, but the files have {stored.weights:,}"
        )


def safetensors_files(options: EngineOptions) -> list[Path]:
    """Return the safetensors files of a model: a single one, or those in its index. UnsupportedModelError."""
    single = find_file(options.model, options.revision, SAFE_WEIGHTS_NAME)
    if single is not None:
        return [single]
    index = find_file(options.model, options.revision, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        return []
    content = read_json(index, MAX_INDEX_BYTES)
    parts = content.get("weight_map")
    if not isinstance(parts, dict) or not parts:
        raise UnsupportedModelError(f"{index}: weight_map is not an object that maps weights to files")
    files = []
    for name in sorted(set(map(str, parts.values()))):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UnsupportedModelError(
                f"{index}: weight_map has {name[:80]!r}, which is no safetensors file beside it"
            )
        if not (index.parent / name).is_file():
            raise UnsupportedModelError(f"{index}: weight_map has {name}, which does not exist")
        files.append(index.parent / name)
    if not isinstance(content.get("metadata"), dict):  # transformers requires it
        raise UnsupportedModelError(f'{index}: metadata is not an object; an empty one is enough: "metadata": {{}}')
    return files


def _read_shapes(file: Path) -> list[tuple[int, ...]]:
    with file.open("rb") as opened:
        prefix = opened.read(8)
    if len(prefix) == 8:
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise UnsupportedModelError(f"{file}: its header has {length:,} bytes; the maximum is {MAX_HEADER_BYTES:,}")
    try:  # the library checks lengths, offsets, types and shapes
        with safe_open(file, framework="pt") as tensors:
            return [tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()]  # noqa: SIM118
    except SafetensorError as error:
        reason = first_line(error).removeprefix("Error while deserializing header: ")
        raise UnsupportedModelError(f"{file} is not a usable safetensors file: {reason}") from None
