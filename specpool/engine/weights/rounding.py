"""Rounds weights to Q4_1: chooses the scale and minimum of each block, and packs codes into bytes as in GGUF files.

It knows no text: `specpool.distill.rounding` calibrates. A `metric` [BLOCK, BLOCK] gives the cost of errors e in a
block of a row: e @ metric @ e.
"""

import torch

from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized

Q4_1 = QUANTIZATION_TYPES["Q4_1"]
BLOCK, MAX_CODE = Q4_1.block, 15
# Shares of a block's range to try. A smaller range has smaller steps, but clamps the outermost weights.
RANGES = tuple(1 - 0.025 * i for i in range(13))

Scales = tuple[torch.Tensor, torch.Tensor]
"""Scale and minimum of one block of every row, [rows, 1] float16."""


def choose_scales(block: torch.Tensor, metric: torch.Tensor) -> Scales:
    """Choose scales for a block [rows, BLOCK] that cost no more than scales over its full range."""
    low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
    best = _float16((high - low) / MAX_CODE), _float16(low)
    least = _cost(block, metric, best)
    for share in RANGES:
        margin = (high - low) * (1 - share) / 2
        scales = fit_scales(block, to_codes(block, (high - low) * share / MAX_CODE, low + margin), metric)
        cost = _cost(block, metric, scales)
        better, least = cost < least, torch.minimum(cost, least)
        best = torch.where(better, scales[0], best[0]), torch.where(better, scales[1], best[1])
    return best


def fit_scales(block: torch.Tensor, codes: torch.Tensor, metric: torch.Tensor) -> Scales:
    """Return the scales that cost least with these codes: linear regression."""
    weights = metric.sum(0) / metric.sum()
    mean_code, mean = ((numbers * weights).sum(1, keepdim=True) for numbers in (codes, block))
    spread = codes - mean_code
    weighted = spread @ metric
    variance = (weighted * spread).sum(1, keepdim=True)
    scale = (weighted * block).sum(1, keepdim=True).clamp_min(0) / torch.where(variance > 0, variance, 1)
    return _float16(scale), _float16(mean - scale * mean_code)


def to_codes(weights: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Round to the nearest codes, as float32. All codes are 0 if the scale is."""
    scale = scale.float()
    codes = ((weights - minimum.float()) / torch.where(scale > 0, scale, 1)).round_().clamp_(0, MAX_CODE)
    return codes * (scale > 0)


def from_codes(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """Return the float32 weights of codes, as dequantization does."""
    return codes * scale.float() + minimum.float()


def pack(codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> Quantized:
    """Pack codes [rows, columns] with float16 scales and minimums [rows, blocks]."""
    low, high = codes.to(torch.uint8).unflatten(1, (-1, BLOCK)).chunk(2, 2)
    header = torch.stack([scales, minimums], 2).view(torch.uint8)
    return Quantized(Q4_1, torch.cat([header, low | high << 4], 2).flatten(1).cpu())


def _cost(block: torch.Tensor, metric: torch.Tensor, scales: Scales) -> torch.Tensor:
    errors = from_codes(to_codes(block, *scales), *scales) - block
    return (errors @ metric * errors).sum(1, keepdim=True)


def _float16(numbers: torch.Tensor) -> torch.Tensor:
    """Round to finite float16 numbers."""
    largest = torch.finfo(torch.float16).max
    return numbers.clamp(-largest, largest).half()
