"""Output heads with rows for some tokens only, stored beside a model's own files."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from specpool.engine.config.sources import UnsupportedModelError, first_line
from specpool.engine.models.draft_weights import find_named
from specpool.engine.weights.quantized import Quantized, QuantizedLinear, linear_of

OUTPUT_HEAD = "output_head.safetensors"
"""File with `weight` [rows, hidden] and `output_ids` [rows], the token of each row."""


def replace_output_head(model: PreTrainedModel, file: Path) -> torch.Tensor | None:
    """Replace the output head by the one in a file, if it exists. Returns the token of each row."""
    if not file.is_file():
        return None
    try:
        stored = load_file(file, device=str(model.device))  # where every pass needs them
        weight, output_ids = find_named(stored, "weight"), stored["output_ids"].long()
        if weight is None:
            raise KeyError("weight")
    except KeyError as error:
        raise UnsupportedModelError(f"{file} has no tensor {error}") from error
    except Exception as error:  # the file may contain anything
        raise UnsupportedModelError(f"{file} cannot be read: {first_line(error)}") from error
    config: Any = model.config
    tokens = output_ids.numel()
    fits = output_ids.dim() == 1 and tokens > 0 and tuple(weight.shape) == (tokens, config.hidden_size)
    if not fits or not 0 <= int(output_ids.min()) <= int(output_ids.max()) < config.vocab_size:
        raise UnsupportedModelError(f"{file} has a head of {tuple(weight.shape)} for {tokens} tokens")
    model.set_output_embeddings(
        QuantizedLinear([weight]) if isinstance(weight, Quantized) else linear_of(weight.to(model.dtype), None)
    )
    return output_ids
