"""Builds transformers models around stored weights, and dequantizes models for passes that need floats."""

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.stored_weights import EMBEDDING, HEAD, StoredWeights
from specpool.engine.sharding.weights import ShardConfig, adapt
from specpool.engine.weights.quantized import (
    Quantized,
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    Weight,
    as_tensor,
    linear_of,
    shares_memory,
)


def build_stored_model(
    stored: StoredWeights,
    config: PreTrainedConfig,
    shard: ShardConfig | None = None,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Build a model with these weights, and a loading report like that of transformers.

    `shard`: build only a rank's shard; `dtype`: the final data type of its weights. `arguments`: passed on to
    transformers. Raises UnsupportedModelError or ValueError.
    """
    with init_empty_weights(include_buffers=False):  # buffers are computed, not stored
        # Other implementations of experts read their weights as one tensor.
        model: Any = AutoModelForCausalLM.from_config(config, experts_implementation="eager", **arguments)
    model.tie_weights()  # init_empty_weights has untied them
    model.generation_config = stored.generation_config() or model.generation_config
    report: dict[str, Any] = {"missing_keys": [], "mismatched_keys": []}
    stored_names = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored_names]
    for name, expected in [*model.named_parameters(), *buffers]:
        weight = stored.find(name)
        if weight is None:
            report["missing_keys"].append(name)
        elif weight.shape not in (expected.shape, expected.flatten(0, max(0, expected.dim() - 2)).shape):
            report["mismatched_keys"].append((name, tuple(weight.shape), tuple(expected.shape)))
        else:
            _place(model, name, weight if shard is None else shard.cut(name, weight, dtype))
    check_tied_head(stored, config)
    if config.tie_word_embeddings:
        _place(model, HEAD, model.get_input_embeddings().weight)
    if shard is not None:
        adapt(model, shard.share)
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise UnsupportedModelError(f"{config.model_type} does not compute its buffer {empty[0]} at construction")
    return model, {**report, "unexpected_keys": stored.unread}


def dequantize_model(model: Any, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Dequantize the weights of a model one by one, and move it to a device."""
    # A partial output head is never tied, whatever the configuration says.
    tied = shares_memory(model.get_input_embeddings().weight, model.get_output_embeddings())
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            model.set_submodule(path, linear_of(module.weight.to(device, dtype), module.bias))
        elif isinstance(module, QuantizedEmbedding):
            model.set_submodule(path, module.dequantized(device, dtype))
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    dense: PreTrainedModel = model.to(device)
    return dense


def check_tied_head(stored: StoredWeights, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if a tied output head differs from the embeddings in the file."""
    if not config.tie_word_embeddings:
        return
    head, embedding = stored.find(HEAD), stored.find(EMBEDDING)
    if head is None or embedding is None:
        return
    if head.shape != embedding.shape or not torch.equal(as_tensor(head), as_tensor(embedding)):
        raise UnsupportedModelError(
            "the output head in the file differs from the embeddings, but tie_word_embeddings in the configuration "
            "says that they are the same"
        )


def _place(model: nn.Module, name: str, weight: Weight) -> None:
    """Give a model a weight, in a quantized module if necessary. Biases come after the weights of their modules."""
    path, _, attribute = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if isinstance(weight, Quantized) and type(module) is nn.Linear:
        model.set_submodule(path, QuantizedLinear([weight]))
    elif isinstance(weight, Quantized) and isinstance(module, nn.Embedding):
        model.set_submodule(path, QuantizedEmbedding(weight, module))
    elif isinstance(weight, Quantized) and path.endswith(".experts"):
        count = len(getattr(module, attribute))
        delattr(module, attribute)
        setattr(module, attribute, QuantizedExperts(weight.qtype, weight.data, count))
    else:
        numbers = as_tensor(weight).detach().float()
        numbers = numbers.view(getattr(module, attribute).shape) if path.endswith(".experts") else numbers
        setattr(module, attribute, nn.Parameter(numbers, requires_grad=False))
