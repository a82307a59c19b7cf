"""The fused forward pass of the Llama family. It runs the weights of a transformers model in few operations.

Queries, keys and values share one GEMM, gate and up another, and rotary tables are looked up once for all layers. The
constructor resolves the differences between families, so all run the same pass.

A rank of a sharded model holds its shard of the weights, and gathers the results of the other ranks.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedConfig, PreTrainedModel

from specpool.engine.passes.attention import attend
from specpool.engine.passes.features import FeatureEmbedding, StateNorm
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.modules import in_chunks
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.passes.rotary import RotaryTables, head_order, rotate
from specpool.engine.sharding.group import SINGLE_RANK, SingleRank
from specpool.engine.weights.quantized import (
    Quantized,
    QuantizedLinear,
    Weight,
    as_tensor,
    dequantized_linear,
    linear_of,
    parts_of,
    shares_memory,
)

# Families that rotate pairs of adjacent features. The others pair features half a head apart.
INTERLEAVED = {"glm", "glm4"}
# Vicuna and SmolLM are Llamas too. Branch norms and head norms are detected by name.
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"} | INTERLEAVED


def window_of(config: PreTrainedConfig) -> int | None:
    """Return the sliding window in positions, including the row's own; None if no layer has one."""
    types = getattr(config, "layer_types", None)
    if not getattr(config, "use_sliding_window", True) or (types and "sliding_attention" not in types):
        return None
    return getattr(config, "sliding_window", None)


def longest_window(config: PreTrainedConfig) -> int | None:
    """Return the longest window of all layers, as `window_of`; None if a layer attends to all positions."""
    types = getattr(config, "layer_types", None) or ()
    return window_of(config) if {*types} <= {"sliding_attention"} else None


def is_fusable(config: PreTrainedConfig, max_model_len: int) -> bool:
    """Whether `FusedModel` can run this configuration."""
    return why_not_fusable(config, max_model_len) is None


def why_not_fusable(config: PreTrainedConfig, max_model_len: int) -> str | None:
    """Why `FusedModel` cannot run this configuration; None if it can.

    `max_model_len`: maximum positions of a sequence. The pass supports no windows, so none may be shorter.
    """
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of the families {', '.join(sorted(FAMILIES))}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope:
        return "its rotary embedding has no rope_theta"
    # These types encode a position differently in a longer batch, so a table cannot hold them.
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its rotary embedding has the type {rope['rope_type']}"
    window = window_of(config)
    if window is not None and window < max_model_len:
        return f"its sliding window is shorter than --max-model-len {max_model_len}; up to {window} is fast"
    return None


class FusedModel(ForwardPass):
    """Takes the weights out of a transformers model, which cannot run afterwards. Memory never holds them twice."""

    def __init__(self, model: PreTrainedModel, group: SingleRank = SINGLE_RANK) -> None:
        """`group`: the ranks that share the model."""
        super().__init__()
        self.group = group
        config: Any = model.config
        inner: Any = model.model
        embedding = inner.embed_tokens
        self.fc, self.state_norm, self.projection, self.norms_output = None, None, None, False  # of a feature draft
        if isinstance(embedding, FeatureEmbedding):
            self.fc, self.state_norm, self.projection = embedding.fc, embedding.state_norm, embedding.project
            self.state_size, self.norms_output = config.hidden_size, embedding.norms_output
        self.compute_dtype = model.dtype
        self.eps: float = config.rms_norm_eps
        self.head_dim: int = inner.layers[0].self_attn.head_dim
        self.embedding: Weight = embedding.weight
        self.norm: Any = _norm_weight(inner, "norm")
        self.head: Any = model.lm_head
        self.rotary = RotaryTables(
            inner.rotary_emb, self.head_dim, torch.empty(0, dtype=model.dtype, device=model.device)
        )
        order = head_order(len(inner.rotary_emb.inv_freq), self.head_dim, config.model_type in INTERLEAVED)
        self.layers = nn.ModuleList()
        for index in range(len(inner.layers)):
            kind = JoiningLayer if hasattr(inner.layers[index], "hidden_norm") else FusedLayer
            self.layers.append(kind(inner.layers[index], index, order, group))
            inner.layers[index] = nn.Identity()
        model.lm_head = inner.embed_tokens = nn.Identity()
        layer: Any = self.layers[0]
        self.kv_heads: int = layer.kv_heads

    @property
    def dense_embedding(self) -> torch.Tensor:
        """The embedding, which must not be quantized."""
        assert isinstance(self.embedding, torch.Tensor)
        return self.embedding

    @property
    def is_eagle_head(self) -> bool:
        """Whether layers or norms are those of an EAGLE head, which the compiled pass cannot run."""
        first: Any = self.layers[0]
        return self.norm is None or first.before_attention is None or isinstance(first, JoiningLayer)

    def dequantize(self) -> None:
        """Dequantize all weights, for passes that cannot dequantize them as they go."""
        layers: list[Any] = list(self.layers)
        if any(isinstance(module, QuantizedLinear) for module in self.modules()):
            self.notes.append("its quantized weights are unpacked to float32, because its pass is not compiled")
        tied = shares_memory(self.embedding, self.head)
        self.head = dequantized_linear(self.head)
        self.embedding = self.head.weight if tied else as_tensor(self.embedding)
        if isinstance(self.fc, QuantizedLinear):
            self.fc = dequantized_linear(self.fc)
        if isinstance(self.projection, QuantizedLinear):
            self.projection = dequantized_linear(self.projection)
        for layer in layers:
            layer.dequantize()

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Project states of the target [n, width] to those that the pass reads [n, hidden]."""
        if self.state_norm is not None:
            states = self.state_norm(states)
        return states if self.projection is None else self.projection(states)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows, padding included."""
        hidden = self.group.embed(self.dense_embedding, batch.input_ids)  # [rows, hidden]
        if batch.input_states is not None:
            hidden = torch.cat([batch.input_states, hidden], -1)
            hidden = hidden if self.fc is None else self.fc(hidden)
        cos, sin = self.rotary(batch.max_length)
        rotation = cos[batch.positions, None], sin[batch.positions, None]  # [rows, 1, head_dim]
        for num_layers, layer in enumerate(self.layers, 1):
            hidden = layer(hidden, batch, rotation)
            batch.record_states(num_layers, hidden)
        hidden = hidden[batch.logit_rows]
        normed = _normed(hidden, self.norm, self.eps)
        if batch.own_states is not None:
            batch.own_states.copy_(normed if self.norms_output else hidden)
        return self.group.gather(self.head(normed), "tokens")


