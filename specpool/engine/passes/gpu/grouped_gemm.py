"""Batch-invariant GEMM with the experts of a layer: each row is multiplied by the weights of the experts it chose.

Choices are grouped by expert, and cut into row tiles. An output adds its terms in the order of `gemm`, so it depends
neither on the other rows nor on the tile. The number of tiles to launch depends only on the number of choices, so CUDA
graphs can replay the kernels.
"""

from dataclasses import dataclass

import torch
from torch import nn

from specpool.engine.numerics.triton_compat import (
    architecture,
    gdc_launch_dependents,
    gdc_wait,
    is_wide,
    launch_options,
    power_of_two,
    tl,
    triton,
)
from specpool.engine.passes.gpu.gemm import GemmTile, split_k_of, split_size, tile_of

if triton is not None:
    from specpool.engine.passes.gpu.gemm import accumulated

# Number of choices that a program of `group_choices` reads at a time.
GROUPED = 1024


@dataclass(frozen=True)
class Groups:
    """Choices grouped by expert, in row tiles."""

    order: torch.Tensor  # [choices] numbers of choices, ascending within each expert
    tiles: torch.Tensor  # [3, tiles] expert, first and end index in `order`; expert -1: no choices


class GroupedGemm(nn.Module):
    """The linear layers of all experts.

    `forward`: rows to partial sums [split_k, choices, outputs], in float32 if split_k > 1. The results of padding are
    undefined.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, top_k: int) -> None:
        """Wrap a weight [experts, outputs, inputs] and a bias [experts, outputs]. `top_k`: experts of each row."""
        super().__init__()
        self.weight, self.bias, self.top_k = nn.Parameter(weight, requires_grad=False), bias, top_k
        self.experts, self.out_features, self.in_features = weight.shape
        # Even a single row occupies the GPU with the outputs of all its experts.
        self.split_k = split_k_of(top_k * self.out_features, self.in_features)

    def forward(self, x: torch.Tensor, groups: Groups, choices_per_row: int) -> torch.Tensor:
        """Multiply the row of every choice: row number choice // `choices_per_row` of `x` [n, inputs]."""
        assert x.shape[1] == self.in_features, "a row would be read with the wrong stride"
        choices, tile = len(groups.order), self.tile(len(groups.order), x)
        partials = torch.empty(self.split_k, choices, self.out_features, dtype=self._dtype(x.dtype), device=x.device)
        # Row tiles vary fastest: the tiles of an expert run together and read its weight once.
        _grouped_gemm[(groups.tiles.shape[1], -(-self.out_features // tile.outputs), self.split_k)](
            x, self.weight, self.bias, partials, groups.order, groups.tiles, choices,
            N=self.out_features, K=self.in_features, SPLIT_K=split_size(self.in_features, self.split_k),
            CHOICES_PER_ROW=choices_per_row, TILE_N=tile.outputs, TILE_ROWS=tile.rows, TILE_K=tile.inputs,
            **launch_options(x.device), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return partials

    def tile(self, choices: int, x: torch.Tensor) -> GemmTile:
        """Return the tile for the mean number of rows per expert. GEMMs of the same experts share row tiles."""
        rows, outputs = -(-choices // self.experts), self.top_k * self.out_features
        return tile_of(rows, outputs, self.split_k, is_wide(x.dtype), architecture(x.device))

    def scratch_bytes(self, choices: int, dtype: torch.dtype) -> int:
        """Bytes of the result for rows of a dtype."""
        return self.split_k * choices * self.out_features * self._dtype(dtype).itemsize

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.split_k == 1 else torch.float32


def group_choices(chosen: torch.Tensor, experts: int, tile_rows: int) -> Groups:
    """Group the choices [rows, top_k] of `experts` experts, with at most `tile_rows` rows in a tile.

    There are enough tiles for any choices. Choices of -1 are skipped.
    """
    choices = chosen.numel()
    num_tiles = min(choices, experts) + choices // tile_rows
    order = torch.empty(choices, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(3, num_tiles, dtype=torch.int32, device=chosen.device)
    _group_choices[(experts,)](
        chosen, order, tiles, choices, num_tiles,
        EXPERTS=experts, WIDTH=power_of_two(experts), TILE_ROWS=tile_rows, BLOCK=GROUPED,
        **launch_options(chosen.device), num_warps=4,
    )  # fmt: skip
    return Groups(order, tiles)


if triton is not None:

    @triton.jit(do_not_specialize=["choices", "num_tiles"])
    def _group_choices(
        chosen, order, tiles, choices, num_tiles,
        EXPERTS: tl.constexpr, WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """List the choices and tiles of one expert. Every program counts the choices of all experts."""
        expert, experts = tl.program_id(0), tl.arange(0, WIDTH)
        if OVERLAP:
            gdc_wait()
        counts = tl.zeros([WIDTH], tl.int32)
        for start in range(0, choices, BLOCK):
            choice = start + tl.arange(0, BLOCK)
            own = tl.load(chosen + choice, mask=choice < choices, other=-1)
            counts += tl.histogram(own, WIDTH, mask=own >= 0)
        tile_counts, is_before = (counts + TILE_ROWS - 1) // TILE_ROWS, experts < expert
        first, first_tile = tl.sum(tl.where(is_before, counts, 0), 0), tl.sum(tl.where(is_before, tile_counts, 0), 0)
        end = first + tl.sum(tl.where(experts == expert, counts, 0), 0)
        num_own = tl.sum(tl.where(experts == expert, tile_counts, 0), 0)
        for start in range(0, num_own, BLOCK):
            index = start + tl.arange(0, BLOCK)
            place, mask, begin = tiles + first_tile + index, index < num_own, first + index * TILE_ROWS
            tl.store(place, expert, mask=mask)
            tl.store(place + num_tiles, begin, mask=mask)
            tl.store(place + 2 * num_tiles, tl.minimum(begin + TILE_ROWS, end), mask=mask)
        if expert == EXPERTS - 1:
            for start in range(first_tile + num_own, num_tiles, BLOCK):
                index = start + tl.arange(0, BLOCK)
                tl.store(tiles + index, -1, mask=index < num_tiles)
        for start in range(0, choices, BLOCK):
            choice = start + tl.arange(0, BLOCK)
            is_own = tl.load(chosen + choice, mask=choice < choices, other=-1) == expert
            tl.store(order + first + tl.cumsum(is_own.to(tl.int32), 0) - 1, choice, mask=is_own)
            first += tl.sum(is_own.to(tl.int32), 0)

    @triton.jit(do_not_specialize=["choices"])
    def _grouped_gemm(
        x, weight, bias, partials, order, tiles, choices,
        N: tl.constexpr, K: tl.constexpr, SPLIT_K: tl.constexpr, CHOICES_PER_ROW: tl.constexpr,
        TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Compute one tile of outputs for one tile of an expert's rows, over one split of the inputs."""
        tile, num_tiles = tiles + tl.program_id(0), tl.num_programs(0)
        output, split = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N), tl.program_id(2)
        if OVERLAP:
            gdc_wait()
        expert = tl.load(tile).to(tl.int64)
        if expert < 0:
            return
        index, end = tl.load(tile + num_tiles) + tl.arange(0, TILE_ROWS), tl.load(tile + 2 * num_tiles)
        choice = tl.load(order + index, mask=index < end, other=0).to(tl.int64)
        acc = accumulated(
            x, choice // CHOICES_PER_ROW, index, end, weight + expert * N * K, output, split,
            N, K, SPLIT_K, TILE_N, TILE_ROWS, TILE_K,
        )  # fmt: skip
        if OVERLAP:
            gdc_launch_dependents()
        if bias is not None:
            added = tl.load(bias + expert * N + output, mask=output < N, other=0.0).to(tl.float32)
            acc += tl.where(split == 0, added, 0.0)[:, None]
        place = partials + (split * choices.to(tl.int64) + choice)[None, :] * N + output[:, None]
        tl.store(place, acc.to(partials.dtype.element_ty), mask=(output < N)[:, None] & (index < end)[None, :])
