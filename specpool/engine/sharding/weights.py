"""Loads a rank's share of a model through transformers, tensor by tensor, so that no rank ever holds all weights.

transformers lets a quantizer replace each tensor as it is read from its file; here a tensor is replaced by its piece.
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

from specpool.engine.sharding.shares import ADDED, Piece, Share, piece_of
from specpool.engine.weights.checksums import word_sums
from specpool.engine.weights.quantized import Quantized, QuantizedLinear, Weight, as_tensor

METHOD = "specpool_shards"


@register_quantization_config(METHOD)
class ShardConfig(QuantizationConfigMixin):
    """Asks transformers for a rank's share of a model."""

    def __init__(self, config: PreTrainedConfig, share: Share) -> None:
        """`config`: of the model."""
        self.quant_method = METHOD  # type: ignore[assignment]
        self.model, self.share = config, share
        self.sums: dict[str, bytes] = {}
        """`word_sums` of the whole weights that are this rank's to sum up, by name."""

    def piece(self, name: str) -> Piece | None:
        """The rank's piece of the weight of this name; None: the rank has all of it."""
        return piece_of(name, self.model, self.share)

    def share_of(self, name: str, whole: Weight, dtype: torch.dtype | None = None) -> Weight:
        """The rank's part of a weight, which does not keep the whole weight in memory. May sum up the whole weight.

        `dtype`: that the weight will have in the model, if it does not have it yet.
        """
        piece = self.piece(name)
        if piece is None:
            return whole
        if self.is_its_turn(name):
            self.sums[name] = word_sums(whole, dtype)
        return cut(whole, piece)

    def is_its_turn(self, name: str) -> bool:
        """Whether this rank sums up the weight of this name. The work is divided, since it takes the whole weight."""
        return zlib.crc32(name.encode()) % self.share.sharding.ranks == self.share.rank


@register_quantizer(METHOD)
class ShardReader(HfQuantizer):
    """Cuts weights while transformers reads them."""

    quantization_config: ShardConfig
    requires_calibration = False
    is_trainable = False

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        """Whether a weight is cut."""
        return self.quantization_config.piece(param_name) is not None

    def get_quantize_ops(self) -> ConversionOps:
        """What cuts it."""
        return _Cut(self.quantization_config)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """A share is never saved."""
        return False

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        adapt(model, self.quantization_config.share)
        return model


def adapt(model: PreTrainedModel, share: Share) -> None:
    """Makes the modules of a model what a rank's share of their weights makes them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        # Of partial sums, only the first one begins with the bias.
        later = share.sharding.sums == "parts" and share.rank > 0 and name.split(".")[-1] in ADDED
        if later and isinstance(module, nn.Linear | QuantizedLinear):
            module.register_parameter("bias", None)


def cut(whole: Weight, piece: Piece) -> Weight:
    """A rank's part of a weight. Quantized weights stay so, unless a part begins or ends within a block."""
    if isinstance(whole, Quantized):
        if piece.dimension == 0:
            return whole.rows(torch.cat([torch.arange(its.start, its.stop) for its in piece.ranges]))
        (its,) = piece.ranges
        part = whole.columns(its)
        if part is not None:
            return part
    numbers = as_tensor(whole)
    parts = [numbers.narrow(piece.dimension, its.start, len(its)) for its in piece.ranges]
    return torch.cat(parts, piece.dimension)


def sums_of(model: PreTrainedModel) -> dict[str, bytes]:
    """`ShardConfig.sums` of a model that transformers has read, which makes a copy of the configuration for itself."""
    read: Any = model
    sums: dict[str, bytes] = read.hf_quantizer.quantization_config.sums
    return sums


class _Cut(ConversionOps):
    def __init__(self, asked: ShardConfig) -> None:
        self._asked = asked

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """The piece of a tensor, which does not keep the whole tensor in memory; nothing of a tensor of another shape,
        so that the weight is missing: transformers compares no shapes itself where tensors are replaced."""
        (value,), full_layer_name = input_dict.values(), kwargs["full_layer_name"]
        whole: torch.Tensor = value[0] if isinstance(value, list) else value
        if whole.shape != kwargs["model"].get_parameter(full_layer_name).shape:
            return {}
        return {full_layer_name: self._asked.share_of(full_layer_name, whole)}
