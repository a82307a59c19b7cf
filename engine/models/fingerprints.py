"""A fingerprint of a model's weights.

It detects change - another revision, another fine-tune, a broken download - and not forgery: weights with a given
fingerprint can be made.
"""

import hashlib
from collections.abc import Mapping

import torch

from engine.models.loading import LoadedModel
from engine.models.words import word_sums


@torch.inference_mode()
def weights_fingerprint(loaded: LoadedModel, sums: Mapping[str, bytes] | None = None) -> str:
    """SHA-256 over name, dtype, shape and bits of every weight, before a pass has taken over the model's weights.

    Bits are those of the weights as they were loaded: another dtype gives another fingerprint, and neither the number
    of files nor the number of ranks makes a difference. `sums`: by name, the `word_sums` of weights of which this rank
    has only a part.
    """
    weights, wholes = dict(loaded.model.state_dict()), dict(loaded.described.state_dict())
    if loaded.output_ids is not None:
        weights["output_ids"] = wholes["output_ids"] = loaded.output_ids
    digest, known = hashlib.sha256(), dict[tuple[object, ...], bytes]()
    given = {weights[name].data_ptr(): its for name, its in (sums or {}).items()}  # of tied weights, one is named
    for name, weight in sorted(weights.items()):
        facts = (str(weight.dtype), tuple(wholes[name].shape))
        same = (weight.data_ptr(), weight.stride(), *facts)  # tied weights have two names
        if same not in known:
            known[same] = given.get(weight.data_ptr()) or word_sums(weight)
        digest.update(repr((name, *facts)).encode() + known[same])
    return digest.hexdigest()
