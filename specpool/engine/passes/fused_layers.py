"""The layers of the fused pass: the weights that all fast passes read, and the torch operations."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedConfig

from specpool.engine.passes.attention import attend
from specpool.engine.passes.families import GEMMA, WINDOWED, activation_of, rotary_types, window_of
from specpool.engine.passes.features import StateNorm
from specpool.engine.passes.fused_experts import FusedExperts
from specpool.engine.passes.kinds import Activation, AttentionKind
from specpool.engine.passes.modules import activated
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.passes.rotary import rotate
from specpool.engine.sharding.group import SingleRank
from specpool.engine.weights.quantized import (
    Quantized,
    QuantizedLinear,
    as_tensor,
    dequantized_linear,
    linear_of,
    parts_of,
)

Rotation = tuple[torch.Tensor, torch.Tensor]


class FusedMlp(nn.Module):
    """A gated MLP."""

    def __init__(self, mlp: Any, activation: Activation, group: SingleRank) -> None:
        super().__init__()
        self.group, self.activation = group, activation
        self.gate_up = mlp.gate_up_proj if hasattr(mlp, "gate_up_proj") else joined(mlp.gate_proj, mlp.up_proj)
        """[2 * size, hidden]: gate, then up."""
        self.down = mlp.down_proj

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        """Return the branch [rows, hidden] of normalized rows."""
        return self.group.project(self.down, activated(self.gate_up(normed), self.activation), "intermediate")

    def dequantize(self) -> None:
        """Dequantize all weights."""
        self.gate_up, self.down = dequantized_linear(self.gate_up), dequantized_linear(self.down)


class FusedLayer(nn.Module):
    """One decoder layer of a fused model."""

    def __init__(self, layer: Any, index: int, config: Any, order: torch.Tensor, group: SingleRank) -> None:
        """`order`: order of the features in a head."""
        super().__init__()
        self.group = group
        source = layer.self_attn
        self.index, self.head_dim, self.scaling = index, source.head_dim, source.scaling
        self.eps: float = config.rms_norm_eps
        self.attention = _attention_kind(source, config)
        types = rotary_types(config)
        self.rotary = 0 if types == [None] else types.index(config.layer_types[index])
        """Index of the layer's rotary tables."""
        query, key = reordered(source.q_proj, order), reordered(source.k_proj, order)
        self.kv_heads = key.out_features // self.head_dim
        self.heads = query.out_features // self.head_dim
        self.qkv = joined(query, key, source.v_proj)
        self.out = source.o_proj
        activation = activation_of(config)
        assert activation is not None
        self.mlp = fused_mlp(layer.mlp, activation, group)
        self._take_norms(layer, config.model_type in GEMMA)
        self.head_norms = None  # [heads + kv_heads, head_dim]
        if hasattr(source, "q_norm"):
            counts = {"q_norm": self.heads, "k_norm": self.kv_heads}
            norms: Any = {name: norm_weight(source, name, config.model_type in GEMMA) for name in counts}
            self.head_norms = torch.cat([norms[name][order].expand(count, -1) for name, count in counts.items()])

    def forward(self, hidden: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        """Return the hidden states [rows, hidden] after this layer. `rotations`: indexed like the rotary tables."""
        hidden, normed = self._inputs(hidden)
        attended = self._attend(normed, batch, rotations[self.rotary])
        hidden = hidden + self._normed(self.group.project(self.out, attended, "attended"), self.after_attention)
        return hidden + self._normed(self.mlp(self._normed(hidden, self.before_mlp)), self.after_mlp)

    @property
    def linears(self) -> dict[str, list[Any]]:
        """Return the linear layers by name: one for all rows, or one for each expert."""
        return {"qkv": [self.qkv], "out": [self.out], **self._mlp_linears}

    @property
    def _mlp_linears(self) -> dict[str, list[Any]]:
        linears, mlp = dict[str, list[Any]](), self.mlp
        if isinstance(mlp, FusedExperts):
            linears = {"router": [mlp.router], "gate_ups": list(mlp.gate_ups), "downs": list(mlp.downs)}
            mlp = mlp.shared
        return linears if mlp is None else {**linears, "gate_up": [mlp.gate_up], "down": [mlp.down]}

    def dequantize(self) -> None:
        """Dequantize all weights."""
        self.qkv, self.out = dequantized_linear(self.qkv), dequantized_linear(self.out)
        self.mlp.dequantize()

    def _take_norms(self, layer: Any, is_gemma: bool) -> None:
        norm = partial(norm_weight, layer, adds_one=is_gemma)
        self.before_attention = norm("input_layernorm")
        if hasattr(layer, "pre_feedforward_layernorm"):
            self.after_attention = norm("post_attention_layernorm")
            self.before_mlp, self.after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        else:
            self.after_attention = norm("post_self_attn_layernorm")
            self.before_mlp, self.after_mlp = norm("post_attention_layernorm"), norm("post_mlp_layernorm")

    def _inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states that branches are added to, and the input of attention."""
        return hidden, self._normed(hidden, self.before_attention)

    def _attend(self, hidden: torch.Tensor, batch: PackedBatch, rotation: Rotation) -> torch.Tensor:
        heads = self.qkv(hidden).view(len(hidden), -1, self.head_dim)  # [rows, heads + 2 kv_heads, head_dim]
        query_key, value = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        if self.head_norms is not None:
            normed = rms_norm(query_key, (self.head_dim,), eps=self.eps) * self.head_norms
            query_key = normed.to(query_key.dtype)
        query, key = rotate(query_key, *rotation).split([self.heads, self.kv_heads], dim=1)
        attended = attend(batch, self.index, query, key, value, self.scaling, self.attention)
        return attended.view(len(hidden), -1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return normed(x, weight, self.eps)


class JoiningLayer(FusedLayer):
    """The first layer of an EAGLE-3 head. It takes states and embeddings [rows, 2 * hidden], and attends to both."""

    def __init__(self, layer: Any, index: int, config: Any, order: torch.Tensor, group: SingleRank) -> None:
        super().__init__(layer, index, config, order, group)
        norms: Any = [
            norm_weight(layer, name, config.model_type in GEMMA) for name in ("hidden_norm", "input_layernorm")
        ]
        self.norms = StateNorm(torch.stack(norms), self.eps)
        self.norms_residual: bool = layer.norms_residual

    def _inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined: torch.Tensor = self.norms(hidden)
        state, _ = (joined if self.norms_residual else hidden).chunk(2, dim=-1)
        return state, joined


def joined(*linears: nn.Linear | QuantizedLinear) -> nn.Linear | QuantizedLinear:
    """Return one layer that computes the concatenated outputs of these layers."""
    biased = next((linear.bias for linear in linears if linear.bias is not None), None)
    bias = None
    if biased is not None:
        bias = torch.cat([biased.new_zeros(each.out_features) if each.bias is None else each.bias for each in linears])
    parts = [part for linear in linears for part in parts_of(linear)]
    if any(isinstance(part, Quantized) for part in parts):
        return QuantizedLinear(parts, bias)
    return linear_of(torch.cat([as_tensor(part) for part in parts]), bias)


def norm_weight(module: Any, name: str, adds_one: bool = False) -> torch.Tensor | None:
    """Return the weight of a norm, or 1 + weight in float32; None if `module` does not have the norm."""
    weight: torch.Tensor | None = getattr(getattr(module, name, None), "weight", None)
    return weight.detach().float() + 1 if weight is not None and adds_one else weight


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the RMSNorm of rows, in their dtype; `x` itself without a weight."""
    if weight is None:
        return x
    if weight.dtype != x.dtype:
        return rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return rms_norm(x, weight.shape, weight, eps)


def fused_mlp(mlp: Any, activation: Activation, group: SingleRank) -> FusedMlp | FusedExperts:
    if not hasattr(mlp, "experts"):
        return FusedMlp(mlp, activation, group)
    shared = getattr(mlp, "shared_experts", None)
    return FusedExperts(mlp, activation, None if shared is None else FusedMlp(shared, activation, group))


def _attention_kind(attention: Any, config: PreTrainedConfig) -> AttentionKind:
    """Return the window, sinks and soft cap of a layer. Some families keep their window in the configuration."""
    window = getattr(attention, "sliding_window", window_of(config)) if config.model_type in WINDOWED else None
    sinks = getattr(attention, "sinks", None)
    softcap = config.attn_logit_softcapping if config.model_type == "gemma2" else None
    return AttentionKind(window, None if sinks is None else sinks.detach().float(), softcap)


def reordered(linear: nn.Linear | QuantizedLinear, order: torch.Tensor) -> nn.Linear | QuantizedLinear:
    """Return the layer with the features of every head in this order."""
    if torch.equal(order, torch.arange(len(order))):
        return linear
    rows = torch.arange(linear.out_features).view(-1, len(order))[:, order].flatten()
    bias = None if linear.bias is None else linear.bias[rows.to(linear.bias.device)]
    if isinstance(linear, QuantizedLinear):
        (part,) = linear.parts
        return QuantizedLinear([part.rows(rows) if isinstance(part, Quantized) else part[rows]], bias)
    return linear_of(linear.weight[rows.to(linear.weight.device)], bias)
