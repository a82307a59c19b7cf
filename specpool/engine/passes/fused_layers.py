"""The layers of the fused pass: the weights that all fast passes read, and the torch operations."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedConfig

from specpool.engine.config.architectures import DELTA_NETS
from specpool.engine.passes.attention import attend
from specpool.engine.passes.families import OFFSET_NORMS, WINDOWED, activation_of, norm_eps, rotary_types, window_of
from specpool.engine.passes.features import StateNorm
from specpool.engine.passes.fused_experts import FusedExperts
from specpool.engine.passes.kinds import Activation, AttentionKind
from specpool.engine.passes.modules import activated, in_chunks
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
Linear = nn.Linear | QuantizedLinear


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


class DecoderLayer(nn.Module, ABC):
    """A decoder layer: a mixer, which reads other positions, an MLP, and their norms."""

    def __init__(self, layer: Any, config: Any, group: SingleRank) -> None:
        super().__init__()
        self.group, self.eps = group, norm_eps(config)
        activation = activation_of(config)
        assert activation is not None
        self.mlp = _fused_mlp(layer.mlp, activation, group)
        self._take_norms(layer, config.model_type in OFFSET_NORMS)

    def forward(self, hidden: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        """Return the hidden states [rows, hidden] after this layer. `rotations`: indexed like the rotary tables."""
        hidden, normed = self._inputs(hidden)
        hidden = hidden + self._normed(self._mixed(normed, batch, rotations), self.after_attention)
        return hidden + self._normed(self.mlp(self._normed(hidden, self.before_mlp)), self.after_mlp)

    @property
    @abstractmethod
    def mixer(self) -> dict[str, list[Any]]:
        """Return the linear layers of the mixer by name."""

    @property
    def linears(self) -> dict[str, list[Any]]:
        """Return the linear layers by name: one for all rows, or one for each expert."""
        linears, mlp = self.mixer, self.mlp
        if isinstance(mlp, FusedExperts):
            linears |= {"router": [mlp.router], "gate_ups": list(mlp.gate_ups), "downs": list(mlp.downs)}
            mlp = mlp.shared
        return linears if mlp is None else {**linears, "gate_up": [mlp.gate_up], "down": [mlp.down]}

    def dequantize(self) -> None:
        """Dequantize all weights."""
        for name, (linear,) in self.mixer.items():
            setattr(self, name, dequantized_linear(linear))
        self.mlp.dequantize()

    def _take_norms(self, layer: Any, adds_one: bool) -> None:
        norm = partial(norm_weight, layer, adds_one=adds_one)
        self.before_attention = norm("input_layernorm")
        if hasattr(layer, "pre_feedforward_layernorm"):
            self.after_attention = norm("post_attention_layernorm")
            self.before_mlp, self.after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        else:
            self.after_attention = norm("post_self_attn_layernorm")
            self.before_mlp, self.after_mlp = norm("post_attention_layernorm"), norm("post_mlp_layernorm")

    def _inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states that branches are added to, and the input of the mixer."""
        return hidden, self._normed(hidden, self.before_attention)

    @abstractmethod
    def _mixed(self, normed: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        """Return the branch [rows, hidden] of the mixer."""

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return normed(x, weight, self.eps)


class FusedLayer(DecoderLayer):
    """A decoder layer that attends."""

    def __init__(
        self, layer: Any, index: int, cache_index: int, config: Any, order: torch.Tensor, group: SingleRank
    ) -> None:
        """`cache_index`: index of the layer in the KV arena. `order`: order of the features in a head."""
        super().__init__(layer, config, group)
        source = layer.self_attn
        self.cache_index, self.head_dim, self.scaling = cache_index, source.head_dim, source.scaling
        self.attention = _attention_kind(source, config)
        types = rotary_types(config)
        self.rotary = 0 if types == [None] else types.index(config.layer_types[index])
        """Index of the layer's rotary tables."""
        query, key, gates = source.q_proj, in_heads(source.k_proj, order), []
        self.gated = config.model_type in DELTA_NETS
        """Whether a sigmoid gate from the query projection multiplies each attended feature."""
        if self.gated:
            gates = [in_heads(query, torch.arange(self.head_dim, 2 * self.head_dim), 2 * self.head_dim)]
        query = in_heads(query, order, (1 + self.gated) * self.head_dim)
        self.kv_heads = key.out_features // self.head_dim
        self.heads = query.out_features // self.head_dim
        self.qkv = joined(query, key, source.v_proj, *gates)
        self.out = source.o_proj
        self.head_norms = None  # [heads + kv_heads, head_dim]
        if hasattr(source, "q_norm"):
            counts = {"q_norm": self.heads, "k_norm": self.kv_heads}
            norms: Any = {name: norm_weight(source, name, config.model_type in OFFSET_NORMS) for name in counts}
            self.head_norms = torch.cat([norms[name][order].expand(count, -1) for name, count in counts.items()])

    @property
    def mixer(self) -> dict[str, list[Any]]:
        """Return the linear layers of attention by name."""
        return {"qkv": [self.qkv], "out": [self.out]}

    def _mixed(self, normed: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        heads = self.qkv(normed).view(len(normed), -1, self.head_dim)  # [rows, heads + 2 kv_heads (+ heads), head_dim]
        sizes = [self.heads + self.kv_heads, self.kv_heads, self.heads * self.gated]
        query_key, value, gate = heads.split(sizes, dim=1)
        if self.head_norms is not None:
            unit = rms_norm(query_key, (self.head_dim,), eps=self.eps) * self.head_norms
            query_key = unit.to(query_key.dtype)
        query, key = rotate(query_key, *rotations[self.rotary]).split([self.heads, self.kv_heads], dim=1)
        attended = attend(batch, self.cache_index, query, key, value, self.scaling, self.attention).flatten(1)
        if self.gated:
            attended = attended * in_chunks(torch.sigmoid, gate.flatten(1))
        return self.group.project(self.out, attended, "attended")


class JoiningLayer(FusedLayer):
    """The first layer of an EAGLE-3 head. It takes states and embeddings [rows, 2 * hidden], and attends to both."""

    def __init__(
        self, layer: Any, index: int, cache_index: int, config: Any, order: torch.Tensor, group: SingleRank
    ) -> None:
        super().__init__(layer, index, cache_index, config, order, group)
        norms: Any = [
            norm_weight(layer, name, config.model_type in OFFSET_NORMS) for name in ("hidden_norm", "input_layernorm")
        ]
        self.norms = StateNorm(torch.stack(norms), self.eps)
        self.norms_residual: bool = layer.norms_residual

    def _inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined: torch.Tensor = self.norms(hidden)
        state, _ = (joined if self.norms_residual else hidden).chunk(2, dim=-1)
        return state, joined


def joined(*linears: Linear) -> Linear:
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


def _fused_mlp(mlp: Any, activation: Activation, group: SingleRank) -> FusedMlp | FusedExperts:
    if not hasattr(mlp, "experts"):
        return FusedMlp(mlp, activation, group)
    shared = getattr(mlp, "shared_experts", None) or getattr(mlp, "shared_expert", None)
    return FusedExperts(mlp, activation, None if shared is None else FusedMlp(shared, activation, group))


def _attention_kind(attention: Any, config: PreTrainedConfig) -> AttentionKind:
    """Return the window, sinks and soft cap of a layer. Some families keep their window in the configuration."""
    window = getattr(attention, "sliding_window", window_of(config)) if config.model_type in WINDOWED else None
    sinks = getattr(attention, "sinks", None)
    softcap = config.attn_logit_softcapping if config.model_type == "gemma2" else None
    return AttentionKind(window, None if sinks is None else sinks.detach().float(), softcap)


def in_heads(linear: Linear, features: torch.Tensor, head_size: int | None = None) -> Linear:
    """Return the layer with these output features of every head, in this order. `head_size`: features of a head now."""
    size = head_size or len(features)
    if torch.equal(features, torch.arange(size)):
        return linear
    return with_outputs(linear, torch.arange(linear.out_features).view(-1, size)[:, features].flatten())


def with_outputs(linear: Linear, outputs: torch.Tensor) -> Linear:
    """Return the layer with these outputs, in this order."""
    bias = None if linear.bias is None else linear.bias[outputs.to(linear.bias.device)]
    if isinstance(linear, QuantizedLinear):
        (part,) = linear.parts
        return QuantizedLinear([part.rows(outputs) if isinstance(part, Quantized) else part[outputs]], bias)
    return linear_of(linear.weight[outputs.to(linear.weight.device)], bias)
