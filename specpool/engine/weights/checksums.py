"""Checksums of weights, computed as fast as memory can be read."""

from collections.abc import Iterator
from functools import cache
from math import lcm, prod

import numpy as np
import torch

from specpool.engine.weights.quantized import Quantized, Weight, as_tensor, slice_of

ROW_WORDS = 1 << 16  # 32-bit words per row; the multipliers and a row of results fit into the processor's cache
ROWS = {"cpu": 32, "cuda": 256}  # rows summed at a time, by device type
WORD_BYTES, SUM_BYTES = 4, 8
SLICE_WEIGHTS = 1 << 20  # weights converted at a time, so that they stay in the processor's cache


def checksum(weight: Weight, dtype: torch.dtype | None = None) -> bytes:
    """Return one 64-bit sum per row of 32-bit words, each word times a multiplier for its position.

    This is multilinear hashing in wrapping integers (Lemire and Kaser, 2014). `dtype`: convert the weight to this type
    first, slice by slice; None: keep its type, or dequantize to float32.
    """
    if not isinstance(weight, Quantized) and dtype in (None, weight.dtype):
        return _sum_rows(weight)
    sums = [_sum_rows(as_tensor(part).to(dtype)) for part in _slices(weight)]
    return b"".join(part[:-SUM_BYTES] for part in sums[:-1]) + sums[-1]


def _slices(weight: Weight) -> Iterator[Weight]:
    """Cut a weight so that all slices but the last hold whole rows of words, in types of 16 bits or more."""
    columns = prod(weight.shape[1:])
    rows = lcm(columns, 2 * ROW_WORDS) // columns
    rows *= max(1, SLICE_WEIGHTS // (rows * columns))
    for begin in range(0, weight.shape[0], rows):
        yield slice_of(weight, begin, begin + rows)


def _sum_rows(weight: torch.Tensor) -> bytes:
    """Sum all full rows of words, then the remainder."""
    words = _as_words(weight)
    multipliers = _multipliers(words.device)
    full, step = len(words) // ROW_WORDS * ROW_WORDS, ROWS.get(words.device.type, 1) * ROW_WORDS
    weighted = torch.empty(min(step, full) // ROW_WORDS, ROW_WORDS, dtype=torch.int64, device=words.device)
    sums = []
    for start in range(0, full, step):
        rows = words[start : min(start + step, full)].view(-1, ROW_WORDS)
        sums.append(torch.mul(rows, multipliers, out=weighted[: len(rows)]).sum(1))
    sums.append((words[full:] * multipliers[: len(words) - full]).sum(0, keepdim=True))
    return torch.cat(sums).cpu().numpy().tobytes()


def _as_words(weight: torch.Tensor) -> torch.Tensor:
    """View a weight as int32 words, padded with zeros."""
    flat = weight.detach().contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride
    size = flat.dtype.itemsize
    if flat.numel() * size % WORD_BYTES or flat.storage_offset() * size % WORD_BYTES:
        octets = flat.view(torch.uint8)
        return torch.cat([octets, octets.new_zeros(-len(octets) % WORD_BYTES)]).view(torch.int32)
    return flat.view(torch.int32)


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Return fixed pseudo-random 64-bit integers: the output of SplitMix64."""
    with np.errstate(over="ignore"):
        z = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy(z.view(np.int64)).to(device)
