"""Loads one rank's shard of a model through transformers, tensor by tensor. No rank ever holds all weights.

A transformers quantizer may replace each tensor as it is read; ours replaces it with the rank's piece.
"""

import zlib
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from specpool.engine.sharding.shares import RESIDUAL_GEMMS, Piece, Share, piece_of
from specpool.engine.weights.checksums import checksum
from specpool.engine.weights.quantized import Quantized, QuantizedLinear, Weight, as_tensor

METHOD = "specpool_shards"


@register_quantization_config(METHOD)
class ShardConfig(QuantizationConfigMixin):
    """Tells transformers to read one rank's shard of a model."""

    def __init__(self, config: PreTrainedConfig, share: Share) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.model, self.share = config, share
        self.checksums: dict[str, bytes] = {}
        """Checksums by name, of the full weights that this rank hashes."""

    def piece(self, name: str) -> Piece | None:
        """Return the rank's piece of a weight; None: the rank has all of it."""
        return piece_of(name, self.model, self.share)

    def cut(self, name: str, full: Weight, dtype: torch.dtype | None = None) -> Weight:
        """Return the rank's shard of a weight without keeping the full one in memory, and record its checksum.

        `dtype`: the final data type of the weight, if it does not have it yet.
        """
        piece = self.piece(name)
        if piece is None:
            return full
        # Each rank hashes some of the weights, because hashing reads the full weight.
        if zlib.crc32(name.encode()) % self.share.sharding.ranks == self.share.rank:
            self.checksums[name] = checksum(full, dtype)
        return cut(full, piece)


@register_quantizer(METHOD)
class ShardReader(HfQuantizer):
    """Cuts weights while transformers reads them."""

    quantization_config: ShardConfig
    requires_calibration = False
    is_trainable = False

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        return self.quantization_config.piece(param_name) is not None

    def get_quantize_ops(self) -> ConversionOps:
        return _Cut(self.quantization_config)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Shards are never saved."""
        return False

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        adapt(model, self.quantization_config.share)
        return model


def adapt(model: PreTrainedModel, share: Share) -> None:
    """Adjust the modules of a model to the shapes of a rank's shard."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        # Only the first partial sum includes the bias.
        drops_bias = share.sharding.sums == "parts" and share.rank > 0 and name.split(".")[-1] in RESIDUAL_GEMMS
        if drops_bias and isinstance(module, nn.Linear | QuantizedLinear):
            module.register_parameter("bias", None)


def cut(full: Weight, piece: Piece) -> Weight:
    """Cut a piece out of a weight. Quantized weights stay quantized if the piece consists of whole blocks."""
    if isinstance(full, Quantized):
        if piece.dimension == 0:
            return full.rows(torch.cat([torch.arange(rows.start, rows.stop) for rows in piece.ranges]))
        (columns,) = piece.ranges
        quantized = full.columns(columns)
        if quantized is not None:
            return quantized
    numbers = as_tensor(full)
    parts = [numbers.narrow(piece.dimension, part.start, len(part)) for part in piece.ranges]
    return torch.cat(parts, piece.dimension)


def checksums_of(model: PreTrainedModel) -> dict[str, bytes]:
    """Return `ShardConfig.checksums` of a model that transformers read with its own copy of the configuration."""
    loaded: Any = model
    checksums: dict[str, bytes] = loaded.hf_quantizer.quantization_config.checksums
    return checksums


class _Cut(ConversionOps):
    def __init__(self, shard: ShardConfig) -> None:
        self._shard = shard

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Cut a tensor. A tensor of the wrong shape is dropped, so that transformers reports it as missing."""
        (value,), name = input_dict.values(), kwargs["full_layer_name"]
        full: torch.Tensor = value[0] if isinstance(value, list) else value
        if full.shape != kwargs["model"].get_parameter(name).shape:
            return {}
        return {name: self._shard.cut(name, full)}
