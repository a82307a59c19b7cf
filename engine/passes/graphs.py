"""Passes of a shape that comes again, recorded: the hundreds of launches of a pass become one."""

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
"""From a pass to what repeats it, reading and writing the same memory, and where its logits then are."""


# Passes of more rows spend their time in products, and every recording takes memory.
MOST_ROWS, MOST_RECORDINGS = 128, 64


@dataclass(frozen=True)
class Recording:
    """A pass that can be repeated with other numbers in `batch`."""

    batch: PackedBatch
    replay: Callable[[], None]
    logits: torch.Tensor


class RecordedModel(ForwardPass):
    """A model whose passes differ in the numbers of their batches alone, as far as their shapes are the same."""

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
        """The scratch memory of the model that is recorded."""
        return self.model.scratch_bytes(rows, longest)

    @contextmanager
    def launched(self) -> Iterator[None]:
        """Records no pass meanwhile: what watches its operations is not to be recorded with them."""
        record, self._record = self._record, None
        try:
            yield
        finally:
            self._record = record

    def _launch(self, batch: PackedBatch) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch)
        return logits

    def _recording(self, batch: PackedBatch) -> Recording | None:
        """The recording of a shape that is seen for the second time: the first pass compiles and allocates for it."""
        if self._record is None or batch.rows > MOST_ROWS or len(self._recordings) == MOST_RECORDINGS:
            return None
        if batch.shape not in self._seen:
            self._seen.add(batch.shape)
            return None
        own = replace(batch, numbers=batch.numbers.clone())
        try:
            replay, logits = self._record(lambda: self._launch(own))
        except RuntimeError as error:  # recorded passes are only faster
            log.warning("passes cannot be recorded, and are launched: %s", error)
            self._record = None
            return None
        recording = self._recordings[batch.shape] = Recording(own, replay, logits)
        return recording


class CudaGraphs:
    """Records CUDA graphs; all share their memory, because no two run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """RuntimeError if the pass does what a graph cannot hold."""
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                logits = run()
        except RuntimeError:
            torch.cuda.set_stream(stream)  # where a capture that breaks off does not return to
            raise
        return graph.replay, logits
