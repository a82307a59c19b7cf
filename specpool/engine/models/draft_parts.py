"""Parts of a draft in files beside the model's own: the input of hidden states, and a partial output head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from specpool.engine.config.architectures import FEATURES
from specpool.engine.config.sources import UnsupportedModelError, first_line
from specpool.engine.models.draft_weights import find_named
from specpool.engine.passes.families import OFFSET_NORMS
from specpool.engine.passes.features import FeatureEmbedding, StateNorm
from specpool.engine.weights.quantized import Quantized, QuantizedLinear, Weight, linear_of

FEATURE_INPUT = "feature_input.safetensors"
"""File with `fc` [hidden, 2 * hidden], for the state and then the embedding, and `project` [hidden, width]. Without
`project`, states are as wide as the draft."""
MAX_LAYER, MAX_WIDTH = 1024, 2**20


@dataclass(frozen=True)
class Features:
    """The states of the target that a draft reads."""

    layers: tuple[int, ...]
    """The states after this many layers, in order. The last layer's comes before the final norm."""
    width: int
    """Size of all these states together."""


@dataclass(frozen=True)
class FeatureHead:
    """A feature draft that takes parts of its target: an EAGLE head or an MTP layer."""

    model: PreTrainedModel
    features: Features
    output_ids: torch.Tensor | None
    """The token of each row of the output head; None: all tokens in order."""


def state_norm_of(config: Any, *weights: torch.Tensor) -> StateNorm:
    """Return norms of states, with weights that mean what they mean in a model with this configuration."""
    stacked = torch.stack(weights)
    return StateNorm(stacked.float() + 1 if config.model_type in OFFSET_NORMS else stacked, config.rms_norm_eps)


def shaped(name: str, weight: torch.Tensor | None, *expected: int) -> torch.Tensor:
    """Return the weight, which must have this shape. UnsupportedModelError."""
    if weight is None or tuple(weight.shape) != expected:
        found = "is missing" if weight is None else f"has the shape {[*weight.shape]}"
        raise UnsupportedModelError(f"{name} {found}, but this head and its target need {[*expected]}")
    return weight


def features_of(config: PreTrainedConfig) -> Features | None:
    """The states that a configuration names; None if the model is not a feature draft. UnsupportedModelError."""
    stated: Any = getattr(config, FEATURES, None)
    if stated is None:
        return None
    layers, width = (stated.get(name) for name in ("layers", "width")) if isinstance(stated, dict) else (None, None)
    if not isinstance(layers, list) or not layers or not all(type(n) is int and 0 < n <= MAX_LAYER for n in layers):
        raise UnsupportedModelError(f"{FEATURES} in its configuration has no list of layers from 1 to {MAX_LAYER}")
    if type(width) is not int or not 0 < width <= MAX_WIDTH or width % len(layers):
        raise UnsupportedModelError(f"{FEATURES} in its configuration has no width for {len(layers)} layers: {width!r}")
    return Features(tuple(layers), width)


def add_feature_input(model: PreTrainedModel, features: Features, file: Path) -> None:
    """Put the weights in a file in front of a model's layers. UnsupportedModelError."""
    try:
        stored = load_file(file, device=str(model.device))
        fc, project = find_named(stored, "fc"), find_named(stored, "project")
    except Exception as error:  # the file may contain anything
        raise UnsupportedModelError(f"{file} cannot be read: {first_line(error)}") from error
    hidden = model.config.hidden_size
    _check_shape(file, "fc", fc, (hidden, 2 * hidden))
    if project is not None or features.width != hidden:
        _check_shape(file, "project", project, (hidden, features.width))
    assert fc is not None
    projecting = None if project is None else _linear(file, project, model.dtype)
    joining = _linear(file, fc, model.dtype)
    model.set_input_embeddings(FeatureEmbedding(model.get_input_embeddings(), joining, projecting))


def _check_shape(file: Path, name: str, weight: Weight | None, expected: tuple[int, int]) -> None:
    if weight is None or tuple(weight.shape) != expected:
        actual = "no tensor" if weight is None else f"shape {list(weight.shape)}"
        raise UnsupportedModelError(f"{file} has {actual} for {name}, not {list(expected)}")


def _linear(file: Path, weight: Weight, dtype: torch.dtype) -> nn.Module:
    if isinstance(weight, Quantized):
        return QuantizedLinear([weight])
    if not weight.is_floating_point():
        raise UnsupportedModelError(f"{file} has a weight of the type {weight.dtype}, which is not a float")
    return linear_of(weight.to(dtype), None)


OUTPUT_HEAD = "output_head.safetensors"
"""File with `weight` [rows, hidden] and `output_ids` [rows], the token of each row."""


def replace_output_head(model: PreTrainedModel, file: Path) -> torch.Tensor | None:
    """Replace the output head by the one in a file, if it exists. Returns the token of each row."""
    if not file.is_file():
        return None
    try:
        stored = load_file(file, device=str(model.device))  # where every pass needs them
        weight, output_ids = find_named(stored, "weight"), stored["output_ids"]
        if weight is None:
            raise KeyError("weight")
    except KeyError as error:
        raise UnsupportedModelError(f"{file} has no tensor {error}") from error
    except Exception as error:  # the file may contain anything
        raise UnsupportedModelError(f"{file} cannot be read: {first_line(error)}") from error
    config: Any = model.config
    if output_ids.dtype not in (torch.int32, torch.int64):
        raise UnsupportedModelError(f"{file} has output_ids of the type {output_ids.dtype}, not int32 or int64")
    tokens, output_ids = output_ids.numel(), output_ids.long()
    fits = output_ids.dim() == 1 and tokens > 0 and tuple(weight.shape) == (tokens, config.hidden_size)
    if not fits or not 0 <= int(output_ids.min()) <= int(output_ids.max()) < config.vocab_size:
        raise UnsupportedModelError(f"{file} has a head of {tuple(weight.shape)} for {tokens} tokens")
    if len(output_ids.unique()) < tokens:
        raise UnsupportedModelError(f"{file} has several rows for a token")
    model.set_output_embeddings(_linear(file, weight, model.dtype))
    return output_ids
