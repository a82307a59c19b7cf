"""Batch-invariant GEMM with the weights of a layer: a row has the same bits whatever the other rows are.

An output adds its terms along the inputs in one order, whatever the tile: tiles only decide which outputs and rows are
computed together. Weights with few outputs are split along their inputs (split-K) to occupy the GPU. The number of
splits depends on the weight alone, and the next kernel adds the partial sums in order. cuBLAS, where it is used,
is restricted to kernels that are likely to be batch-invariant.
"""

import os
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from specpool.engine.numerics.tiles import round_up
from specpool.engine.numerics.triton_compat import (
    HOPPER,
    architecture,
    gdc_launch_dependents,
    gdc_wait,
    is_wide,
    launch_options,
    power_of_two,
    tl,
    triton,
)

# cuBLAS and cuBLASLt read these once. Without a workspace, no kernel can use split-K, which depends on the row count.
WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def restrict_cublas() -> None:
    """Apply the restrictions to this process. Call it before the first GEMM on a GPU."""
    for name, value in WORKSPACES.items():
        os.environ.setdefault(name, value)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul = torch.backends.cuda.matmul
    # No reduced-precision sums, no split-K.
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    matmul.allow_bf16_reduced_precision_reduction = (False, False)


GemmBackend = Literal["triton", "cublas"]
GEMM_BACKENDS: tuple[GemmBackend, ...] = get_args(GemmBackend)

# Outputs per program by which split-K is chosen: the M of one sm_90 tensor core instruction.
SPLIT_OUTPUTS = 64
# Split-K stops at about one program per SM of a large GPU, and never makes a split short.
TARGET_PROGRAMS, MAX_SPLIT_K, MIN_SPLIT_INPUTS = 128, 8, 128
# More programs than this need more than two per SM to run at once.
MANY_PROGRAMS = 2 * 132
# Rows up to which weights take most of the time, and up to which few tiles of rows exist.
FEW_ROWS, MANY_ROWS = 64, 1024


def cublas_rows_of(backend: GemmBackend) -> int | None:
    """The value of `Gemm.cublas_rows` with which this backend multiplies all passes."""
    return 0 if backend == "cublas" else None


@dataclass(frozen=True)
class GemmTile:
    """What a program computes at a time, and its resources. None of it changes a bit of the result."""

    outputs: int
    rows: int
    inputs: int
    warps: int
    stages: int


