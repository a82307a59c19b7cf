"""Gated short convolutions on a GPU: one kernel between two GEMMs."""

import torch

from specpool.engine.cache.recurrent import RecurrentArena
from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, tl, triton

if triton is not None:
    from specpool.engine.passes.gpu.delta_kernels import bounds_of, convolved
    from specpool.engine.passes.gpu.rows import summed

TILE, WIDTH = 8, 128
"""Rows of a segment, and features, that a program handles at a time."""


def convolve_gated(
    partials: torch.Tensor,  # [splits, rows, features]: gates of inputs, gates of results, inputs
    bias: torch.Tensor | None,  # [features]
    recurrent: RecurrentArena,
    layer: int,
    segments: torch.Tensor,  # [segments, fields of `Segment`]
    taps: torch.Tensor,  # [taps, inputs]
    taps_bias: torch.Tensor | None,  # [inputs]
) -> torch.Tensor:
    """Gate the inputs of all segments, convolve them, and gate the results. Return those of new rows [rows, inputs].

    `layer`: number of the layer among recurrent ones. Rows without a segment stay undefined.
    """
    (splits, rows, size), (num_taps, inputs), count = partials.shape, taps.shape, len(segments)
    results = torch.empty(rows, inputs, dtype=recurrent.inputs.dtype, device=partials.device)
    _convolve_gated[(count, -(-inputs // WIDTH), -(-rows // (TILE * count)))](
        partials, bias, segments, recurrent.edges[layer], recurrent.inputs[layer], taps, taps_bias, results, rows,
        SIZE=size, SPLITS=splits, BIASED=bias is not None, TAPS_BIASED=taps_bias is not None,
        FIELDS=segments.shape[1], TAIL_ROWS=recurrent.rows, TILE=TILE, WIDTH=WIDTH, TAPS=num_taps,
        **launch_options(partials.device), num_warps=4,
    )  # fmt: skip
    return results


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _convolve_gated(
        partials, bias, segments, edges, inputs, taps, taps_bias, results, rows,
        SIZE: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, TAPS_BIASED: tl.constexpr,
        FIELDS: tl.constexpr, TAIL_ROWS: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Convolve some features of some rows of a segment."""
        FEATURES: tl.constexpr = SIZE // 3
        feature = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
        mask = feature < FEATURES
        if OVERLAP:
            gdc_wait()
        segment = segments + tl.program_id(0) * FIELDS
        first_row, num_replayed, end, num_before = bounds_of(segment)
        for begin in range(tl.program_id(2) * TILE, end, tl.num_programs(2) * TILE):
            at = (begin + tl.arange(0, TILE))[:, None]
            x = convolved(
                partials, bias, edges, inputs, taps, segment, at, first_row, num_replayed, end, num_before, feature,
                mask, rows, FEATURES, True, SIZE, SPLITS, BIASED, TAIL_ROWS, TAPS,
            )  # fmt: skip
            if TAPS_BIASED:
                x += tl.load(taps_bias + feature, mask=mask, other=0.0)
            row, is_new = first_row + at - num_replayed, mask & (at >= num_replayed) & (at < end)
            x *= summed(partials, bias, row, FEATURES + feature, is_new, rows, SIZE, SPLITS, BIASED)
            tl.store(results + row * FEATURES + feature, x.to(results.dtype.element_ty), mask=is_new)
