"""Translates rotary embedding keys and tensors of GGUF files into `rope_parameters` of transformers.

Sources: llama.cpp's src/llama-model.cpp and src/llama-context.cpp; transformers' modeling_rope_utils.py.
"""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import torch

from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.weights.quantized import as_tensor

HELP = "see docs/faults.md, GGUF files"
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = frozenset({FREQS, LONG, SHORT})
TYPE, FACTOR, OLD_FACTOR = "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"
ATTENTION_FACTOR, ORIGINAL_LENGTH = "rope.scaling.attn_factor", "rope.scaling.original_context_length"
BASE, DIMENSIONS = "rope.freq_base", "rope.dimension_count"
# Neutral values of keys that llama.cpp reads only for other architectures. Here it reads `ATTENTION_FACTOR` instead.
UNREAD = {
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_ext_factor": (1, -1),
    "rope.scaling.yarn_log_multiplier": (0,),
}
FINETUNED = "rope.scaling.finetuned"  # metadata
ROPE_KEYS = frozenset(
    {TYPE, FACTOR, OLD_FACTOR, ATTENTION_FACTOR, ORIGINAL_LENGTH, BASE, DIMENSIONS, FINETUNED, *UNREAD}
)
# Llama 3.1 and later. Their files store only the resulting factor of each frequency.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192


def rope_parameters(file: GgufFile, keys: Mapping[str, Any], head_dim: int, partial: bool) -> dict[str, Any]:
    """Return `rope_parameters` of a configuration.

    `keys`: values by key without the architecture prefix. `partial`: whether only part of each head may be rotated.
    Raises UnsupportedModelError for an embedding that transformers cannot compute.
    """
    for key, default in UNREAD.items():
        if keys.get(key, default[0]) not in default:
            raise refusal(file, key, f"only {default[0]} is supported")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": positive(file, keys, BASE, 10_000.0)}
    dimensions = keys.get(DIMENSIONS, head_dim)
    if partial:
        rope["partial_rotary_factor"] = dimensions / head_dim
    # transformers derives the dimensions from this factor.
    if dimensions > head_dim or int(head_dim * rope.get("partial_rotary_factor", 1)) != dimensions:
        raise refusal(file, DIMENSIONS, f"it does not match the head size {head_dim}")
    if dimensions % 2:
        key = next(key for key in (DIMENSIONS, "attention.key_length", "attention.head_count") if key in keys)
        raise refusal(file, key, f"heads have {dimensions} rotary dimensions; the number must be even")
    scaling = _scaling(file, keys, dimensions)
    factors = _frequency_factors(file, keys, dimensions, rope["rope_theta"])
    if scaling and factors:
        raise UnsupportedModelError(f"{file.path}: the tensor {FREQS} and {FACTOR} both scale positions; {HELP}")
    return {**rope, **scaling, **factors}


def _scaling(file: GgufFile, keys: Mapping[str, Any], dimensions: int) -> dict[str, Any]:
    kind, attention = keys.get(TYPE, "linear"), positive(file, keys, ATTENTION_FACTOR, 1.0)
    key = FACTOR if FACTOR in keys else OLD_FACTOR
    # Files without scaling may have a factor of 0.
    factor = 1.0 if not keys.get(key) or kind == "none" else positive(file, keys, key, 1.0)
    original = keys.get(ORIGINAL_LENGTH, keys["context_length"])
    if kind == "longrope" or {LONG, SHORT} & file.tensors.keys():
        if factor != 1:
            raise refusal(file, key, "it cannot be combined with longrope factors")
        return {
            "rope_type": "longrope",
            "long_factor": _factors(file, LONG, dimensions),
            "short_factor": _factors(file, SHORT, dimensions),
            "attention_factor": attention,
            "original_max_position_embeddings": original,
        }
    if kind not in ("none", "linear", "yarn"):
        raise refusal(file, TYPE, "supported types are none, linear, yarn, and longrope")
    if kind == "yarn" and factor != 1:
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        # Without `attention_factor`, transformers applies the YaRN term itself.
        more = {} if attention == 1 else {"attention_factor": _yarn_attention(factor) * attention}
        return {**scaling, **more}
    if attention != 1:
        raise refusal(file, ATTENTION_FACTOR, "it is supported only for yarn and longrope")
    return {} if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn_attention(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _frequency_factors(file: GgufFile, keys: Mapping[str, Any], dimensions: int, base: float) -> dict[str, Any]:
    """Return Llama 3.1 scaling if the file has its factors; empty if the file scales no frequency."""
    if FREQS not in file.tensors:
        return {}
    factors = torch.tensor(_factors(file, FREQS, dimensions))
    if bool((factors == 1).all()):
        return {}
    factor, length = float(factors.max()), keys.get(ORIGINAL_LENGTH, LLAMA3_LENGTH)
    turns = length / (2 * math.pi) * base ** (-torch.arange(0, dimensions, 2).double() / dimensions)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(factors.double(), expected, rtol=1e-4):
        raise UnsupportedModelError(
            f"{file.path}: the tensor {FREQS} scales frequencies by {float(factors.min()):g} to {factor:g}, but not "
            "as Llama 3.1 does; serve the folder with the model's own config.json instead"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3, "original_max_position_embeddings": length}


def _factors(file: GgufFile, name: str, dimensions: int) -> list[float]:
    """Read a small tensor with one factor per frequency."""
    if name not in file.tensors or file.tensors[name].shape != (dimensions // 2,):
        raise UnsupportedModelError(f"{file.path}: the tensor {name} must have {dimensions // 2} frequency factors")
    factors: list[float] = as_tensor(file.read(name)).tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise UnsupportedModelError(f"{file.path}: the tensor {name} has a factor that is not a positive number")
    return factors


def positive(file: GgufFile, keys: Mapping[str, Any], key: str, default: float) -> float:
    """Return the value of a key, which must be a positive number. Raises UnsupportedModelError."""
    value = keys.get(key, default)
    if type(value) not in (int, float) or not value > 0:
        raise refusal(file, key, "it must be a positive number")
    return float(value)


def refusal(file: GgufFile, key: str, reason: str) -> UnsupportedModelError:
    """Return the refusal of a file for the value of a key, which is given without the architecture prefix."""
    value = file.metadata.get(f"{file.architecture}.{key}")
    shown = "an array" if value is None else reprlib.repr(value)
    return UnsupportedModelError(f"{file.path}: {file.architecture}.{key} is {shown}: {reason}; {HELP}")
