"""What all kernels have in common: whether Triton is installed, and how they are compiled."""

from typing import Any

import torch

__all__ = ["UNFUSED", "is_wide", "power_of_two", "tl", "triton"]

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton comes with the CUDA builds of torch only
    triton = tl = None

# Multiplications and additions stay apart: Triton's default differs by version, and bits with it.
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def is_wide(dtype: torch.dtype) -> bool:
    """Whether numbers of this dtype take four bytes: tensor cores do not multiply them exactly."""
    return dtype.itemsize == 4