class FusedLayer(nn.Module):
    """One decoder layer of a fused model."""

    def __init__(self, layer: Any, index: int, order: torch.Tensor, group: SingleRank) -> None:
        super().__init__()
        self.group = group
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.head_dim, self.scaling = index, attention.head_dim, attention.scaling
        self.eps = layer.post_attention_layernorm.variance_epsilon
        query, key = _reordered(attention.q_proj, order), _reordered(attention.k_proj, order)
        self.kv_heads = key.out_features // self.head_dim
        self.heads = query.out_features // self.head_dim
        self.qkv = _joined(query, key, attention.v_proj)
        self.out = attention.o_proj
        self.gate_up = mlp.gate_up_proj if hasattr(mlp, "gate_up_proj") else _joined(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj
        self.before_attention = _norm_weight(layer, "input_layernorm")
        self.before_mlp = layer.post_attention_layernorm.weight
        self.after_attention = _norm_weight(layer, "post_self_attn_layernorm")
        self.after_mlp = _norm_weight(layer, "post_mlp_layernorm")
        self.head_norms = None  # [heads + kv_heads, head_dim]
        if hasattr(attention, "q_norm"):
            query_norm = attention.q_norm.weight.expand(self.heads, -1)
            self.head_norms = torch.cat([query_norm, attention.k_norm.weight.expand(self.kv_heads, -1)])

    def forward(
        self, hidden: torch.Tensor, batch: PackedBatch, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """The hidden states [rows, hidden] after this layer."""
        hidden, normed = self._inputs(hidden)
        attended = self._attend(normed, batch, rotation)
        hidden = hidden + self._normed(self.group.project(self.out, attended, "attended"), self.after_attention)
        gate, up = self.gate_up(self._normed(hidden, self.before_mlp)).chunk(2, dim=-1)
        activated = in_chunks(silu, gate) * up
        return hidden + self._normed(self.group.project(self.down, activated, "intermediate"), self.after_mlp)

    def dequantize(self) -> None:
        """Dequantize all weights."""
        self.qkv, self.out, self.gate_up, self.down = map(
            dequantized_linear, (self.qkv, self.out, self.gate_up, self.down)
        )

    def _inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states that branches are added to, and the input of attention."""
        return hidden, self._normed(hidden, self.before_attention)

    def _attend(
        self, hidden: torch.Tensor, batch: PackedBatch, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        heads = self.qkv(hidden).view(len(hidden), -1, self.head_dim)  # [rows, heads + 2 kv_heads, head_dim]
        query_key, value = heads[:, : -self.kv_heads], heads[:, -self.kv_heads :]
        if self.head_norms is not None:
            query_key = rms_norm(query_key, (self.head_dim,), eps=self.eps) * self.head_norms
        query, key = rotate(query_key, *rotation).split([self.heads, self.kv_heads], dim=1)
        return attend(batch, self.index, query, key, value, self.scaling).view(len(hidden), -1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return _normed(x, weight, self.eps)


class JoiningLayer(FusedLayer):
    """The first layer of an EAGLE-3 head. It takes states and embeddings [rows, 2 * hidden], and attends to both."""

    def __init__(self, layer: Any, index: int, order: torch.Tensor, group: SingleRank) -> None:
        super().__init__(layer, index, order, group)
        self.norms = StateNorm(torch.stack([layer.hidden_norm.weight, layer.input_layernorm.weight]), self.eps)
        self.norms_residual: bool = layer.norms_residual

    def _inputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined: torch.Tensor = self.norms(hidden)
        state, _ = (joined if self.norms_residual else hidden).chunk(2, dim=-1)
        return state, joined


def _reordered(linear: nn.Linear, order: torch.Tensor) -> nn.Linear:
    """The layer with the features of every head in this order."""
    if torch.equal(order, torch.arange(len(order))):
        return linear
    weight = dequantized_linear(linear).weight
    rows = torch.arange(linear.out_features).view(-1, len(order))[:, order].flatten().to(weight.device)
    return linear_of(weight[rows], None if linear.bias is None else linear.bias[rows])


def _joined(*linears: nn.Linear) -> nn.Linear | QuantizedLinear:
    """One layer that computes the concatenated outputs of these layers."""
    biased = next((linear.bias for linear in linears if linear.bias is not None), None)
    bias = None
    if biased is not None:
        bias = torch.cat([biased.new_zeros(each.out_features) if each.bias is None else each.bias for each in linears])
    parts = [part for linear in linears for part in parts_of(linear)]
    if any(isinstance(part, Quantized) for part in parts):
        return QuantizedLinear(parts, bias)
    return linear_of(torch.cat([as_tensor(part) for part in parts]), bias)


def _norm_weight(module: Any, name: str) -> torch.Tensor | None:
    weight: torch.Tensor | None = getattr(getattr(module, name, None), "weight", None)
    return weight


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if weight is None else rms_norm(x, weight.shape, weight, eps)
