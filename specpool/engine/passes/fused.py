"""The fused forward pass of most decoder-only families. It runs a transformers model in fewer operations.

Queries, keys and values share one GEMM, gate and up another, and rotary tables are looked up once for all layers. The
constructor resolves the differences between families, so all run the same pass.

A rank of a sharded model holds its shard of the weights, and gathers the results of the other ranks.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specpool.engine.config.architectures import KIMI_LINEAR, SHORT_CONVS
from specpool.engine.passes.families import (
    LATENT,
    OFFSET_NORMS,
    embedding_scale,
    is_interleaved,
    norm_eps,
    recurrent_sizes,
    rotary_types,
)
from specpool.engine.passes.features import FeatureEmbedding
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused_delta_net import FusedDeltaNet
from specpool.engine.passes.fused_kimi import FusedKimiDeltaNet, adapt_modules
from specpool.engine.passes.fused_latent import FusedLatentLayer
from specpool.engine.passes.fused_layers import DecoderLayer, FusedLayer, JoiningLayer, norm_weight, normed
from specpool.engine.passes.fused_recurrent import RecurrentLayer
from specpool.engine.passes.fused_short_conv import FusedShortConv, rename_modules
from specpool.engine.passes.modules import softcapped
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.passes.rotary import RotaryTables, head_order
from specpool.engine.sharding.group import SINGLE_RANK, SingleRank
from specpool.engine.weights.quantized import (
    QuantizedLinear,
    Weight,
    as_tensor,
    dequantized_linear,
    shares_memory,
)


class FusedModel(ForwardPass):
    """Takes the weights out of a transformers model, which cannot run afterwards. Memory never holds them twice."""

    def __init__(self, model: PreTrainedModel, group: SingleRank = SINGLE_RANK) -> None:
        """`group`: the ranks that share the model."""
        super().__init__()
        self.group = group
        config: Any = model.config
        inner: Any = model.model
        if config.model_type in SHORT_CONVS:
            rename_modules(inner)
        if config.model_type == KIMI_LINEAR:
            adapt_modules(inner)
        embedding = inner.embed_tokens
        self.fc, self.state_norm, self.projection, self.norms_output = None, None, None, False  # of a feature draft
        self.input_norms = None
        if isinstance(embedding, FeatureEmbedding):
            self.fc, self.state_norm, self.projection = embedding.fc, embedding.state_norm, embedding.project
            self.input_norms = embedding.input_norms
            self.state_size, self.norms_output = config.hidden_size, embedding.norms_output
        self.compute_dtype = model.dtype
        self.recurrent_sizes = recurrent_sizes(config)
        """Sizes of the recurrent layers; None if all layers attend."""
        self.eps = norm_eps(config)
        self.embedding: Weight = embedding.weight
        self.embedding_scale = embedding_scale(config, model.dtype)
        """Factor of embeddings."""
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        """Bound on logits, applied as softcap * tanh(logit / softcap); None: no bound."""
        self.norm: Any = norm_weight(inner, "norm", config.model_type in OFFSET_NORMS)
        self.head: Any = model.lm_head
        like, rotary = torch.empty(0, dtype=model.dtype, device=model.device), inner.rotary_emb
        is_latent = config.model_type in LATENT
        attention = next(layer.self_attn for layer in inner.layers if hasattr(layer, "self_attn"))
        rotary_dim = attention.qk_rope_head_dim if is_latent else attention.head_dim
        self.rotaries = [RotaryTables(rotary, rotary_dim, like, kind) for kind in rotary_types(config)]
        order = head_order(self.rotaries[0].angles, rotary_dim, is_interleaved(config))
        self.layers = nn.ModuleList()
        for index, layer in enumerate(inner.layers):
            self.layers.append(self._fused(layer, index, config, order))
            inner.layers[index] = nn.Identity()
        model.lm_head = inner.embed_tokens = nn.Identity()
        attending: Any = next(layer for layer in self.layers if not isinstance(layer, RecurrentLayer))
        self.kv_heads: int = attending.kv_heads
        self.head_dim: int = attending.head_dim
        """Features of a cached key."""
        self.latent_rank: int | None = attending.rank if is_latent else None
        """Leading features of a cached key that are also its value, in latent attention; None: values are separate."""

    def _fused(self, layer: Any, index: int, config: Any, order: torch.Tensor) -> DecoderLayer:
        """Return a layer of the library's model as a fused layer, after the layers before it."""
        recurrent = sum(isinstance(each, RecurrentLayer) for each in self.layers)
        if hasattr(layer, "linear_attn"):
            net = FusedKimiDeltaNet if config.model_type == KIMI_LINEAR else FusedDeltaNet
            return net(layer, recurrent, config, self.group)
        if hasattr(layer, "conv"):
            return FusedShortConv(layer, recurrent, config, self.group)
        if config.model_type in LATENT:
            return FusedLatentLayer(layer, index - recurrent, config, order, self.group)
        kind = JoiningLayer if hasattr(layer, "hidden_norm") else FusedLayer
        return kind(layer, index, index - recurrent, config, order, self.group)

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

    @property
    def uncompiled_layers(self) -> str | None:
        """The kind of layers that GPU kernels cannot run; None if there are none."""
        if any(isinstance(layer, FusedKimiDeltaNet) for layer in self.layers):
            return "Kimi Delta Attention"
        return None

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

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Scratch bytes of the largest recurrent or latent layer, in a pass of `rows` rows."""
        kinds = RecurrentLayer | FusedLatentLayer
        return max((layer.scratch_bytes(rows) for layer in self.layers if isinstance(layer, kinds)), default=0)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Project states of the target [n, width] to those that the pass reads [n, hidden]."""
        if self.state_norm is not None:
            states = self.state_norm(states)
        return states if self.projection is None else self.projection(states)

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows, padding included."""
        hidden = self.group.embed(self.dense_embedding, batch.input_ids) * self.embedding_scale  # [rows, hidden]
        if batch.input_states is not None:
            hidden = torch.cat([batch.input_states, hidden], -1)
            hidden = hidden if self.input_norms is None else self.input_norms(hidden)
            hidden = hidden if self.fc is None else self.fc(hidden)
        tables = [rotary(batch.max_length) for rotary in self.rotaries]
        rotations = [(cos[batch.positions, None], sin[batch.positions, None]) for cos, sin in tables]
        for num_layers, layer in enumerate(self.layers, 1):
            hidden = layer(hidden, batch, rotations)
            batch.record_states(num_layers, hidden)
        hidden = hidden[batch.logit_rows]
        final = normed(hidden, self.norm, self.eps)
        if batch.own_states is not None:
            batch.own_states.copy_(final if self.norms_output else hidden)
        logits = self.head(final)
        if self.softcap is not None:
            logits = softcapped(logits, self.softcap)
        return self.group.gather(logits, "tokens")
