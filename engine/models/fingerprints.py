"""A fingerprint of a model's weights.

It detects change - another revision, another fine-tune, a broken download - and not forgery: weights with a given
fingerprint can be made.
"""

import hashlib
from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from engine.models.loading import LoadedModel
from engine.models.words import word_sums
from engine.weights.coded import Coded, CodedEmbedding, CodedLinear, Weight


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
    digest, known = hashlib.sha256(), dict[tuple[object, ...], bytes]()
    given = {_place_of(weights[name]): its for name, its in (sums or {}).items()}  # of tied weights, one is named
    for name, weight in sorted(weights.items()):
        dtype = torch.float32 if isinstance(weight, Coded) else weight.dtype
        facts = (str(dtype), tuple(wholes[name].shape))
        same = (*_place_of(weight), *facts)  # tied weights have two names
        if same not in known:
            known[same] = given.get(_place_of(weight)) or word_sums(weight)
        digest.update(repr((name, *facts)).encode() + known[same])
    return digest.hexdigest()


def _weights_of(model: PreTrainedModel) -> dict[str, Weight]:
    found: dict[str, Weight] = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, CodedLinear):
            (found[f"{name}.weight"],) = module.parts
        elif isinstance(module, CodedEmbedding):
            found[f"{name}.weight"] = module.weight
    return found


def _place_of(weight: Weight) -> tuple[object, ...]:
    return weight.data.data_ptr(), weight.data.stride()
