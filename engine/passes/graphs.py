"""Recorded passes: for a batch shape that recurs, the hundreds of launches of a pass become one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.passes.forward_pass import ForwardPass
from engine.passes.packing import PackedBatch

log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
Record = Callable[[Run], tuple[Callable[[], None], torch.Tensor]]
"""Records a pass. Returns a function that repeats it on the same memory, and the tensor where its logits then are."""

# Passes of more rows spend their time in products, and every recording takes memory.
MOST_ROWS, MOST_RECORDINGS = 128, 64


@dataclass(frozen=True)
class Recording:
    """A recorded pass, to be repeated with other numbers in `batch`."""

    batch: PackedBatch
    replay: Callable[[], None]
    logits: torch.Tensor


class RecordedModel(ForwardPass):
    """Records the passes of a model in which passes of one shape differ only in the numbers of their batches."""

    plans_attention = False
    row_multiple = 8

    def __init__(self, model: ForwardPass, record: Record) -> None:
        super().__init__()
        self.model, self.compute_dtype = model, model.compute_dtype
        self._record: Record | None = record
        self._seen: set[tuple[int, ...]] = set()
        self._recordings: dict[tuple[int, ...], Recording] = {}

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the rows that the batch asks for, padding included."""
        recording = self._recordings.get(batch.shape) or self._recording(batch)
        if recording is None:
            return self._launch(batch)
        recording.batch.numbers.copy_(batch.numbers, non_blocking=True)
        recording.replay()
        return recording.logits.clone()  # the next pass of this shape overwrites them

    def scratch_bytes(self, rows: int, longest: int) -> int:
        """Scratch bytes of the recorded model."""
        return self.model.scratch_bytes(rows, longest)

    @contextmanager
    def launched(self) -> Iterator[None]:
        """A context in which no pass is recorded, so that what watches its operations is not recorded with them."""
        record, self._record = self._record, None
        try:
            yield
        finally:
            self._record = record

    def _launch(self, batch: PackedBatch) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch)
        return logits

    def _recording(self, batch: PackedBatch) -> Recording | None:
        """The recording of a shape, made when it is seen again: the first pass of a shape compiles and allocates."""
        if self._record is None or batch.rows > MOST_ROWS or len(self._recordings) == MOST_RECORDINGS:
            return None
        if batch.shape not in self._seen:
            self._seen.add(batch.shape)
            return None
        own = replace(batch, numbers=batch.numbers.clone())
        try:
            replay, logits = self._record(lambda: self._launch(own))
        except RuntimeError as error:  # not fatal: launched passes are only slower
            log.warning("passes cannot be recorded, and are launched: %s", error)
            self._record = None
            return None
        recording = self._recordings[batch.shape] = Recording(own, replay, logits)
        return recording


class CudaGraphs:
    """Records CUDA graphs. They share their memory, because no two run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """Records one pass. RuntimeError if the pass does something that a graph cannot hold."""
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                logits = run()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # a failed capture does not restore it
            raise
        return graph.replay, logits
