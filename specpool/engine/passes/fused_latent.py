"""Latent attention in the fused pass: the weights that all fast passes read, and the torch operations.

Keys and values of all heads are linear functions of one latent vector per position (DeepSeek-V2, arXiv 2405.04434). The
cache holds that vector and the rotary part of the key, which all heads share. Products with the weights that would
expand them are absorbed: a query is multiplied once instead of every key, and the attended latent vector instead of
every value. Each head has a GEMM of its own, so tiles of rows keep its bits.
"""

from typing import Any

import torch
from torch import nn

from specpool.engine.passes.attention import attend
from specpool.engine.passes.fused_layers import DecoderLayer, Rotation, joined, normed, with_outputs
from specpool.engine.passes.kinds import FULL_ATTENTION
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.passes.rotary import rotate
from specpool.engine.sharding.group import SingleRank
from specpool.engine.weights.quantized import dequantized_linear, linear_of

QUERY_COPIES = 4
"""Live tensors as wide as the absorbed queries of all heads."""


class FusedLatentLayer(DecoderLayer):
    """A decoder layer that caches one head: a key [rank + rotary], whose first `rank` features are also its value."""

    def __init__(self, layer: Any, cache_index: int, config: Any, order: torch.Tensor, group: SingleRank) -> None:
        """`cache_index`: index of the layer in the KV arena. `order`: order of the rotary features."""
        super().__init__(layer, config, group)
        source = layer.self_attn
        self.cache_index, self.rotary, self.scaling = cache_index, 0, source.scaling
        self.attention = FULL_ATTENTION
        self.heads, self.kv_heads = source.num_heads, 1
        self.rank, self.rotary_dim = source.kv_lora_rank, source.qk_rope_head_dim
        self.key_dim, self.value_dim = source.qk_nope_head_dim, source.v_head_dim
        """Features of a head's key without its rotary part, and of its value, in the model without absorption."""
        self.head_dim = self.rank + self.rotary_dim
        """Features of the cached key."""
        self.latent_eps: float = source.kv_a_layernorm.variance_epsilon
        """Epsilon of the norms of latent vectors."""
        of_query, of_key = self._orders(order)
        latent = with_outputs(source.kv_a_proj_with_mqa, of_key)
        is_direct = source.q_lora_rank is None
        self.inputs = joined(with_outputs(source.q_proj, of_query) if is_direct else source.q_a_proj, latent)
        """[queries or their latent vector | latent vector | rotary part of the key]. Queries are ordered by part: the
        non-rotary parts of all heads, then the rotary parts."""
        self.query_norm = None if is_direct else source.q_a_layernorm.weight.detach()
        """Weight of the norm of the queries' latent vector; None: `inputs` has the queries."""
        self.query_up = None if is_direct else with_outputs(source.q_b_proj, of_query)
        """Linear layer from the queries' latent vector to queries."""
        self.latent_norm = source.kv_a_layernorm.weight.detach()
        weight = dequantized_linear(source.kv_b_proj).weight.detach()
        keys, values = weight.view(self.heads, -1, self.rank).split([self.key_dim, self.value_dim], dim=1)
        self.key_ups = nn.ModuleList(linear_of(key.T.contiguous(), None) for key in keys)
        """A linear layer [rank, key_dim] for each head, from queries to queries of latent vectors."""
        self.value_ups = nn.ModuleList(linear_of(value.clone(), None) for value in values)
        """A linear layer [value_dim, rank] for each head, from attended latent vectors to values."""
        self.out = source.o_proj

    @property
    def mixer(self) -> dict[str, list[Any]]:
        """Return the linear layers of attention by name: one for all rows, or one for each head."""
        query_up = {} if self.query_up is None else {"query_up": [self.query_up]}
        ups = {"key_ups": list(self.key_ups), "value_ups": list(self.value_ups)}
        return {"inputs": [self.inputs], **query_up, **ups, "out": [self.out]}

    def dequantize(self) -> None:
        """Dequantize all weights."""
        self.inputs, self.out = dequantized_linear(self.inputs), dequantized_linear(self.out)
        if self.query_up is not None:
            self.query_up = dequantized_linear(self.query_up)
        self.mlp.dequantize()

    def scratch_bytes(self, rows: int) -> int:
        """Return the bytes of absorbed queries and attended latent vectors in a pass of `rows` rows."""
        count: int = rows * QUERY_COPIES * self.heads * self.head_dim * self.latent_norm.element_size()
        return count

    def _orders(self, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the orders of the outputs that queries and latent vectors come from."""
        of_heads = torch.arange(self.heads * (self.key_dim + self.rotary_dim)).view(self.heads, -1)
        keys, rotating = of_heads.split([self.key_dim, self.rotary_dim], dim=1)
        of_key = torch.cat([torch.arange(self.rank), self.rank + order])
        return torch.cat([keys.flatten(), rotating[:, order].flatten()]), of_key

    def _mixed(self, hidden: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        inputs, rows = self.inputs(hidden), len(hidden)
        queries, latent, rotating = inputs.split([inputs.shape[1] - self.head_dim, self.rank, self.rotary_dim], dim=1)
        if self.query_up is not None:
            queries = self.query_up(normed(queries.contiguous(), self.query_norm, self.latent_eps))
        keys, rotated = queries.split([self.heads * self.key_dim, self.heads * self.rotary_dim], dim=1)
        keys = keys.reshape(rows, self.heads, self.key_dim).transpose(0, 1).contiguous()
        absorbed = torch.stack([up(key) for up, key in zip(self.key_ups, keys, strict=True)], 1)
        heads = torch.cat([rotated.reshape(rows, self.heads, -1), rotating[:, None]], 1)
        rotated, rotating = rotate(heads, *rotations[self.rotary]).split([self.heads, 1], dim=1)
        latent = normed(latent.contiguous(), self.latent_norm, self.latent_eps)
        query, key = torch.cat([absorbed, rotated], -1), torch.cat([latent[:, None], rotating], -1)
        attended = attend(batch, self.cache_index, query, key, None, self.scaling)[..., : self.rank]
        by_head = attended.transpose(0, 1).contiguous()  # [heads, rows, rank]
        values = torch.cat([up(each) for up, each in zip(self.value_ups, by_head, strict=True)], -1)
        return self.group.project(self.out, values, "attended")
