"""Triton, if it is installed, and compile options that all kernels share."""

from typing import Any

import torch

__all__ = ["UNFUSED", "is_wide", "power_of_two", "tl", "triton"]

try:
    import triton
    import triton.language as tl
except ImportError:  # only the CUDA builds of torch ship Triton
    triton = tl = None

# Never fuse multiply-adds: Triton's default differs between versions, and so would the bits.
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def is_wide(dtype: torch.dtype) -> bool:
    """Whether a dtype has four bytes: tensor cores would round such inputs."""
    return dtype.itemsize == 4
