"""Which device each rank has."""

import torch

from specpool.engine.config.devices import pick_device
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError


def devices_of(options: EngineOptions) -> list[str]:
    """The devices of the ranks of this node. UnsupportedModelError if there are not as many as are needed."""
    ranks = options.tensor_parallel // options.nnodes
    named = [name.strip() for name in options.device.split(",")]
    if len(named) == 1:
        named = _numbered(named[0], ranks)
    elif len(named) != ranks:
        raise UnsupportedModelError(f"device names {len(named)} devices for {ranks} ranks: {options.device}")
    picked = [pick_device(name) for name in named]
    if len({device.type for device in picked}) > 1:
        raise UnsupportedModelError(f"device: ranks must be all on GPUs or all on the CPU, not on {options.device}")
    gpus = [str(device) for device in picked if device.type == "cuda"]
    if len(set(gpus)) < len(gpus):
        raise UnsupportedModelError(f"device: each rank needs a GPU of its own, not {options.device}")
    return [str(device) for device in picked]


def _numbered(name: str, ranks: int) -> list[str]:
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if kind == "cpu":
        return [kind] * ranks
    count = torch.cuda.device_count()
    if kind != "cuda":
        raise UnsupportedModelError(
            f"device {name} is one GPU for {ranks} ranks: name one for each, separated by commas"
        )
    if count < ranks:
        raise UnsupportedModelError(f"tensor_parallel: {ranks} ranks need {ranks} GPUs, but this machine has {count}")
    return [f"cuda:{index}" for index in range(ranks)]
