"""Checks device names without importing torch, which has the final word (devices.py)."""

import ctypes
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from specpool.engine.config.sources import UnsupportedModelError

AUTO, CPU = "auto", "cpu"
EXPECTED_NAME = 'it must be "auto", "cpu", "cuda" or "cuda:N"'
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""


def check_device_name(name: str) -> None:
    """Raise UnsupportedModelError if the name is invalid, or if no such device can exist here."""
    if name in (AUTO, CPU):
        return
    reason = _why_no_gpu(int(name.partition(":")[2] or 0)) if is_device_name(name) else EXPECTED_NAME
    if reason is not None:
        raise UnsupportedModelError(f"{name} cannot be used: {reason}")


def may_be_gpu(name: str) -> bool:
    """Whether a valid name is that of a GPU. "auto" is, unless there is certainly none."""
    return name not in (AUTO, CPU) or (name == AUTO and _why_no_gpu(0) is None)


def exact_name(name: str) -> str:
    """Return the name of a device with its index. A GPU without an index is the first one."""
    if not may_be_gpu(name):
        return CPU
    return "cuda:0" if name in (AUTO, "cuda") else name


def is_device_name(name: str) -> bool:
    """Whether this is the name of a CPU or a GPU."""
    return re.fullmatch(r"cpu|cuda(:\d+)?", name) is not None


def describe_gpus(count: int) -> str:
    """Return the names of a machine's GPUs, for messages."""
    return {0: "no GPU", 1: "cuda:0"}.get(count, f"cuda:0 to cuda:{count - 1}")


def _why_no_gpu(index: int) -> str | None:
    """Return why a GPU cannot be used; None if it exists, or if only torch can tell."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    build = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    if not build.get("cuda") and not build.get("hip"):
        return f"torch {build.get('__version__')} was built without support for GPUs"
    count = _count_gpus() if build.get("cuda") and sys.platform == "linux" else None
    return f"this machine has {describe_gpus(count)}" if count is not None and index >= count else None


def _count_gpus() -> int | None:
    """Return the number of GPUs that the CUDA driver offers to this process; None if it does not say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")  # as torch loads it
    except OSError:
        return 0
    status, count = driver.cuInit(0), ctypes.c_int()
    if status == _NO_DEVICE:
        return 0
    if status != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    return count.value
