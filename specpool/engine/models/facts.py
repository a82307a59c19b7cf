"""The sizes of a loaded model that the engine needs."""

from dataclasses import dataclass, replace

import torch

from specpool.engine.models.loading import LoadedModel


@dataclass(frozen=True)
class ModelFacts:
    """Sizes, dtype and device of a model, as plain values that outlive its modules."""

    vocab_size: int
    max_model_len: int  # maximum positions of a sequence
    outputs: int  # rows of the output head
    parameters: int
    embedding_parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype  # dtype of the weights as loaded
    device: torch.device

    @property
    def query_groups(self) -> int:
        return self.heads // self.kv_heads

    def of_rank(self, kv_heads: int) -> "ModelFacts":
        """Return the facts of a rank with this number of KV heads."""
        return replace(self, heads=kv_heads * self.query_groups, kv_heads=kv_heads)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a position in a KV cache of this dtype, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


def read_facts(loaded: LoadedModel) -> ModelFacts:
    """Read the facts of a model before a forward pass takes over its weights."""
    config, vocab_size = loaded.config, loaded.vocab_size
    heads = config.num_attention_heads
    return ModelFacts(
        vocab_size=vocab_size,
        max_model_len=loaded.max_model_len,
        outputs=vocab_size if loaded.output_ids is None else len(loaded.output_ids),
        parameters=sum(weight.numel() for weight in loaded.full.parameters()),
        embedding_parameters=loaded.embedding_parameters,
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=loaded.model.dtype,
        device=loaded.model.device,
    )
