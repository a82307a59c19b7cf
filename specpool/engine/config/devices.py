"""The device that a model is loaded onto."""

import re

import torch

from specpool.engine.config.sources import UnsupportedModelError, first_line


def use_device(wanted: str) -> torch.device:
    """Picks a device as `pick_device` does, with its errors, and makes it the current one of this thread."""
    device = pick_device(wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels and graphs go to the current device
    return device


def pick_device(wanted: str) -> torch.device:
    """The device that `wanted` names, a GPU with its index; "auto" takes a GPU if there is one. UnsupportedModelError
    if there is no such device."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise UnsupportedModelError(f'device {wanted} cannot be used: it must be "auto", "cpu", "cuda" or "cuda:N"')
    try:
        device = torch.device(name)
        if device.type == "cuda" and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            _refuse_missing_gpu(wanted, device.index)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModelError(f"device {wanted} cannot be used: {first_line(error)}") from error
    return device


def _refuse_missing_gpu(wanted: str, index: int) -> None:
    count = torch.cuda.device_count()
    if index >= count:
        names = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise UnsupportedModelError(f"device {wanted} cannot be used: this machine has {names}")
