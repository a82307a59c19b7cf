"""The sizes of a loaded model that the engine needs."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from specpool.engine.models.loading import LoadedModel
from specpool.engine.sharding.shares import head_dim_of


@dataclass(frozen=True)
class ModelFacts:
    """Sizes, dtype and device of a model, as plain values that outlive its modules."""

    vocab_size: int
    max_model_len: int  # maximum positions of a sequence
    outputs: int  # rows of the output head
    parameters: int
    embedding_parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # dtype of the weights as loaded
    device: torch.device

    @property
    def query_groups(self) -> int:
        return self.heads // self.kv_heads

    def of_rank(self, kv_heads: int) -> "ModelFacts":
        return replace(self, heads=kv_heads * self.query_groups, kv_heads=kv_heads)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a position in a KV cache of this dtype, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


def read_facts(loaded: LoadedModel) -> ModelFacts:
    """Read the facts of a model before a forward pass takes over its weights."""
    config, vocab_size, model = loaded.config, loaded.vocab_size, loaded.full
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # tied weights count once
    heads = config.num_attention_heads
    return ModelFacts(
        vocab_size=vocab_size,
        max_model_len=loaded.max_model_len,
        outputs=vocab_size if loaded.output_ids is None else len(loaded.output_ids),
        parameters=sum(weight.numel() for weight in model.parameters()),
        embedding_parameters=sum(weight.numel() for weight in {end.weight for end in ends}),
        layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim_of(config),
        dtype=loaded.model.dtype,
        device=loaded.model.device,
    )
