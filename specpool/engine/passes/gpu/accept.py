"""Acceptance on the device, for greedy sequences: it decides which rows the carried draft runs after the target.

The draft's pass has the rows of the target's pass, one position later. Each row runs the token that the target chose
there. Rows after the accepted draft tokens become padding.
"""

import torch

from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton
from specpool.engine.passes.packing import POSITIONS, SLOTS, PackedBatch


def accept(
    choices: torch.Tensor, target: PackedBatch, draft: PackedBatch, numbers: torch.Tensor, spans: int, max_rows: int
) -> None:
    """Accept the longest prefix of each span's draft tokens that agrees with the target's choices.

    `choices`: the target's choices after each row, [2, tokens], as returned by `choose`. `draft`: the draft's batch as
    if all draft tokens were accepted. `numbers`: the numbers of the draft loop's first step, likewise. Both are
    corrected in place. In both batches, tile i is span i, with at most `max_rows` rows. A span whose slot in `draft` is
    -1 is not drafted.
    """
    _accept[(spans,)](
        choices, target.input_ids, target.tile_begins, target.tile_sizes,
        draft.input_ids, draft.positions, draft.slots, draft.tile_sizes, draft.logit_rows,
        numbers[SLOTS], numbers[POSITIONS],
        WIDTH=power_of_two(max_rows), **launch_options(choices.device), num_warps=1,
    )  # fmt: skip


if triton is not None:

    @triton.jit
    def _accept(
        choices, target_ids, begins, sizes, ids, positions, slots, draft_sizes, logit_rows, next_slots, next_positions,
        WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        if OVERLAP:
            gdc_wait()
        span, index = tl.program_id(0), tl.arange(0, WIDTH)
        begin, size = tl.load(begins + span), tl.load(sizes + span)
        row, mask = begin + index, index < size
        chosen = tl.load(choices + row, mask=mask, other=0.0).to(tl.int64)
        following = tl.load(target_ids + row + 1, mask=index + 1 < size, other=-1)  # no token equals the last choice
        accepted = tl.min(tl.where(mask & (chosen != following), index, WIDTH), 0)
        is_drafted, last = tl.load(slots + begin) >= 0, begin + accepted
        tl.store(ids + row, chosen, mask=mask)
        tl.store(slots + row, -1, mask=mask & (index > accepted))
        tl.store(draft_sizes + span, tl.where(is_drafted, accepted + 1, 0))
        tl.store(logit_rows + span, last)
        tl.store(next_positions + span, tl.load(positions + last) + 1, mask=tl.load(next_slots + span) >= 0)
