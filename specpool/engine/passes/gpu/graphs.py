"""CUDA graph capture and replay: a captured pass takes one launch instead of hundreds."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from specpool.engine.config.sources import first_line

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Input = TypeVar("Input")
Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], tuple[Callable[[], None], torch.Tensor]]
"""Captures work. Returns a function to replay it on the same memory, and the tensor that receives the result."""

# Ignore CUDA calls of other threads during capture, such as NCCL's watchdog.
CAPTURE_MODE = "thread_local"
OUT_OF_MEMORY = "out of memory"
"""Part of the messages of torch's allocator and of CUDA."""


@dataclass(frozen=True)
class CapturedGraph(Generic[Input]):
    """Captured work. Write new numbers to `input`, then replay."""

    input: Input
    replay: Callable[[], None]
    result: torch.Tensor


class CapturedGraphs(Generic[Key, Input]):
    """Graphs by shape, captured at start. A capture takes as long as several passes, too long while serving."""

    def __init__(self, capture: Capture | None, any_rank: Callable[[bool], bool] = bool) -> None:
        """`capture`: None captures nothing. `any_rank`: whether a flag is set on any rank of the model."""
        self.enabled = True
        self.notes: list[str] = []
        self._capture, self._any_rank = capture, any_rank
        self._graphs: dict[Key, CapturedGraph[Input]] = {}

    def capture_all(self, keys: Sequence[Key], prepare: Callable[[Key], tuple[Input, Run]]) -> None:
        """Capture the work of each key, largest first, so that smaller graphs reuse memory.

        `prepare` returns the input and the work on it. All ranks keep the same graphs, since they may contain
        collectives. A note tells which graphs are missing. Without memory for a graph, smaller ones may still fit;
        after any other error, capture stops.
        """
        if self._capture is None:
            return
        reason = "it failed on another rank"
        for key in keys:
            graph, error = self._try(self._capture, key, prepare)
            reason = error or reason
            if not self._any_rank(graph is None):
                assert graph is not None
                self._graphs[key] = graph
            elif self._any_rank(graph is None and OUT_OF_MEMORY not in error):
                break
        if missing := sum(key not in self._graphs for key in keys):
            note = f"CUDA graph capture failed for {missing} of {len(keys)} shapes, which run eagerly: {reason}"
            self.notes.append(f"runs slowly: {note}")

    def find(self, key: Key) -> CapturedGraph[Input] | None:
        """The graph of a shape. None: run eagerly."""
        return self._graphs.get(key) if self.enabled else None

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()

    def __len__(self) -> int:
        return len(self._graphs)

    def _try(
        self, capture: Capture, key: Key, prepare: Callable[[Key], tuple[Input, Run]]
    ) -> tuple[CapturedGraph[Input] | None, str]:
        """The graph of this key's work, or the reason why it has none."""
        try:
            graph_input, run = prepare(key)
            run()  # compiles the kernels
            return CapturedGraph(graph_input, *capture(run)), ""
        except RuntimeError as error:
            log.warning("CUDA graph capture failed (%s)", error)
            return None, first_line(error)  # the error itself would keep the tensors of its traceback


class CudaGraphs:
    """Captures CUDA graphs. They share a memory pool because no two run at the same time."""

    def __init__(self) -> None:
        # A stream and pool per engine: cuBLAS workspaces belong to a stream, and engines drop their graphs at any time.
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._keeper: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = None
        """A graph that is never dropped keeps the pool alive."""
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture work. RuntimeError if a graph cannot hold it; later captures may succeed."""
        if self._keeper is None:
            self._keeper = self._record(lambda: torch.zeros(1, device="cuda"))
        graph, result = self._record(run)
        return graph.replay, result

    def _record(self, run: Run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=CAPTURE_MODE):
                result = run()
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture does not restore it
            self._end(graph)
            if isinstance(cause := error.__context__, RuntimeError):
                raise cause from None  # the end of a broken capture hides what broke it
            raise
        return graph, result

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make the process usable after a failed capture.

        Before 2.12, torch raises at the end of a broken capture before it tells its allocators (pytorch #180395). The
        next `empty_cache` then fails an internal assertion. The allocator of pinned memory has no such assertion, but
        accepts no further capture into this pool, and still refers to the graph.
        """
        end_capture = getattr(torch._C, "_cuda_endAllocateToPool", None)  # private: other versions may lack it
        if end_capture is not None:
            try:
                end_capture(self._stream.device_index, self._pool)
            except RuntimeError:  # torch has told its allocators
                return
        self._failed.append(graph)
        self._pool, self._keeper = torch.cuda.graph_pool_handle(), None
