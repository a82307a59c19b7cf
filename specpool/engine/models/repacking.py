"""Repacks quantized weights into the types that compiled passes support, if that is exact."""

import torch

from specpool.engine.models.packed_formats import Numbers, spread
from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized

Q4_0, Q8_0 = QUANTIZATION_TYPES["Q4_0"], QUANTIZATION_TYPES["Q8_0"]


def as_quantized(numbers: Numbers) -> Quantized | None:
    """Return the same weight as Q4_0, Q8_0 or INT8; None if none of them represents it exactly.

    Raises ValueError like `Numbers.dequantized`.
    """
    codes = _signed(numbers)
    if codes is None:
        return None
    rows, columns = codes.shape
    scale = numbers.scale.float() if numbers.scale.dim() == 2 else numbers.scale.float().reshape(-1, 1)
    by_block = _block_scales(scale, numbers.block, rows, columns)
    if by_block is not None and int(codes.min()) >= -Q4_0.zero_point and int(codes.max()) < Q4_0.zero_point:
        halves = (codes + Q4_0.zero_point).view(torch.uint8).view(rows, -1, 2, Q4_0.block // 2)
        return Quantized(Q4_0, torch.cat([by_block, halves[:, :, 0] | halves[:, :, 1] << 4], 2).flatten(1))
    if scale.shape[1] == 1:
        per_row = scale.expand(rows, 1).contiguous()
        return Quantized(INT8, torch.cat([per_row.view(torch.uint8), codes.view(torch.uint8)], 1))
    if by_block is None:
        return None
    return Quantized(Q8_0, torch.cat([by_block, codes.view(torch.uint8).view(rows, -1, Q8_0.block)], 2).flatten(1))


def _signed(numbers: Numbers) -> torch.Tensor | None:
    """Return the codes minus their zero point in int8; None if zero points differ or a code does not fit."""
    if numbers.codes.is_floating_point():
        return None
    zero = 0
    if numbers.zeros is not None:
        zero = int(numbers.zeros.flatten()[0])
        if bool((numbers.zeros != zero).any()):
            return None
    codes = numbers.codes.to(torch.int16) - zero
    fits = int(codes.min()) >= -128 and int(codes.max()) < 128
    return codes.to(torch.int8).contiguous() if fits else None


def _block_scales(scale: torch.Tensor, block: tuple[int, int], rows: int, columns: int) -> torch.Tensor | None:
    """Return a float16 scale per Q4_0 or Q8_0 block, as bytes [rows, blocks, 2]; None if that is not exact."""
    size, stored = Q4_0.block, scale.half()
    grouped = scale.shape[1] == 1 or (block[0] == 1 and block[1] and block[1] % size == 0)
    if columns % size or not grouped or not torch.equal(stored.float(), scale):
        return None
    each = spread(stored, (1, block[1] // size), torch.Size((rows, columns // size)))
    return each.expand(rows, columns // size).contiguous()[..., None].view(torch.uint8)
