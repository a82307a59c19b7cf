"""Recorded work: for a shape that recurs, the hundreds of launches of a pass become one."""

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
"""Records work. Returns a function that repeats it on the same memory, and the tensor where its result then is."""

# What other threads do meanwhile, such as the one that watches NCCL, is none of a graph's business.
OWN_THREAD = "thread_local"
MOST_RECORDINGS = 64
"""With more, the least recently used ones are dropped: they take memory."""


@dataclass(frozen=True)
class CapturedGraph(Generic[Input]):
    """Recorded work, to be repeated with other numbers in `input`."""

    input: Input
    replay: Callable[[], None]
    result: torch.Tensor


class CapturedGraphs(Generic[Input]):
    """CapturedGraphs by shape, of which there are never more than MOST_RECORDINGS."""

    def __init__(self, capture: Capture | None, needed: bool = False) -> None:
        """`capture`: None if nothing is to be captured. `needed`: what cannot be captured is an error, since the other
        ranks of a divided model capture it: a collective is captured by all of them or by none."""
        self.capture, self._needed = capture, needed
        self._seen: set[Hashable] = set()
        self._kept: OrderedDict[Hashable, CapturedGraph[Input]] = OrderedDict()

    def find(self, shape: Hashable, prepare: Callable[[], tuple[Input, Run]]) -> CapturedGraph[Input] | None:
        """The graph of a shape; None the first time, when its kernels are compiled, and if there can be none.

        `prepare`: makes the input and the work on it. RuntimeError: a graph is needed and cannot be made.
        """
        if self.capture is None:
            return None
        if shape in self._kept:
            self._kept.move_to_end(shape)
            return self._kept[shape]
        if shape not in self._seen:
            self._seen.add(shape)
            return None
        own, run = prepare()
        try:
            graph = CapturedGraph(own, *self.capture(run))
        except RuntimeError as error:
            if self._needed:
                raise RuntimeError(f"passes cannot be captured; cuda_graphs=false launches them: {error}") from error
            # Not fatal: launched passes are only slower.
            log.warning("passes cannot be captured, and are launched: %s", error)
            self.capture = None
            return None
        self._kept[shape] = graph
        if len(self._kept) > MOST_RECORDINGS:
            self._kept.popitem(last=False)
        return graph

    def clear(self) -> None:
        """Drops all recordings."""
        self._kept.clear()


class CudaGraphs:
    """Records CUDA graphs. They share their memory, because no two run at the same time."""

    def __init__(self) -> None:
        # Not shared: cuBLAS's workspaces belong to a stream, and another engine may drop its graphs at any time.
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        # The pool lives only as long as some graph uses it.
        self._keeper = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._keeper, pool=self._pool, stream=self._stream, capture_error_mode=OWN_THREAD):
            self._kept = torch.zeros(1, device="cuda")

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """Records work. RuntimeError if it does something that a graph cannot hold."""
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=OWN_THREAD):
                result = run()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a failed capture does not restore it
            raise
        return graph.replay, result
