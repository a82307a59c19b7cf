"""Activation functions that give an element the same bits whatever is beside it.

On a CPU torch divides many elements among threads, wherever that cuts, and computes what is left of a cut in another
way than whole vectors. For a function such as `exp` the two ways differ in the last bit. So here a tensor is worked off
in pieces that one thread does alone, of whole rows that are whole vectors, or else row by row.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2CLS

# Torch divides no fewer elements among threads, and works off no longer vectors at a time.
DIVIDED_ELEMENTS, VECTOR_ELEMENTS = 32_768, 64

_KINDS: tuple[Any, ...] = (nn.GELU, *(kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()))


def in_pieces(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An elementwise function of `x` [..., features]."""
    features = x.shape[-1]
    rows = max(1, (DIVIDED_ELEMENTS - 1) // features) if features % VECTOR_ELEMENTS == 0 else 1
    if x.device.type != "cpu" or x.numel() <= rows * features:
        return function(x)
    pieces = x.reshape(-1, features).split(rows)
    return torch.cat([function(piece) for piece in pieces]).view(x.shape)


class _InPieces(nn.Module):
    """An activation of the library, in pieces."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., features], as the activation has it."""
        return in_pieces(self._activation, x.contiguous())  # some have another way for what is not


def activate_in_pieces(module: nn.Module) -> None:
    """Replaces every activation below `module`."""
    for name, child in list(module.named_children()):
        if isinstance(child, _KINDS):
            setattr(module, name, _InPieces(child))
        else:
            activate_in_pieces(child)
