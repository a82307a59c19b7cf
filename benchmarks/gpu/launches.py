"""Records the kernels that the engine launches on torch's meta device, without a GPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernels import Compiled, Compiler

# Operations of torch that launch nothing, or only at start, and those that read only as many rows as they return.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "zeros", "lift_fresh", "_unsafe_view"}
GATHERING = {"embedding", "index"}
# Grids of torch's kernels are unknown. Assume that they occupy all SMs.
EVEN = (132, 1, 1)
MAX_VERIFIED = 64
"""New tokens of a sequence up to which a pass is a verification whose drafts were all accepted the last time."""


@dataclass(frozen=True)
class Work:
    """The sequences of a pass."""

    sequences: int
    tokens: int  # new tokens of each sequence
    cached: int  # cached positions of each sequence

    @property
    def scanned(self) -> int:
        """Rows of each sequence in a recurrent layer. A verification replays the drafts that the last one accepted."""
        return self.tokens + (self.tokens - 1 if self.tokens <= MAX_VERIFIED else 0)


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel."""

    name: str
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    work: Work
    kernel: Compiled | None = None  # None: a kernel of torch, whose resources are unknown
    warps: int = 0
    is_dependent: bool = False  # it may start before the previous kernel has finished
    stages: int = 0


@dataclass
class Recorder(Compiler):
    """A compiler for sm_90 that records launches."""

    arch: int = 90
    work: Work = Work(1, 1, 0)
    """Set it before each pass."""
    launches: list[Launch] = field(default_factory=list)

    __hash__ = Compiler.__hash__

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, kernel: Compiled, *others: Any) -> None:
            arguments = dict(zip(source.fn.arg_names, others[4:], strict=True))  # after metadata and hooks
            name, dependent = metadata.name.strip("_"), bool(metadata.launch_pdl)
            resources = (kernel, metadata.num_warps, dependent, metadata.num_stages)
            self.launches.append(Launch(name, (x, y, z), arguments, self.work, *resources))

        return launch


class TorchKernels(TorchDispatchMode):
    """Adds a launch to the recorder for each operation of torch on the meta device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        # Copies from the host count as host time.
        if outputs and all(each.is_meta for each in tensors) and not func.is_view and name not in ALLOCATIONS:
            arguments = {"inputs": args, "outputs": outputs}
            self._recorder.launches.append(Launch(f"torch {name}", EVEN, arguments, self._recorder.work))
        return result
