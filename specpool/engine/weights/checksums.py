"""Sums over the bits of a weight, computed as fast as they can be read from memory."""

from collections.abc import Iterator
from functools import cache
from math import lcm, prod

import numpy as np
import torch

from specpool.engine.weights.quantized import Quantized, Weight, as_tensor, slice_of

WORDS = 1 << 16
"""Words of a row: the multipliers and a row of products stay in a processor's cache."""
ROWS = {"cpu": 32, "cuda": 256}
"""Rows summed at a time, by type of device."""
WORD_BYTES, SUM_BYTES = 4, 8
AT_A_TIME = 1 << 20
"""Weights that are dequantized, or converted, before they are summed: a part stays in a processor's cache."""


def word_sums(weight: Weight, dtype: torch.dtype | None = None) -> bytes:
    """One 64-bit sum for each row of 32-bit words, times 64-bit multipliers by position, in integers that wrap around
    (multilinear hashing; Lemire and Kaser, 2014).

    `dtype`: that the weight is converted to before; None: its own, or float32 if it is quantized. Whatever has to be
    made of a weight is made of a part of it at a time.
    """
    if not isinstance(weight, Quantized) and dtype in (None, weight.dtype):
        return _sums(weight)
    sums = [_sums(as_tensor(part).to(dtype)) for part in _parts(weight)]
    return b"".join(its[:-SUM_BYTES] for its in sums[:-1]) + sums[-1]


def _parts(weight: Weight) -> Iterator[Weight]:
    """Rows of a weight, so many that each part but the last has whole rows of words, in types of 16 bits or more."""
    columns = prod(weight.shape[1:])
    rows = lcm(columns, 2 * WORDS) // columns
    rows *= max(1, AT_A_TIME // (rows * columns))
    for begin in range(0, weight.shape[0], rows):
        yield slice_of(weight, begin, begin + rows)


def _sums(weight: torch.Tensor) -> bytes:
    """The sums of all whole rows of words, and of the words after them, if any."""
    words = _words(weight)
    multipliers = _multipliers(words.device)
    whole, step = len(words) // WORDS * WORDS, ROWS.get(words.device.type, 1) * WORDS
    products = torch.empty(min(step, whole) // WORDS, WORDS, dtype=torch.int64, device=words.device)
    parts = []
    for start in range(0, whole, step):
        rows = words[start : min(start + step, whole)].view(-1, WORDS)
        parts.append(torch.mul(rows, multipliers, out=products[: len(rows)]).sum(1))
    parts.append((words[whole:] * multipliers[: len(words) - whole]).sum(0, keepdim=True))
    return torch.cat(parts).cpu().numpy().tobytes()


def _words(weight: torch.Tensor) -> torch.Tensor:
    """The bits of a weight as int32, filled up with zeros."""
    flat = weight.detach().contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single element may have any stride
    size = flat.dtype.itemsize
    if flat.numel() * size % WORD_BYTES or flat.storage_offset() * size % WORD_BYTES:
        octets = flat.view(torch.uint8)
        return torch.cat([octets, octets.new_zeros(-len(octets) % WORD_BYTES)]).view(torch.int32)
    return flat.view(torch.int32)


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Pseudo-random 64-bit integers, always the same ones: the outputs of SplitMix64."""
    with np.errstate(over="ignore"):
        z = np.arange(1, WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return torch.from_numpy(z.view(np.int64)).to(device)
