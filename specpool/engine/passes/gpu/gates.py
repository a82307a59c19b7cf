"""The gates that multiply the results of attention and of gated delta nets on a GPU."""

import torch

from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton

if triton is not None:
    from specpool.engine.passes.gpu.rows import normalized, summed


def gated(
    attended: torch.Tensor,  # [rows, heads, dim]
    partials: torch.Tensor,  # [splits, rows, features]
    bias: torch.Tensor | None,  # [features]
    first: int,
) -> torch.Tensor:
    """Multiply attended features by the sigmoid of their gates in place. Return `attended`.

    `partials`: of a GEMM whose features from number `first` on are the gates.
    """
    return _apply(attended, partials, bias, first, None, attended, 0.0)


def gated_norm(
    read: torch.Tensor,  # [rows, heads, dim] float32
    partials: torch.Tensor,  # [splits, rows, features]
    first: int,
    weight: torch.Tensor,  # [dim]
    dtype: torch.dtype,
    eps: float,
) -> torch.Tensor:
    """Normalize the heads of rows, and multiply them by the SiLU of their gates, from feature `first` on.

    Return [rows, heads * dim] in `dtype`.
    """
    return _apply(read, partials, None, first, weight, torch.empty_like(read, dtype=dtype), eps).flatten(1)


def _apply(
    x: torch.Tensor, partials: torch.Tensor, bias: torch.Tensor | None, first: int, weight: torch.Tensor | None,
    result: torch.Tensor, eps: float,
) -> torch.Tensor:  # fmt: skip
    rows, heads, dim = x.shape
    _gate[(rows, heads)](
        x, partials, bias, weight, result, eps, rows,
        SIZE=partials.shape[2], SPLITS=len(partials), BIASED=bias is not None, FIRST=first, HEADS=heads, DIM=dim,
        WIDTH=power_of_two(dim), NORMED=weight is not None, **launch_options(x.device), num_warps=1,
    )  # fmt: skip
    return result


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _gate(
        x, partials, bias, weight, result, eps, rows,
        SIZE: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr,
        DIM: tl.constexpr, WIDTH: tl.constexpr, NORMED: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Gate a head of a row: by a SiLU after a norm, or by a sigmoid."""
        row, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
        mask, place = feature < DIM, (row * HEADS + head) * DIM + feature
        if NORMED:
            factors = tl.load(weight + feature, mask=mask, other=0.0)
        if OVERLAP:
            gdc_wait()
        own = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        gate = summed(partials, bias, row, FIRST + head * DIM + feature, mask, rows, SIZE, SPLITS, BIASED)
        factor = 1 / (1 + tl.exp(-gate))
        if NORMED:
            own, factor = normalized(own, factors, eps, DIM), gate * factor
        tl.store(result + place, (own * factor).to(result.dtype.element_ty), mask=mask)
