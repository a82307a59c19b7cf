"""Divides a model that is to be loaded, or refuses it before anything of it is loaded."""

from pathlib import Path

from engine.models.loading import OUTPUT_HEAD, UnsupportedModelError, load_config, source_of
from engine.models.quantization import unpacking
from engine.options import EngineOptions
from engine.parallel.shares import Sharding, Sums, shard
from engine.passes.lean import why_not_lean


def load_sharding(options: EngineOptions, sums: Sums) -> Sharding:
    """How a model is divided. UnsupportedModelError if it cannot be, before anything of it is loaded."""
    config = load_config(options)
    reason = why_not_lean(config)
    if unpacking(config, source_of(options.model, options.revision)):
        reason = "its weights are quantized, and only safetensors without quantization are read in parts"
    elif (Path(options.model) / OUTPUT_HEAD).is_file():
        reason = "it has an output head for some tokens only"
    try:
        if reason is None:
            return shard(config, options.tensor_parallel, sums)
    except ValueError as error:
        reason = str(error)
    raise UnsupportedModelError(f"{options.model} cannot be divided: {reason}")
