"""Rotary position embeddings, as tables that are computed once for all positions."""

from typing import Any

import torch

# Positions of the first tables, which grow with the longest sequence.
FIRST_POSITIONS = 4096


class RotaryTables:
    """Tables of cosines and signed sines by position; 1 and 0 for the features of a head that are not rotated."""

    def __init__(self, rotary_embedding: Any, head_dim: int, like: torch.Tensor) -> None:
        """`rotary_embedding`: the library's module. The tables have the dtype and device of `like`."""
        self._rotary_embedding, self._head_dim, self._like = rotary_embedding, head_dim, torch.empty(0).to(like)
        self._positions = FIRST_POSITIONS
        self._tables = self._computed(self._positions)

    def __call__(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tables [positions, head_dim], of at least `longest` positions."""
        if longest > self._positions:
            self._tables, self._positions = self._computed(2 * longest), 2 * longest
        return self._tables

    def in_float32(self) -> "RotaryTables":
        """The same tables in float32, not rounded to a smaller dtype."""
        return RotaryTables(self._rotary_embedding, self._head_dim, self._like.float())

    def _computed(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary_embedding(self._like, torch.arange(positions, device=self._like.device)[None])
        angles = cos.shape[-1] // 2  # the library repeats them for both members of a pair
        rest = (positions, self._head_dim // 2 - angles)
        cos = torch.cat([cos[0, :, :angles], torch.ones(rest).to(cos)], -1)
        sin = torch.cat([sin[0, :, :angles], torch.zeros(rest).to(sin)], -1)
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `x` [rows, heads, head_dim]; the sine of the first half of a head is given negated."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def head_order(angles: int, head_dim: int, interleaved: bool) -> torch.Tensor:
    """The order of a head's features in which the members of each rotary pair are half a head apart.

    Queries and keys in the same order have the same products.
    """
    rotated = torch.arange(2 * angles)
    first, second = (rotated[0::2], rotated[1::2]) if interleaved else (rotated[:angles], rotated[angles:])
    rest = torch.arange(2 * angles, head_dim)
    return torch.cat([first, rest[: len(rest) // 2], second, rest[len(rest) // 2 :]])
