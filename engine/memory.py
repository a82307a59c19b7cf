"""How much memory a KV cache may come to take where nobody says so."""

from pathlib import Path

import psutil
import torch

GPU_SHARE = 0.8
CPU_SHARE = 0.4
"""Less, because draft and target often have one machine between them."""
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def default_kv_memory(device: torch.device) -> int:
    """A share of what is free on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return int(_available_to_process() * CPU_SHARE)


def _available_to_process() -> int:
    """What the machine has available and, in a container, what the limit leaves beyond what we have."""
    available = int(psutil.virtual_memory().available)
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else "max"
    if limit == "max":
        return available
    return min(available, max(0, int(limit) - int(psutil.Process().memory_info().rss)))
