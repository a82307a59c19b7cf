"""CUDA graph capture and replay: one launch for a shape that recurs, instead of hundreds."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

log = logging.getLogger(__name__)

Input = TypeVar("Input")
Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], tuple[Callable[[], None], torch.Tensor]]
"""Captures work. Returns a function that replays it on the same memory, and the tensor that receives its result."""

# Ignore CUDA calls of other threads during capture, such as NCCL's watchdog.
CAPTURE_MODE = "thread_local"
MAX_GRAPHS = 64
"""Graphs take memory: beyond this number, the least recently used one is dropped."""


@dataclass(frozen=True)
class CapturedGraph(Generic[Input]):
    """Captured work. Write new numbers to `input`, then replay."""

    input: Input
    replay: Callable[[], None]
    result: torch.Tensor


class CapturedGraphs(Generic[Input]):
    """Up to MAX_GRAPHS captured graphs, by shape."""

    def __init__(self, capture: Capture | None, required: bool = False) -> None:
        """`capture`: None disables capture. `required`: raise if capture fails, instead of running eagerly. The ranks
        of a sharded model need this: all of them capture a collective, or none does."""
        self.capture, self._required = capture, required
        self._seen: set[Hashable] = set()
        self._graphs: OrderedDict[Hashable, CapturedGraph[Input]] = OrderedDict()

    def find(self, shape: Hashable, prepare: Callable[[], tuple[Input, Run]]) -> CapturedGraph[Input] | None:
        """Return the graph of a shape, capturing it the second time the shape occurs. None: run eagerly.

        The first, eager run compiles the kernels. `prepare` returns the input and the work on it. RuntimeError:
        capture is required and failed.
        """
        if self.capture is None:
            return None
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
            return self._graphs[shape]
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        graph_input, run = prepare()
        try:
            graph = CapturedGraph(graph_input, *self.capture(run))
        except RuntimeError as error:
            if self._required:
                raise RuntimeError(f"CUDA graph capture failed; cuda_graphs=false disables it: {error}") from error
            log.warning("CUDA graph capture failed (%s); running eagerly", error)
            self.capture = None
            return None
        self._graphs[shape] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()


class CudaGraphs:
    """Captures CUDA graphs. They share a memory pool because no two run at the same time."""

    def __init__(self) -> None:
        # A stream and pool per engine: cuBLAS workspaces belong to a stream, and engines drop their graphs at any time.
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        # A graph that is never dropped keeps the pool alive.
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._keeper, pool=self._pool, stream=self._stream, capture_error_mode=CAPTURE_MODE):
            self._pooled = torch.zeros(1, device="cuda")

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture work. RuntimeError if a graph cannot hold it."""
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=CAPTURE_MODE):
                result = run()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a failed capture does not restore it
            raise
        return graph.replay, result