def tile_of(rows: int, outputs: int, split_k: int, wide: bool, arch: int) -> GemmTile:
    """The tile for a number of rows on an architecture.

    `wide`: numbers take four bytes, and tensor cores cannot multiply them.

    Chosen on an H200 (docs/kernels.md): with few rows, enough bytes must be in flight; with more, each byte must serve
    more products.
    """
    if wide:
        return GemmTile(SPLIT_OUTPUTS, min(32, max(16, power_of_two(rows))), 32, warps=4, stages=2)
    programs = -(-outputs // SPLIT_OUTPUTS) * split_k
    if rows <= 16:
        stages = 3 if programs > MANY_PROGRAMS else 4 if programs > TARGET_PROGRAMS else 5
        return GemmTile(SPLIT_OUTPUTS, 16, 128, warps=4, stages=stages)
    if rows <= FEW_ROWS:
        return GemmTile(SPLIT_OUTPUTS, power_of_two(rows), 128, warps=4, stages=2 if programs > MANY_PROGRAMS else 3)
    if rows <= MANY_ROWS:
        return GemmTile(128, 64, 64, warps=4, stages=4)
    # Before sm_90, operands take registers, which the larger tile would spill.
    return GemmTile(128, 256, 64 if arch >= HOPPER else 32, warps=8, stages=3)


class Gemm(nn.Module):
    """Replaces an `nn.Linear`. The caller adds the bias and the partial sums.

    `forward`: rows [n, inputs] to partial sums [split_k, n, outputs], in float32 if split_k > 1.
    """

    def __init__(self, weight: torch.Tensor, split: bool = True, total_outputs: int | None = None) -> None:
        """Wrap a weight [outputs, inputs].

        `split`: allow split-K. `total_outputs`: choose split-K for the unsharded weight with this many outputs;
        `weight` is one rank's shard of it.
        """
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.out_features, self.in_features = weight.shape
        self.split_k = split_k_of(total_outputs or self.out_features, self.in_features) if split else 1
        self.cublas_rows: int | None = None
        """Rows from which cuBLAS multiplies; None: never."""

    @property
    def backends(self) -> str:
        """The backends in use, such as "triton, cublas from 128 rows"."""
        if not self.cublas_rows:
            return GEMM_BACKENDS[self.cublas_rows is not None]
        return f"triton, cublas from {self.cublas_rows} rows"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply the rows of `x` by the weight."""
        assert x.shape[1] == self.in_features, "a row would be read with the wrong stride"
        if self.cublas_rows is not None and len(x) >= self.cublas_rows:
            return cublas_gemm(x, self.weight, self.split_k)
        return split_k_gemm(x, self.weight, self.split_k)

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of the partial sums of `rows` rows; 0 without split-K."""
        return 0 if self.split_k == 1 else self.split_k * rows * self.out_features * torch.float32.itemsize


def split_k_of(outputs: int, inputs: int) -> int:
    """The number of splits along the inputs."""
    splits = 1
    while (
        splits < MAX_SPLIT_K
        and -(-outputs // SPLIT_OUTPUTS) * splits < TARGET_PROGRAMS
        and inputs % (2 * splits * MIN_SPLIT_INPUTS) == 0
    ):
        splits *= 2
    return splits


def split_size(inputs: int, split_k: int) -> int:
    """Inputs of a split: a multiple of every tile's inputs. The last splits may have fewer inputs, or none."""
    return inputs if split_k == 1 else round_up(-(-inputs // split_k), MIN_SPLIT_INPUTS)


def cublas_gemm(x: torch.Tensor, weight: torch.Tensor, split_k: int) -> torch.Tensor:
    """The partial sums of `split_k_gemm`, by cuBLAS, which may add terms in another order."""
    if split_k == 1:
        return torch.mm(x, weight.T)[None]
    pieces = zip(x.chunk(split_k, 1), weight.chunk(split_k, 1), strict=True)
    if x.device.type == "cpu":  # cannot add half precision in float32
        return torch.stack([own.float() @ part.float().T for own, part in pieces])
    partials = torch.empty(split_k, len(x), len(weight), dtype=torch.float32, device=x.device)
    for partial, (own, part) in zip(partials, pieces, strict=True):
        torch.mm(own, part.T, out_dtype=torch.float32, out=partial)
    return partials


def split_k_gemm(x: torch.Tensor, weight: torch.Tensor, split_k: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Partial sums [split_k, n, outputs] of rows [n, inputs] times a weight [outputs, inputs].

    `dtype`: dtype of the result. The default is float32 if split_k > 1, and the dtype of the rows otherwise.
    """
    (rows, inputs), outputs, wide = x.shape, len(weight), is_wide(x.dtype)
    tile = tile_of(rows, outputs, split_k, wide, architecture(x.device))
    dtype = dtype or (x.dtype if split_k == 1 else torch.float32)
    partials = torch.empty(split_k, rows, outputs, dtype=dtype, device=x.device)
    # Row tiles vary fastest: programs that share a part of the weight run together and read it once.
    _split_k_gemm[(-(-rows // tile.rows), -(-outputs // tile.outputs), split_k)](
        x.contiguous(), weight, partials, rows,
        N=outputs, K=inputs, SPLIT_K=split_size(inputs, split_k),
        TILE_N=tile.outputs, TILE_ROWS=tile.rows, TILE_K=tile.inputs,
        **launch_options(x.device), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return partials


if triton is not None:

    @triton.jit
    def accumulated(
        x, row, index, end, weight, output, split,
        N: tl.constexpr, K: tl.constexpr, SPLIT_K: tl.constexpr,
        TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr,
    ):  # fmt: skip
        """Return the products [TILE_N, TILE_ROWS] of outputs and the rows of `x` before `end`, over one split."""
        acc = tl.zeros([TILE_N, TILE_ROWS], tl.float32)
        for start in range(split * SPLIT_K, split * SPLIT_K + SPLIT_K, TILE_K):
            inputs = start + tl.arange(0, TILE_K)
            weight_mask, row_mask = (output < N)[:, None], (index < end)[None, :]
            if SPLIT_K % TILE_K != 0 or K % SPLIT_K != 0:
                weight_mask, row_mask = weight_mask & (inputs < K)[None, :], row_mask & (inputs < K)[:, None]
            a = tl.load(weight + output[:, None] * K + inputs[None, :], mask=weight_mask, other=0.0)
            b = tl.load(x + row[None, :] * K + inputs[:, None], mask=row_mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        return acc

    @triton.jit(do_not_specialize=["rows"])
    def _split_k_gemm(
        x, weight, partials, rows,
        N: tl.constexpr, K: tl.constexpr, SPLIT_K: tl.constexpr,
        TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_K: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """One tile of outputs for one tile of rows, over one split of the inputs."""
        row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        output = tl.program_id(1).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
        split = tl.program_id(2)
        if OVERLAP:
            gdc_wait()
        acc = accumulated(x, row, row, rows, weight, output, split, N, K, SPLIT_K, TILE_N, TILE_ROWS, TILE_K)
        if OVERLAP:
            gdc_launch_dependents()
        place = partials + (split * rows.to(tl.int64) + row)[None, :] * N + output[:, None]
        tl.store(place, acc.to(partials.dtype.element_ty), mask=(output < N)[:, None] & (row < rows)[None, :])
