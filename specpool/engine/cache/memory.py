"""Memory needs of an engine, computed from the model before anything is allocated."""

import ctypes
import math
import mmap
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

GPU_SHARE = 0.8
CPU_SHARE = 0.4  # smaller than `GPU_SHARE`, because draft and target often share one machine
CONTAINER_LIMIT, STATUS = Path("/sys/fs/cgroup/memory.max"), Path("/proc/self/status")
# Live tensors of a pass as wide as the hidden state, the intermediate state, and the float32 logits.
HIDDEN_COPIES, INTERMEDIATE_COPIES, LOGIT_COPIES = 8, 4, 2


@dataclass(frozen=True)
class Footprint:
    """Bytes of memory by use."""

    weights: int
    activations: int  # upper bound for one pass
    kv: int = 0  # KV cache of all slots
    states: int = 0  # recurrent states of all slots and of the prefix cache
    # Counted only under `memory_limit`:
    grammars: int = 0  # reserved for compiled grammars and their tokenizer
    base: int = 0  # everything else in the process

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.kv + self.states + self.grammars + self.base

    def __str__(self) -> str:
        optional = "states", "grammars", "base"
        parts = [f"{name} {readable(count)}" for name, count in vars(self).items() if count or name not in optional]
        return f"{readable(self.total)}: {', '.join(parts)}"


@dataclass(frozen=True)
class KVLimit:
    """A limit on KV cache memory, and the option that set it."""

    name: str  # name of the option
    option_bytes: int  # value of the option in bytes
    included: Footprint | None = None
    """What the limit includes beside the KV cache; None: nothing."""
    loading: int = 0
    """Memory that loading the model has taken at most, if the limit includes it."""
    other_ranks: int | None = None
    """Smallest KV cache size that another rank can hold; None: the model is not sharded."""
    beside: Footprint | None = None
    """Memory of another model in this process, which counts against the limit; None: there is none."""
    states: int = 0
    """Bytes of recurrent states, of one or both models, that count against the limit."""
    position_bytes: int | None = None
    """Bytes of a position that count against the limit, perhaps in both caches; None: those of this cache."""
    max_model_len: int | None = None
    """Maximum positions of a sequence in the other model; None: there is none."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that the limit leaves to KV caches."""
        return max(0, self.option_bytes - self._others) if self.option_bytes >= self.loading else 0

    def positions(self, per_token: int) -> int:
        """Return the number of positions that fit, at this many bytes per position."""
        own = self.kv_bytes // (self.position_bytes or per_token)
        return own if self.other_ranks is None else min(own, self.other_ranks // per_token)

    def least(self, kv_bytes: int) -> int:
        """The smallest limit that leaves this much to the KV caches."""
        return max(self.loading, kv_bytes + self._others)

    @property
    def _others(self) -> int:
        return self.states + sum(each.total for each in (self.included, self.beside) if each is not None)

    @property
    def flag(self) -> str:
        """The option as typed."""
        return f"--{self.name.replace('_', '-')}"

    def __str__(self) -> str:
        limit = f"{self.flag} of {readable(self.option_bytes)}"
        states = f"{readable(self.states)} of recurrent states" if self.states else ""
        if self.included is None:
            return f"{limit}, less {states}," if states else limit
        states = f"{states}, " if states else ""
        base = f"{readable(self.included.base)} of the process, " if self.included.base else ""
        grammars = f"{readable(self.included.grammars)} of grammars, " if self.included.grammars else ""
        own = f"{readable(self.included.weights)} of weights and {readable(self.included.activations)} of activations"
        beside = f" and {readable(self.beside.total)} of the other model" if self.beside is not None else ""
        return f"{limit}, less {states}{base}{grammars}{own}{beside},"


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of zeros. On a CPU, it is aligned to a memory page, and pages take no memory until used.

    Raises RuntimeError or MemoryError if there is not enough memory.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + mmap.PAGESIZE, np.uint8))
    begin = -memory.data_ptr() % mmap.PAGESIZE
    return memory[begin : begin + size].view(dtype).view(shape)


def return_pages(tensor: torch.Tensor) -> None:
    """Return the memory of a contiguous CPU tensor to the system until it is used again. Its values become zeros.

    Only whole pages are returned, and only on Linux; elsewhere the values stay.
    """
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def return_freed_memory() -> None:
    """Return the memory of freed objects to the system, with GNU's C library."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_files(model: nn.Module) -> None:
    """Copy all weights out of mapped files; even one mapped weight would keep its whole file resident."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """Return all weights of a module once each, including those packed by oneDNN."""
    packed = (vars(module).get("weight") for module in model.modules())
    weights = (*model.parameters(), *(weight for weight in packed if weight is not None))
    return list({id(weight): weight for weight in weights}.values())


def weight_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*weights_of(model), *model.buffers()))


def activation_bytes(config: Any, dtype: torch.dtype, vocab_size: int, rows: int) -> int:
    """Return an upper estimate of the activation bytes of a pass with `rows` rows that all need logits."""
    intermediate = _largest(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    experts = _largest(getattr(config, "num_experts_per_tok", None) or 0)  # every chosen expert's output is kept
    per_row = (HIDDEN_COPIES + experts) * config.hidden_size + INTERMEDIATE_COPIES * intermediate
    row_bytes: int = per_row * dtype.itemsize + LOGIT_COPIES * vocab_size * torch.float32.itemsize
    return rows * row_bytes


def _largest(size: int | list[int]) -> int:
    """Return the largest size in any layer. `size`: one for all layers, or one per layer."""
    return max(size) if isinstance(size, list) else size


def process_memory(device: torch.device) -> tuple[int, int]:
    """Return the memory that this process takes on the device, now and at most so far, in bytes.

    On a CPU, that is its resident memory; on a GPU, what torch has allocated, without the driver's context.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    return_freed_memory()
    present = int(psutil.Process().memory_info().rss)
    peak = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.is_file() else None
    return present, max(present, 1024 * int(peak[1]) if peak is not None else 0)


def default_kv_memory(device: torch.device) -> int:
    """Return the default KV cache size: a share of the memory that is free on the device now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # after loading, torch holds memory that no tensor uses
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return int(_available_to_process() * CPU_SHARE)


def _available_to_process() -> int:
    """Return the memory available on this machine and within the container's limit."""
    available = int(psutil.virtual_memory().available)
    limit = CONTAINER_LIMIT.read_text().strip() if CONTAINER_LIMIT.is_file() else "max"
    if limit == "max":
        return available
    return min(available, max(0, int(limit) - int(psutil.Process().memory_info().rss)))


def readable(count: int) -> str:
    """Format a number of bytes in KiB, MiB or GiB."""
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
