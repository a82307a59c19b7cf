"""Activation functions that give an element the same bits whatever elements are beside it.

On a CPU torch divides many elements among threads without regard to rows, and computes the remainder of a division
differently from whole vectors. For a function such as `exp` the two ways differ in the last bit. So a tensor is
processed here in pieces small enough for one thread, of whole rows if rows are whole vectors, or else row by row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2CLS

# Torch divides only this many elements or more among threads, and its vectors are no longer than this.
DIVIDED_ELEMENTS, VECTOR_ELEMENTS = 32_768, 64

_KINDS: tuple[Any, ...] = (nn.GELU, *(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()))


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The result of an elementwise function for `x` [..., features]."""
    features = x.shape[-1]
    rows = max(1, (DIVIDED_ELEMENTS - 1) // features) if features % VECTOR_ELEMENTS == 0 else 1
    if x.device.type != "cpu" or x.numel() <= rows * features:
        return function(x)
    pieces = x.reshape(-1, features).split(rows)
    return torch.cat([function(piece) for piece in pieces]).view(x.shape)


class _InPieces(nn.Module):
    """An activation module of the library, applied in pieces."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of `x` [..., features]."""
        return in_pieces(self._activation, x.contiguous())  # some activations compute differently on other layouts


def activate_in_pieces(module: nn.Module) -> None:
    """Replaces every activation module below `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, _KINDS):
            setattr(module, name, _InPieces(child))
        else:
            activate_in_pieces(child)
