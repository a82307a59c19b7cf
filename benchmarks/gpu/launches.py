"""Records the kernels that a step launches, without a GPU: Triton's with their compiled resources, and torch's.

The engine's code runs on torch's meta device. A Triton driver compiles kernels for sm_90 instead of launching them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernels import Compiled, Compiler, batch_of
from specpool.engine.cache.spans import Span
from specpool.engine.passes.drafts import Draft, DraftRound
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.gemm import Gemm, GemmBackend, cublas_rows_of
from specpool.engine.passes.gpu.graphs import Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.sampling.head import Head

ARCH = 90
# A shape runs eagerly the first time and is captured the second time.
WARM_UPS = 2
# Rows from which the engine chose cuBLAS on an H200, by outputs and inputs of the weight: Qwen3-8B and Qwen3-0.6B.
CUBLAS_ROWS = {
    (151_936, 4096): 128, (24_576, 4096): 128, (4096, 12_288): 128, (6144, 4096): 320, (4096, 4096): 320,
    (151_936, 1024): 40,
}  # fmt: skip
# Operations of torch that launch nothing, and those that launch several kernels.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view"}
SEVERAL_KERNELS = {"logsumexp": 9}
# Operations that read only as many rows of their first tensor as they return.
GATHERING = {"embedding", "index"}
# Numbers that a program of torch's kernels handles.
TORCH_PROGRAM = 1024
STEP = re.compile(r"(?P<draft>draft)?(?P<sequences>[1-9]\d*)(x(?P<tokens>[1-9]\d*))?")


@dataclass(frozen=True)
class Step:
    """A step of the target, or a draft loop."""

    name: str
    sequences: int
    tokens: int
    """New tokens of each sequence; of a draft loop, draft tokens."""
    drafts: bool

    @property
    def new_tokens(self) -> int:
        """New tokens of each sequence in one pass."""
        return 1 if self.drafts else self.tokens


def step_of(name: str) -> Step:
    """The step of a name: "8", "8x5", or "draft8x4". ValueError: not a name."""
    if (match := STEP.fullmatch(name)) is None:
        raise ValueError(f"{name!r} is not a step such as 8, 8x5 or draft8x4")
    return Step(name, int(match["sequences"]), int(match["tokens"] or 1), match["draft"] is not None)


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel."""

    name: str
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]
    kernel: Compiled | None = None
    """None: a kernel of torch, whose resources are unknown."""
    warps: int = 0
    is_dependent: bool = False
    """Whether it may start before the kernel before it has finished (programmatic dependent launch)."""
    stages: int = 0
    """Stages of the pipelined loop."""

    @property
    def programs(self) -> int:
        """Programs of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, each once. Kernels get placeholders for tensors that they do not read."""
        found = [each for each in tree_leaves(dict(self.arguments)) if isinstance(each, torch.Tensor)]
        return list({id(tensor): tensor for tensor in found}.values())


@dataclass
class Recorder(Compiler):
    """A compiler that keeps the launches."""

    arch: int = ARCH
    launches: list[Launch] = field(default_factory=list)

    def _launcher(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, kernel: Compiled, *others: Any) -> None:
            arguments = dict(zip(source.fn.arg_names, others[4:], strict=True))  # after metadata and hooks
            name, dependent = metadata.name.strip("_"), bool(metadata.launch_pdl)
            resources = (kernel, metadata.num_warps, dependent, metadata.num_stages)
            self.launches.append(Launch(name, (x, y, z), arguments, *resources))

        return launch

    __hash__ = Compiler.__hash__


class TorchKernels(TorchDispatchMode):
    """Adds the kernels that torch's operations launch."""

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        outputs = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.is_meta]
        if outputs and not func.is_view and name not in ALLOCATIONS:
            launch = Launch(f"torch {name}", (1, 1, 1), {"inputs": args, "outputs": outputs})
            # A reduction has as many programs as its inputs need.
            size = max(tensor.numel() for tensor in (launch.tensors if name not in GATHERING else outputs))
            launch = replace(launch, grid=(-(-size // TORCH_PROGRAM), 1, 1))
            self._launches.extend([launch] * SEVERAL_KERNELS.get(name, 1))
        return result


def set_gemm(model: nn.Module, choice: Literal["auto"] | GemmBackend) -> None:
    """Set the GEMM backend of a model: a backend for all passes, or "auto": as chosen on an H200."""
    for module in model.modules():
        if isinstance(module, Gemm):
            shape = (module.out_features, module.in_features)
            module.cublas_rows = CUBLAS_ROWS.get(shape) if choice == "auto" else cublas_rows_of(choice)


def capture(run: Run) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands in for CUDA graphs: a replay launches the same kernels."""

    def replay() -> None:
        run()

    return replay, run()


@torch.inference_mode()
def launches_of(step: Step, model: GpuModel, cached: int, recorder: Recorder) -> list[Launch]:
    """All launches of a step after `cached` cached positions, once it is captured."""
    captured = CapturedModel(model, capture)
    batch = batch_of(model, [step.new_tokens] * step.sequences, cached)
    loop = captured.draft_loop(batch.arena, Head(model.head.out_features))
    columns = [slot * (cached + step.tokens) for slot in range(step.sequences)]

    def run() -> None:
        logits = captured.forward(batch)
        if step.drafts:
            assert loop is not None
            spans = [Span(slot, cached, [0], 1) for slot in range(step.sequences)]
            drafts = [Draft(span, None, [0] * (cached + 1), step.tokens) for span in spans]
            with suppress(NotImplementedError):  # the meta device has no memory to read the tokens from
                loop(logits[: step.sequences], [DraftRound(drafts)], columns)

    for _ in range(WARM_UPS):
        run()
    with recording(recorder) as launches:
        run()
    return launches


@contextmanager
def recording(recorder: Recorder) -> Iterator[list[Launch]]:
    """Collect the launches of a block."""
    recorder.launches = []
    with TorchKernels(recorder.launches):
        yield recorder.launches
