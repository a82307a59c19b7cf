"""A fingerprint of a model's weights.

It detects change - another revision, another fine-tune, a broken download - and not forgery: weights with a given
fingerprint can be made.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from specpool.engine.models.loading import LoadedModel
from specpool.engine.weights.checksums import word_sums
from specpool.engine.weights.quantized import Quantized, QuantizedEmbedding, QuantizedLinear, Weight
from specpool.engine.weights.threads import on_threads


@torch.inference_mode()
def weights_fingerprint(loaded: LoadedModel, sums: Mapping[str, bytes] | None = None) -> str:
    """SHA-256 over name, dtype, shape and bits of every weight, before a pass has taken over the model's weights.

    Bits are those of the weights as they were loaded: another dtype gives another fingerprint, but neither the number
    of files nor the number of ranks makes a difference, nor whether quantized weights are kept or unpacked to
    float32. `sums`: by name, the `word_sums` of weights of which this rank has only a part.
    """
    weights, wholes = _weights_of(loaded.model), dict(loaded.described.state_dict())
    if loaded.output_ids is not None:
        weights["output_ids"] = wholes["output_ids"] = loaded.output_ids
    given = {_place_of(weights[name]): its for name, its in (sums or {}).items()}  # of tied weights, one is named
    facts = {name: (_dtype_of(weight), tuple(wholes[name].shape)) for name, weight in weights.items()}
    same = {name: (*_place_of(weight), *facts[name]) for name, weight in weights.items()}
    each = {same[name]: weight for name, weight in weights.items()}  # tied weights have two names
    known = {key: given[_place_of(weight)] for key, weight in each.items() if _place_of(weight) in given}
    unknown = [key for key in each if key not in known]
    known.update(zip(unknown, _summed([each[key] for key in unknown]), strict=True))
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(repr((name, *facts[name])).encode() + known[same[name]])
    return digest.hexdigest()


def _weights_of(model: PreTrainedModel) -> dict[str, Weight]:
    found: dict[str, Weight] = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            (found[f"{name}.weight"],) = module.parts
        elif isinstance(module, QuantizedEmbedding):
            found[f"{name}.weight"] = module.weight
    return found


def _dtype_of(weight: Weight) -> str:
    return str(torch.float32 if isinstance(weight, Quantized) else weight.dtype)


def _summed(weights: Sequence[Weight]) -> list[bytes]:
    if all(weight.data.device.type == "cpu" for weight in weights):
        return on_threads(word_sums, weights)
    return [word_sums(weight) for weight in weights]


def _place_of(weight: Weight) -> tuple[object, ...]:
    return weight.data.data_ptr(), weight.data.stride()
