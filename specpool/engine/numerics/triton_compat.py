"""Triton, if it is installed, and compile options that all kernels share."""

from functools import cache
from typing import Any

import torch

__all__ = [
    "HOPPER", "UNFUSED", "architecture", "gdc_launch_dependents", "gdc_wait", "is_wide", "launch_options",
    "power_of_two", "tl", "triton",
]  # fmt: skip

try:
    import triton
    import triton.language as tl
except ImportError:  # only the CUDA builds of torch ship Triton
    triton = tl = None
try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # this version of Triton keeps them elsewhere, so that launches cannot overlap
    gdc_launch_dependents = gdc_wait = None

# Never fuse multiply-adds: Triton's default differs between versions, and so would the bits.
UNFUSED: dict[str, Any] = {"enable_fp_fusion": False}
# sm_90 brought programmatic dependent launch.
HOPPER = 90


def launch_options(device: torch.device) -> dict[str, Any]:
    """Launch options of the kernels of a pass.

    With OVERLAP, a kernel may begin before the previous one has ended (programmatic dependent launch). It must then
    call `gdc_wait` in every program, before it touches anything that an earlier kernel reads or writes.
    """
    if gdc_wait is None or architecture(device) < HOPPER:
        return {**UNFUSED, "OVERLAP": False}  # some compilers do not know `launch_pdl`
    return {**UNFUSED, "OVERLAP": True, "launch_pdl": True}


def architecture(device: torch.device) -> int:
    """The NVIDIA architecture that kernels for this device run on, such as 90 for sm_90; 0: another kind of device."""
    if device.type == "cuda" and torch.version.cuda is not None:
        return _architecture(device)
    # On the meta device, kernels are only compiled.
    return int(triton.runtime.driver.active.get_current_target().arch) if device.type == "meta" else 0


@cache
def _architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def is_wide(dtype: torch.dtype) -> bool:
    """Whether a dtype has four bytes: tensor cores would round such inputs."""
    return dtype.itemsize == 4
