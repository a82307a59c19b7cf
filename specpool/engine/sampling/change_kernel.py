"""A Triton kernel that applies bias, masks and penalties to the logits of a batch, after one copy to the device.

Results have the bits of `specpool.engine.sampling.sampler.changed`. A program handles a part of a row: it copies the
logits that the grammar allows, then reads all other changes of the row and applies those to tokens in its part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specpool.engine.numerics.triton_compat import UNFUSED, tl, triton
from specpool.engine.numerics.uploads import upload
from specpool.engine.sampling.lexers import BITS
from specpool.engine.sampling.rules import Changes
from specpool.protocol.sampling import SamplingParams

# Logits per program, and how many it reads at a time.
PART, BLOCK = 8192, 1024
WARPS = 4
# 32-bit fields per row: where its arrays begin (0: no array) and their sizes, then its three penalties.
FIELDS = 12

RowChanges = tuple[SamplingParams | None, Changes | None]
"""The parameters of a row, and the changes of its logits."""


def change_rows(logits: torch.Tensor, rows: Sequence[RowChanges]) -> torch.Tensor:
    """Return a float32 copy of logits [n, vocab_size] with the changes of each row."""
    logits = logits.contiguous()
    vocab = logits.shape[1]
    changed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    table = upload(_pack(rows, pin_memory=logits.device.type == "cuda"), logits.device)
    _change_rows[(len(rows), triton.cdiv(vocab, PART))](
        logits, changed, table, vocab,
        FIELDS=FIELDS, BITS=BITS, PART=PART, BLOCK=BLOCK, num_warps=WARPS, **UNFUSED,
    )  # fmt: skip
    return changed


def _pack(rows: Sequence[RowChanges], pin_memory: bool) -> torch.Tensor:
    """The fields of each row, then the arrays of all rows; int32. Rows with the same array share one copy."""
    fields = np.zeros((len(rows), FIELDS), np.int32)
    begins, arrays, size = dict[int, int](), list[NDArray[Any]]([fields.reshape(-1)]), fields.size

    def place(array: NDArray[Any]) -> int:
        nonlocal size
        if id(array) not in begins:
            begins[id(array)] = size
            arrays.append(array.view(np.int32))
            size += array.size
        return begins[id(array)]

    for row, (params, changes) in zip(fields, rows, strict=True):
        if params is None or changes is None:
            continue
        row[:9] = (
            0 if changes.allowed is None else place(changes.allowed),
            place(changes.bias_ids), place(changes.biases), changes.bias_ids.size,
            place(changes.masked_ids), changes.masked_ids.size,
            place(changes.counted_ids), place(changes.counts), changes.counted_ids.size,
        )  # fmt: skip
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        row[9:] = np.array(penalties, np.float32).view(np.int32)
    # New memory: the last round's copy may still be in progress.
    table = torch.empty(size, dtype=torch.int32, pin_memory=pin_memory)
    np.concatenate(arrays, out=table.numpy())
    return table


if triton is not None:

    @triton.jit
    def _change_rows(
        logits, changed, table, vocab,
        FIELDS: tl.constexpr, BITS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Copy a part of a row of logits with its changes."""
        row, begin, lane = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART, tl.arange(0, BLOCK)
        end = tl.minimum(begin + PART, vocab)
        fields = table + row * FIELDS
        logits += row * vocab
        changed += row * vocab
        allowed = tl.load(fields)
        for at in range(begin, end, BLOCK):
            token_ids = at + lane
            x = tl.load(logits + token_ids, mask=token_ids < end, other=0.0).to(tl.float32)
            if allowed > 0:
                words = tl.load(table + allowed + token_ids // BITS, mask=token_ids < end, other=0)
                x = tl.where((words >> (token_ids % BITS)) & 1 != 0, x, float("-inf"))
            tl.store(changed + token_ids, x, mask=token_ids < end)
        tl.debug_barrier()  # other threads change the logits that this one has copied

        ids, biases, size = table + tl.load(fields + 1), table + tl.load(fields + 2), tl.load(fields + 3)
        for at in range(0, size, BLOCK):
            token_ids, is_own = _ids(ids, at, size, begin, end, BLOCK)
            bias = tl.load(biases + at + lane, mask=is_own, other=0).to(tl.float32, bitcast=True)
            x = tl.load(changed + token_ids, mask=is_own, other=0.0)
            tl.store(changed + token_ids, x + bias, mask=is_own)
        tl.debug_barrier()

        ids, size = table + tl.load(fields + 4), tl.load(fields + 5)
        for at in range(0, size, BLOCK):
            token_ids, is_own = _ids(ids, at, size, begin, end, BLOCK)
            tl.store(changed + token_ids, float("-inf"), mask=is_own)
        tl.debug_barrier()

        ids, counts, size = table + tl.load(fields + 6), table + tl.load(fields + 7), tl.load(fields + 8)
        repetition = tl.load(fields + 9).to(tl.float32, bitcast=True)
        frequency = tl.load(fields + 10).to(tl.float32, bitcast=True)
        presence = tl.load(fields + 11).to(tl.float32, bitcast=True)
        for at in range(0, size, BLOCK):
            token_ids, is_own = _ids(ids, at, size, begin, end, BLOCK)
            count = tl.load(counts + at + lane, mask=is_own, other=-1)
            x = tl.load(changed + token_ids, mask=is_own, other=0.0)
            penalized = tl.where(x < 0, x * repetition, tl.div_rn(x, repetition))
            reduced = penalized - (frequency * count.to(tl.float32) + presence)
            penalized = tl.where(count > 0, reduced, penalized)
            tl.store(changed + token_ids, penalized, mask=is_own & (count >= 0))

    @triton.jit
    def _ids(ids, at, size, begin, end, BLOCK: tl.constexpr):
        """Up to BLOCK token ids of an array, and which of them are in this part of the row."""
        place = at + tl.arange(0, BLOCK)
        token_ids = tl.load(ids + place, mask=place < size, other=-1)
        return token_ids, (token_ids >= begin) & (token_ids < end)
