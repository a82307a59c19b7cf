"""LFM2's short convolutions in the fused pass: the weights that all fast passes read, and the torch operations."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from specpool.engine.passes.fused_layers import Rotation
from specpool.engine.passes.fused_recurrent import RecurrentLayer
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sharding.group import SingleRank

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding_norm": "norm",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward": "mlp",
        "k_layernorm": "k_norm",
        "operator_norm": "input_layernorm",
        "out_proj": "o_proj",
        "pos_emb": "rotary_emb",
        "q_layernorm": "q_norm",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    }
)
"""Names of modules in other families, by LFM2's name."""
ROUTER_EPSILON = 1e-6
"""Added to the sum of the weights of experts before dividing by it. Other families add next to nothing."""


class FusedShortConv(RecurrentLayer):
    """A decoder layer with a gated short convolution. Its only state is the inputs of the last positions."""

    def __init__(self, layer: Any, recurrent_index: int, config: Any, group: SingleRank) -> None:
        """`recurrent_index`: index of the layer in the recurrent arena."""
        super().__init__(layer, recurrent_index, layer.conv.conv, config, group)
        self.inputs, self.out = layer.conv.in_proj, layer.conv.o_proj
        """`inputs`: [gate of the convolution's inputs | gate of its results | inputs, hidden]."""

    def _mixed(self, normed: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        before, after, x = self.inputs(normed).chunk(3, dim=-1)
        inputs = before * x
        no_gates = inputs.new_empty(len(inputs), 0, dtype=torch.float32)
        convolved = self._run_segments(batch, inputs, no_gates, inputs.shape[1:])
        return self.group.project(self.out, (after * convolved).to(normed.dtype), "attended")

    def _recurrence(
        self, convolved: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, kept: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return convolved, state


def rename_modules(model: nn.Module) -> None:
    """Give the modules of an LFM2 model the names that other families have. The model cannot run afterwards."""
    modules: list[Any] = list(model.modules())
    for module in modules:
        for name, child in list(module.named_children()):
            if name in _NAMES:
                delattr(module, name)
                setattr(module, _NAMES[name], child)
        if hasattr(module, "gate"):  # a router
            module.gate.e_score_correction_bias = getattr(module, "expert_bias", None)
            module.gate.epsilon = ROUTER_EPSILON
