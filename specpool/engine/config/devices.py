"""The devices that models and ranks run on."""

import torch

from specpool.engine.config.device_names import EXPECTED_NAME, describe_gpus, is_device_name
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, first_line


def use_device(name: str) -> torch.device:
    """Resolve a device name with `pick_device` and make the device current for this thread."""
    device = pick_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels and graphs run on the current device
    return device


def pick_device(name: str) -> torch.device:
    """Resolve a device name; GPUs get an index, and "auto" prefers a GPU.

    Raises UnsupportedModelError if the device does not exist.
    """
    resolved = _resolve_auto(name)
    if not is_device_name(resolved):
        raise UnsupportedModelError(f"device {name} cannot be used: {EXPECTED_NAME}")
    try:
        device = torch.device(resolved)
        if device.type == "cuda" and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
            count = torch.cuda.device_count()
            if device.index >= count:
                raise UnsupportedModelError(f"device {name} cannot be used: this machine has {describe_gpus(count)}")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModelError(f"device {name} cannot be used: {first_line(error)}") from error
    return device


def pick_rank_devices(options: EngineOptions) -> list[str]:
    """Return one device per rank of this node. Raises UnsupportedModelError if there are too few."""
    ranks = options.tensor_parallel // options.nnodes
    names = [name.strip() for name in options.device.split(",")]
    if len(names) == 1:
        names = _number_devices(names[0], ranks)
    elif len(names) != ranks:
        raise UnsupportedModelError(f"device names {len(names)} devices for {ranks} ranks: {options.device}")
    devices = [pick_device(name) for name in names]
    if len({device.type for device in devices}) > 1:
        raise UnsupportedModelError(f"device: ranks must be all on GPUs or all on the CPU, not on {options.device}")
    gpus = [device for device in devices if device.type == "cuda"]
    if len(set(gpus)) < len(gpus):
        raise UnsupportedModelError(f"device: each rank needs a GPU of its own, not {options.device}")
    return [str(device) for device in devices]


def _number_devices(name: str, ranks: int) -> list[str]:
    resolved = _resolve_auto(name)
    if resolved == "cpu":
        return [resolved] * ranks
    if resolved != "cuda":
        raise UnsupportedModelError(f"device {name} is one GPU for {ranks} ranks: name one per rank, with commas")
    count = torch.cuda.device_count()
    if count < ranks:
        raise UnsupportedModelError(f"tensor-parallel: {ranks} ranks need {ranks} GPUs, but this machine has {count}")
    return [f"cuda:{index}" for index in range(ranks)]


def _resolve_auto(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
