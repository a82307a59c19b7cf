"""Batch-invariant GEMM with the weights of a layer: a row has the same bits whatever the other rows are.

Tiles along the weight depend on the weight alone, never on the number of rows, so each output adds its terms in one
order. Weights with few outputs are split along their inputs too (split-K) to occupy the GPU. The next kernel adds the
partial sums in order.
"""

from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.functional import linear

from specpool.engine.numerics.triton_compat import UNFUSED, is_wide, power_of_two, tl, triton

GemmBackend = Literal["triton", "cublas"]
GEMM_BACKENDS: tuple[GemmBackend, ...] = get_args(GemmBackend)

# Outputs of a tile: the M of one sm_90 tensor core instruction.
TILE_OUTPUTS = 64
# Split-K stops at about one program per SM of a large GPU, and never makes a split short.
TARGET_PROGRAMS, MAX_SPLIT_K, MIN_SPLIT_INPUTS = 128, 8, 128
# Minimum and maximum rows of a tile, by whether numbers take four bytes.
TILE_ROWS = {False: (16, 256), True: (16, 32)}


class Gemm(nn.Module):
    """Replaces an `nn.Linear`. The caller adds the bias and the partial sums.

    `forward`: rows [n, inputs] to partial sums [split_k, n, outputs], in float32 if split_k > 1.
    """

    def __init__(self, weight: torch.Tensor, split: bool = True, total_outputs: int | None = None) -> None:
        """Wrap a weight [outputs, inputs].

        `split`: allow split-K. `total_outputs`: choose split-K as for a weight with this many outputs, of which
        `weight` is one rank's shard.
        """
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.split_k = split_k_of(total_outputs or self.out_features, self.in_features) if split else 1
        self.backend: GemmBackend = "triton"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of `x` by the weight."""
        if self.backend == "cublas":
            return linear(x, self.weight)[None]
        return split_k_gemm(x, self.weight, self.split_k)

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of the partial sums of `rows` rows; 0 without split-K."""
        return 0 if self.split_k == 1 else self.split_k * rows * self.out_features * torch.float32.itemsize


def split_k_of(outputs: int, inputs: int) -> int:
    """The number of splits along the inputs."""
    splits = 1
    while (
        splits < MAX_SPLIT_K
        and -(-outputs // TILE_OUTPUTS) * splits < TARGET_PROGRAMS
        and inputs % (2 * splits * MIN_SPLIT_INPUTS) == 0
    ):
        splits *= 2
    return splits


def split_k_gemm(x: torch.Tensor, weight: torch.Tensor, split_k: int) -> torch.Tensor:
    """Partial sums [split_k, n, outputs] of rows [n, inputs] times a weight [outputs, inputs]."""
    (rows, inputs), outputs, wide = x.shape, len(weight), is_wide(x.dtype)
    tile_rows = _tile_rows(rows, wide)
    tile_inputs = 32 if wide else 128 if tile_rows < 64 else 64
    partials = torch.empty(split_k, rows, outputs, dtype=x.dtype if split_k == 1 else torch.float32, device=x.device)
    # Row tiles vary fastest: programs that share a part of the weight run together and read it once.
    _split_k_gemm[(-(-rows // tile_rows), -(-outputs // TILE_OUTPUTS), split_k)](
        x.contiguous(), weight, partials, rows,
        N=outputs, K=inputs, SPLIT_K=-(-inputs // split_k),
        TILE_N=TILE_OUTPUTS, TILE_ROWS=tile_rows, TILE_K=tile_inputs,
        # The largest tile needs 8 warps to fit into registers.
        **UNFUSED, num_warps=4 if tile_rows <= 128 else 8, num_stages=2 if wide else 4 if tile_rows <= 128 else 3,
    )  # fmt: skip
    return partials


def _tile_rows(rows: int, wide: bool) -> int:
    """Rows of a tile: the largest tile whose last one is not mostly padding."""
    minimum, maximum = TILE_ROWS[wide]
    tile = min(maximum, max(minimum, power_of_two(rows)))
    return tile // 2 if tile > minimum and 0 < rows % tile <= tile // 2 else tile


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _split_k_gemm(
        x, weight, partials, rows,
        N: tl.constexpr, K: tl.constexpr, SPLIT_K: tl.constexpr,
        TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr,
    ):  # fmt: skip
        """One tile of outputs for one tile of rows, over one split of the inputs."""
        row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        output = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
        split = tl.program_id(2)
        acc = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
        for start in range(split * SPLIT_K, split * SPLIT_K + SPLIT_K, TILE_K):
            inputs = start + tl.arange(0, TILE_K)
            weight_mask, row_mask = (output < N)[:, None], (row < rows)[None, :]
            if SPLIT_K % TILE_K != 0:
                weight_mask, row_mask = weight_mask & (inputs < K)[None, :], row_mask & (inputs < K)[:, None]
            a = tl.load(weight + output[:, None] * K + inputs[None, :], mask=weight_mask, other=0.0)
            b = tl.load(x + row[None, :] * K + inputs[:, None], mask=row_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        place = partials + (split * rows.to(tl.int64) + row)[None, :] * N + output[:, None]
        tl.store(place, acc.to(partials.dtype.element_ty), mask=(output < N)[:, None] & (row < rows)[None, :])
