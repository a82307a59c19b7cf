"""Batch-invariant activation functions.

On a CPU, torch splits large tensors among threads without regard to rows, and computes elements left over after whole
vectors differently. For functions such as `exp` the two paths differ in the last bit. So tensors are processed in
chunks small enough for one thread: whole rows if a row is whole vectors, else one row at a time.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2CLS

# Torch uses threads from this many elements on. Its vectors are at most this long.
THREADED_ELEMENTS, VECTOR_ELEMENTS = 32_768, 64

_ACTIVATIONS: tuple[Any, ...] = (nn.GELU, *(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()))


def in_chunks(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to `x` [..., features]."""
    features = x.shape[-1]
    rows = max(1, (THREADED_ELEMENTS - 1) // features) if features % VECTOR_ELEMENTS == 0 else 1
    if x.device.type != "cpu" or x.numel() <= rows * features:
        return function(x)
    chunks = x.reshape(-1, features).split(rows)
    return torch.cat([function(chunk) for chunk in chunks]).view(x.shape)


class ChunkedActivation(nn.Module):
    """Applies an activation module of transformers in chunks."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of `x` [..., features]."""
        return in_chunks(self._activation, x.contiguous())  # some activations depend on the memory layout


def chunk_activations(module: nn.Module) -> None:
    """Replace every activation module below `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, _ACTIVATIONS):
            setattr(module, name, ChunkedActivation(child))
        else:
            chunk_activations(child)
