"""Facts about a loaded model: the sizes that the engine needs, and a fingerprint of its weights."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from specpool.engine.config.recurrent_sizes import RecurrentSizes
from specpool.engine.models.loading import LoadedModel
from specpool.engine.passes.families import latent_sizes, longest_window, recurrent_sizes
from specpool.engine.sharding.shares import head_dim_of
from specpool.engine.weights.checksums import checksum
from specpool.engine.weights.quantized import Quantized, QuantizedLinear, Weight, map_on_threads


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
    window: int | None = None
    """Maximum number of positions that a row attends to, including its own; None: all positions up to its own."""
    latent_rank: int | None = None
    """Leading features of a cached key that are also its value, in latent attention; None: values are separate."""
    recurrent: RecurrentSizes | None = None
    """Sizes of recurrent layers, which cache no keys and values; None: all layers attend."""

    @property
    def attention_layers(self) -> int:
        """Number of layers that cache keys and values."""
        return self.layers - (0 if self.recurrent is None else self.recurrent.layers)

    @property
    def query_groups(self) -> int:
        return self.heads // self.kv_heads

    def of_rank(self, kv_heads: int) -> "ModelFacts":
        return replace(self, heads=kv_heads * self.query_groups, kv_heads=kv_heads)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a position in a KV cache of this dtype, over all layers that attend."""
        of_head = (2 if self.latent_rank is None else 1) * self.head_dim
        return self.attention_layers * self.kv_heads * of_head * dtype.itemsize


def read_facts(loaded: LoadedModel, fused: bool = True) -> ModelFacts:
    """Read the facts of a model before a forward pass takes over its weights.

    `fused`: whether the fused pass may run it. Only that pass caches latent vectors.
    """
    config, vocab_size, model = loaded.config, loaded.vocab_size, loaded.full
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]  # tied weights count once
    heads = config.num_attention_heads
    latent = latent_sizes(config) if fused else None
    return ModelFacts(
        vocab_size=vocab_size,
        max_model_len=loaded.max_model_len,
        outputs=vocab_size if loaded.output_ids is None else len(loaded.output_ids),
        parameters=sum(weight.numel() for weight in model.parameters()),
        embedding_parameters=sum(weight.numel() for weight in {end.weight for end in ends}),
        layers=int(config.num_hidden_layers),
        hidden_size=int(config.hidden_size),
        heads=heads,
        kv_heads=1 if latent else getattr(config, "num_key_value_heads", None) or heads,
        head_dim=sum(latent) if latent else head_dim_of(config),
        dtype=loaded.model.dtype,
        device=loaded.model.device,
        window=longest_window(config),
        latent_rank=latent.rank if latent else None,
        recurrent=recurrent_sizes(config),
    )


@torch.inference_mode()
def weights_fingerprint(loaded: LoadedModel, checksums: Mapping[str, bytes] | None = None) -> str:
    """Return SHA-256 over the name, dtype, shape and bits of every weight, before a pass takes over the weights.

    The fingerprint depends on the dtype, but not on the number of files or ranks. Keeping weights quantized or
    dequantizing them to float32 gives the same one. `checksums`: by name, for weights of which this rank has a shard.
    """
    weights, full = named_weights(loaded.model), dict(loaded.full.state_dict())
    if loaded.output_ids is not None:
        weights["output_ids"] = full["output_ids"] = loaded.output_ids
    # Tied weights have two names, but one memory.
    sums = {_memory_of(weights[name]): value for name, value in (checksums or {}).items()}
    missing = {_memory_of(weight): weight for weight in weights.values() if _memory_of(weight) not in sums}
    sums.update(zip(missing, _checksums([*missing.values()]), strict=True))
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        dtype = torch.float32 if isinstance(weight, Quantized) else weight.dtype
        facts = (name, str(dtype), tuple(full[name].shape))
        digest.update(repr(facts).encode() + sums[_memory_of(weight)])
    return digest.hexdigest()


def named_weights(model: PreTrainedModel) -> dict[str, Weight]:
    weights: dict[str, Weight] = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            (weights[f"{name}.weight"],) = module.parts
        else:  # embeddings and experts
            quantized = ((key, value) for key, value in vars(module).items() if isinstance(value, Quantized))
            weights.update({f"{name}.{key}": value for key, value in quantized})
    return weights


def _checksums(weights: Sequence[Weight]) -> list[bytes]:
    if all(weight.data.device.type == "cpu" for weight in weights):
        return map_on_threads(checksum, weights)
    return [checksum(weight) for weight in weights]


def _memory_of(weight: Weight) -> tuple[object, ...]:
    return weight.data.data_ptr(), weight.data.stride(), tuple(weight.data.shape), weight.data.dtype
