"""Rotary position embeddings from tables that are computed once for all positions."""

from typing import Any

import torch

BLOCK = 4096
"""Positions that are computed at a time. Tables grow by whole blocks, because torch may round differently in other
shapes, and the bits of a position must not depend on the longest sequence."""


class RotaryTables:
    """Cosines and signed sines by position; 1 and 0 for features that are not rotated."""

    def __init__(self, rotary_embedding: Any, head_dim: int, like: torch.Tensor, layer_type: str | None = None) -> None:
        """`rotary_embedding`: the module of transformers. Tables have the dtype and device of `like`.

        `layer_type`: type of the layers that use the tables, if the module distinguishes types.
        """
        self._rotary_embedding, self._head_dim, self._like = rotary_embedding, head_dim, torch.empty(0).to(like)
        self._layer_type = layer_type
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        self.angles = len(getattr(rotary_embedding, name))
        """Number of rotary pairs in a head."""
        self._positions = BLOCK
        self._tables = self._compute(0)

    def __call__(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tables [positions, head_dim], of at least `length` positions."""
        if length > self._positions:
            blocks = [self._compute(first) for first in range(self._positions, length, BLOCK)]
            cosines, sines = zip(self._tables, *blocks, strict=True)
            self._tables = torch.cat(cosines), torch.cat(sines)
            self._positions = len(self._tables[0])
        return self._tables

    def in_float32(self) -> "RotaryTables":
        """The same tables, computed in float32."""
        return RotaryTables(self._rotary_embedding, self._head_dim, self._like.float(), self._layer_type)

    def _compute(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tables for a block of positions."""
        positions = torch.arange(first, first + BLOCK, device=self._like.device)[None]
        if hasattr(self._rotary_embedding, "mrope_section"):
            positions = positions.expand(3, 1, -1)  # in time and in the two directions of images: equal for text
        layer_type = () if self._layer_type is None else (self._layer_type,)
        tables = self._rotary_embedding(self._like, positions, *layer_type)
        # DeepSeek V2 rotates complex numbers.
        cos, sin = torch.view_as_real(tables).to(self._like).unbind(-1) if torch.is_tensor(tables) else tables
        angles = self.angles  # most families repeat each angle for both members of a pair
        unrotated = (BLOCK, self._head_dim // 2 - angles)
        cos = torch.cat([cos[0, :, :angles], torch.ones(unrotated).to(cos)], -1)
        sin = torch.cat([sin[0, :, :angles], torch.zeros(unrotated).to(sin)], -1)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [rows, heads, head_dim]. The sines of the first half of a head are negated."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def head_order(angles: int, head_dim: int, interleaved: bool) -> torch.Tensor:
    """The feature order that puts both members of each rotary pair half a head apart.

    Reordering queries and keys alike does not change their dot products.
    """
    rotated = torch.arange(2 * angles)
    first, second = (rotated[0::2], rotated[1::2]) if interleaved else (rotated[:angles], rotated[angles:])
    unrotated = torch.arange(2 * angles, head_dim)
    half = len(unrotated) // 2
    return torch.cat([first, unrotated[:half], second, unrotated[half:]])
