"""Divides a model that is to be loaded, or refuses it before anything of it is loaded."""

from pathlib import Path

from transformers import PreTrainedConfig

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, gguf_file_of
from specpool.engine.models.checkpoint_quantization import dequantization_arguments
from specpool.engine.models.config import load_config
from specpool.engine.models.output_head import OUTPUT_HEAD
from specpool.engine.models.stored_weights import stored_weights
from specpool.engine.passes.fused import why_not_fusable
from specpool.engine.sharding.shares import Sharding, Sums, shard


def load_sharding(options: EngineOptions, sums: Sums) -> Sharding:
    """How a model is divided. UnsupportedModelError if it cannot be, before anything of it is loaded."""
    config = load_config(options)
    reason = why_not_fusable(config)
    if _read_whole(options, config):
        reason = "its weights are quantized in a way that is not read in parts"
    elif (Path(options.model) / OUTPUT_HEAD).is_file():
        reason = "it has an output head for some tokens only"
    try:
        if reason is None:
            return shard(config, options.tensor_parallel, sums)
    except ValueError as error:
        reason = str(error)
    raise UnsupportedModelError(f"{options.model} cannot be divided: {reason}")


def _read_whole(options: EngineOptions, config: PreTrainedConfig) -> bool:
    """Whether transformers has to unpack the weights, which it does with whole ones only."""
    if gguf_file_of(options.model) is None:
        return bool(dequantization_arguments(config, {}))
    try:
        return stored_weights(options, config) is None
    except ValueError as error:
        raise UnsupportedModelError(str(error)) from error
