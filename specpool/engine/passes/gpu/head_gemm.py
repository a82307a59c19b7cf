"""Batch-invariant GEMM with a weight for each head: a head's features of all rows are multiplied by its weight.

An output adds its terms in the order of `gemm`, so it depends neither on the other rows nor on the tile.
"""

import torch
from torch import nn

from specpool.engine.numerics.triton_compat import (
    architecture,
    gdc_launch_dependents,
    gdc_wait,
    is_wide,
    launch_options,
    tl,
    triton,
)
from specpool.engine.passes.gpu.gemm import MANY_ROWS, tile_of

if triton is not None:
    from specpool.engine.passes.gpu.gemm import accumulated


class HeadGemm(nn.Module):
    """The linear layers of all heads."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Wrap a weight [heads, outputs, inputs]."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.heads, self.out_features, self.in_features = weight.shape

    def forward(self, x: torch.Tensor, results: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply rows [rows, heads, inputs]. Return the results [rows, heads, outputs].

        `results`: memory for them, [rows, heads, outputs or more]. Other features are left unchanged.
        """
        rows, heads, inputs = x.shape
        assert (heads, inputs) == (self.heads, self.in_features), "a row would be read with the wrong stride"
        if results is None:
            results = x.new_empty(rows, heads, self.out_features)
        # The tile for even more rows would spill registers.
        counted, outputs = min(rows, MANY_ROWS), heads * self.out_features
        tile = tile_of(counted, outputs, 1, is_wide(x.dtype), architecture(x.device))
        _head_gemm[(-(-rows // tile.rows), -(-self.out_features // tile.outputs), heads)](
            x, self.weight, results, rows,
            HEADS=heads, N=self.out_features, K=inputs, STRIDE=results.shape[2],
            TILE_N=tile.outputs, TILE_ROWS=tile.rows, TILE_K=tile.inputs,
            **launch_options(x.device), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return results


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _head_gemm(
        x, weight, results, rows,
        HEADS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
        TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Compute one tile of outputs of one head for one tile of rows."""
        row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        output = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
        head = tl.program_id(2).to(tl.int64)
        of_head = row * HEADS + head
        if OVERLAP:
            gdc_wait()
        acc = accumulated(
            x, of_head, row, rows, weight + head * N * K, output, 0, N, K, K, TILE_N, TILE_ROWS, TILE_K
        )  # fmt: skip
        if OVERLAP:
            gdc_launch_dependents()
        place = results + of_head[None, :] * STRIDE + output[:, None]
        tl.store(place, acc.to(results.dtype.element_ty), mask=(output < N)[:, None] & (row < rows)[None, :])
