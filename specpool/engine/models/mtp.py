"""Builds the multi-token prediction (MTP) layer of a target as a feature draft of that target.

The layer (DeepSeek-V3, arXiv 2412.19437) reads the target's last states after its final norm, then its own states after
its own final norm. If a checkpoint has several such layers, the first one drafts all tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.checkpoint_quantization import format_of
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_parts import FeatureHead, Features, shaped, state_norm_of
from specpool.engine.models.mtp_format import EMBEDDING_NORM, FC, STATE_NORM, mtp_layout, no_mtp_weights
from specpool.engine.models.packed_weights import PackedWeight, packed_weights
from specpool.engine.models.stored_weights import EMBEDDING, HEAD
from specpool.engine.models.vision_language import text_name
from specpool.engine.models.weight_files import read_tensor, safetensors_files
from specpool.engine.models.weights import (
    check_all_used,
    check_complete,
    check_routers,
    loading_arguments,
    read_lazily,
    read_weight,
)
from specpool.engine.passes.families import why_not_fusable
from specpool.engine.passes.features import FeatureEmbedding
from specpool.engine.weights.quantized import as_tensor, linear_of

FLOATS = ("F32", "BF16", "F16", "F64")
NORM = "model.norm.weight"


def mtp_features(target: PreTrainedConfig) -> Features:
    """Return the states that the MTP layer of a target reads."""
    return Features((target.num_hidden_layers,), target.hidden_size)


def build_mtp_head(
    options: EngineOptions, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> FeatureHead:
    """Read the MTP layer of a target, and its embeddings and head unless the layer has its own. UnsupportedModelError.

    `config`: see `load_config`.
    """
    target = options.mtp_target
    assert target is not None
    if (reason := why_not_fusable(config)) is not None:
        raise UnsupportedModelError(f"MTP layers need the fused pass: {reason}")
    return _Builder(target, config).build(dtype, device)


class _Builder:
    def __init__(self, target: EngineOptions, config: PreTrainedConfig) -> None:
        self.target, self.config, self.target_config = target, config, load_config(target)
        self.layout = mtp_layout(self.target_config.model_type, self.target_config.num_hidden_layers)
        self.hidden: int = self.target_config.hidden_size
        self.weights: dict[str, Any] = {}
        for name, weight in self._stored().items():
            if (own := self.layout.own_name(name)) is not None:
                self.weights[own] = _checked(name, weight)
        if not self.weights:
            raise UnsupportedModelError(no_mtp_weights(target.model, self.layout.prefix))

    def build(self, dtype: torch.dtype, device: torch.device) -> FeatureHead:
        fc = self._take(FC, self.hidden, 2 * self.hidden)
        norms = [self._take(name, self.hidden) for name in (STATE_NORM, EMBEDDING_NORM)]
        final_norm = as_tensor(read_weight(self.target, self.target_config, NORM))
        self._add_ends()
        loaded: Any = read_lazily(self.target, self.config, self.weights, device, loading_arguments(dtype))
        model, report = loaded
        self._check(report)
        check_routers(model)
        embedding = FeatureEmbedding(
            model.get_input_embeddings(),
            linear_of(fc.roll(self.hidden, 1), None),  # states come first, as in `FeatureEmbedding`
            None,
            state_norm_of(self.target_config, final_norm),
            norms_output=True,
            input_norms=state_norm_of(self.target_config, *norms),
        )
        model.set_input_embeddings(embedding)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
        return FeatureHead(model.to(device), mtp_features(self.target_config), None)

    def _stored(self) -> Mapping[str, Any]:
        """All weights of the checkpoint by name; read each as `weight[...]`."""
        files, packed = safetensors_files(self.target), format_of(self.target_config)
        if packed is not None:
            weights = packed_weights(files, packed)
        else:
            opened = [safe_open(file, framework="pt") for file in files]
            weights = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
        return {text_name(name): weight for name, weight in weights.items()}

    def _take(self, own: str, *shape: int) -> torch.Tensor:
        stored = self.weights.pop(own, None)
        return shaped(self.layout.stored_name(own), None if stored is None else stored[...], *shape)

    def _add_ends(self) -> None:
        """Add the target's embeddings and output head, unless the layer has its own."""
        if getattr(self.target_config, "mtp_use_dedicated_embeddings", False) and EMBEDDING not in self.weights:
            name = self.layout.stored_name(EMBEDDING)
            raise UnsupportedModelError(f"{name} is missing, but mtp_use_dedicated_embeddings is True")
        if HEAD not in self.weights and (head := read_tensor(self.target, self.target_config, HEAD)) is not None:
            self.weights[HEAD] = head
        if EMBEDDING not in self.weights:
            self.weights[EMBEDDING] = as_tensor(read_weight(self.target, self.target_config, EMBEDDING))
        elif HEAD not in self.weights:  # the target's is tied
            self.weights[HEAD] = as_tensor(read_weight(self.target, self.target_config, EMBEDDING))
        self.config.tie_word_embeddings = HEAD not in self.weights

    def _check(self, report: Mapping[str, Any]) -> None:
        """Refuse missing, mismatched and unused weights by the names in the checkpoint. UnsupportedModelError."""
        name = self.layout.stored_name
        check_complete(
            {
                "missing_keys": sorted(map(name, report["missing_keys"])),
                "mismatched_keys": [(name(own), *shapes) for own, *shapes in report["mismatched_keys"]],
                "unexpected_keys": [],
            }
        )
        check_all_used({"unexpected_keys": sorted(map(name, report["unexpected_keys"]))})


def _checked(name: str, weight: Any) -> Any:
    """Return a stored weight, which must be dequantized when it is read or be a float. UnsupportedModelError."""
    if not isinstance(weight, PackedWeight) and (stored := weight.get_dtype()) not in FLOATS:
        raise UnsupportedModelError(f"{name} is stored as {stored}, but config.json names no quantization format")
    return weight
