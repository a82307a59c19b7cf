"""The recurrence of gated delta nets on a GPU: a short convolution, then a sequential scan.

The scan of a segment begins with the state of a checkpoint, replays the rows of its tail, then runs new rows. See
`specpool.engine.cache.checkpoints`.
"""

import torch

from specpool.engine.cache.recurrent import RecurrentArena
from specpool.engine.numerics.triton_compat import launch_options, power_of_two, triton

if triton is not None:
    from specpool.engine.passes.gpu.delta_kernels import convolve, scan

TILE = 8
"""Rows of a segment that a program of the convolution handles at a time."""
BLOCK = 16
"""Columns of a state that a program of the scan holds: as many as the registers of one warp allow."""


def run_segments(
    partials: torch.Tensor,  # [splits, rows, features]: inputs of the convolution, gates of the norm, betas, decays
    recurrent: RecurrentArena,
    layer: int,
    segments: torch.Tensor,  # [segments, fields of `Segment`]
    taps: torch.Tensor,  # [taps, inputs of the convolution]
    rates: torch.Tensor,  # [value heads], negative
    biases: torch.Tensor,  # [value heads]
) -> torch.Tensor:
    """Run the recurrence of all segments. Return the new rows [rows, value heads, value size] in float32.

    `layer`: number of the layer among recurrent ones. Rows without a segment stay undefined.
    """
    sizes, (splits, rows, size), count = recurrent.sizes, partials.shape, len(segments)
    heads, key_size, value_size = sizes.state
    key_heads = (sizes.inputs - heads * value_size) // (2 * key_size)
    work_rows, options = rows + count * recurrent.rows, launch_options(partials.device)
    prepared = torch.empty(work_rows, sizes.inputs, dtype=torch.float32, device=partials.device)
    factors = torch.empty(work_rows, sizes.gates, dtype=torch.float32, device=partials.device)
    results = torch.empty(rows, heads, value_size, dtype=torch.float32, device=partials.device)
    shape = {"FIELDS": segments.shape[1], "TAIL_ROWS": recurrent.rows, "KEY_HEADS": key_heads, "VALUE_HEADS": heads,
             "KEY": key_size, "VALUE": value_size}  # fmt: skip
    convolve[(count, 2 * key_heads + heads + 1, -(-rows // (TILE * count)))](
        partials, segments, recurrent.edges[layer], recurrent.inputs[layer], recurrent.gates[layer], taps, rates,
        biases, prepared, factors, rows,
        **shape, SIZE=size, SPLITS=splits, TILE=TILE, HEADS_WIDTH=power_of_two(heads),
        WIDTH=power_of_two(max(key_size, value_size)), TAPS=sizes.taps, **options, num_warps=4,
    )  # fmt: skip
    scan[(count, heads, -(-value_size // BLOCK))](
        prepared, factors, segments, recurrent.states[layer], results, rows,
        **shape, KEY_WIDTH=power_of_two(key_size), BLOCK=BLOCK, **options, num_warps=1,
    )  # fmt: skip
    return results
