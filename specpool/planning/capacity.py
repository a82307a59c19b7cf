"""The memory that a deployed pair needs: on its devices, by slots, and in its pods. Pure."""

from dataclasses import dataclass

GIB = 2**30
HOST_BYTES, GPU_HOST_BYTES = 2 * GIB, 4 * GIB
"""Memory of a worker's process beyond weights, activations and cache, from experience: Python, torch, what it compiles
into /tmp, and with a GPU the CUDA libraries."""


@dataclass(frozen=True)
class Memory:
    """Memory of a worker, as it was measured."""

    weights: int
    """Bytes, like the next two."""
    activations: int
    kv_per_position: int
    positions: int
    """Positions of the whole KV cache."""
    multiple: int
    """Positions of a sequence are rounded up to a multiple of this."""
    max_model_len: int
    """Positions that a sequence can have."""

    @property
    def longest(self) -> int:
        """Positions of the cache for a sequence of full length."""
        return -(-self.max_model_len // self.multiple) * self.multiple

    def slot_positions(self, positions: int | None) -> int:
        """Positions of the cache for a sequence of this length; None: of full length."""
        if positions is None or positions >= self.longest:
            return self.longest
        return min(self.longest, -(-positions // self.multiple) * self.multiple)

    def room(self, positions: int | None) -> int:
        """Sequences of this length that the measured KV cache has room for."""
        return self.positions // self.slot_positions(positions)

    def kv_bytes(self, slots: int, positions: int | None) -> int:
        """Bytes of a KV cache for `slots` sequences, but at least for one of full length, which a worker requires."""
        return max(self.longest, slots * self.slot_positions(positions)) * self.kv_per_position


@dataclass(frozen=True)
class WorkerNeeds:
    """Needs of one deployed worker, in bytes."""

    slot_bytes: int
    kv_bytes: int
    device_bytes: int
    """Weights, activations and KV cache."""
    request_bytes: int
    """Memory that the pod requests."""
    limit_bytes: int
    """Memory that the pod may take: while a model is loaded, its weights can be in memory twice."""


def worker_needs(memory: Memory, on_gpu: bool, slots: int, positions: int | None) -> WorkerNeeds:
    """The needs of a worker that holds `slots` sequences of this length; None: of full length."""
    kv = memory.kv_bytes(slots, positions)
    device = memory.weights + memory.activations + kv
    # The weights pass through the host's memory on their way to a GPU.
    request = memory.weights + GPU_HOST_BYTES if on_gpu else device + HOST_BYTES
    return WorkerNeeds(
        slot_bytes=memory.slot_positions(positions) * memory.kv_per_position,
        kv_bytes=kv,
        device_bytes=device,
        request_bytes=request,
        limit_bytes=request + memory.weights,
    )
