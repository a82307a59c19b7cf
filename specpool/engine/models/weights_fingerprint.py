"""A fingerprint of a model's weights.

It detects changes such as another revision, another fine-tune or a broken download. It does not detect forgery.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from specpool.engine.models.loading import LoadedModel
from specpool.engine.weights.checksums import checksum
from specpool.engine.weights.quantized import Quantized, QuantizedEmbedding, QuantizedLinear, Weight, map_on_threads


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
        facts = (name, _dtype_of(weight), tuple(full[name].shape))
        digest.update(repr(facts).encode() + sums[_memory_of(weight)])
    return digest.hexdigest()


def named_weights(model: PreTrainedModel) -> dict[str, Weight]:
    weights: dict[str, Weight] = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            (weights[f"{name}.weight"],) = module.parts
        elif isinstance(module, QuantizedEmbedding):
            weights[f"{name}.weight"] = module.weight
    return weights


def _dtype_of(weight: Weight) -> str:
    return str(torch.float32 if isinstance(weight, Quantized) else weight.dtype)


def _checksums(weights: Sequence[Weight]) -> list[bytes]:
    if all(weight.data.device.type == "cpu" for weight in weights):
        return map_on_threads(checksum, weights)
    return [checksum(weight) for weight in weights]


def _memory_of(weight: Weight) -> tuple[object, ...]:
    return weight.data.data_ptr(), weight.data.stride(), tuple(weight.data.shape), weight.data.dtype
