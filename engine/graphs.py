"""Passes of a shape that comes again, recorded: the hundreds of launches of a pass become one."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from engine.packing import PackedBatch

log = logging.getLogger(__name__)

Run = Callable[[], torch.Tensor]
Record = Callable[[Run], tuple[Callable[[], None], torch.Tensor]]
"""From a pass to what repeats it, reading and writing the same memory, and where its logits then are."""


@dataclass(frozen=True)
class Recording:
    """A pass that can be repeated with other numbers in `batch`."""

    batch: PackedBatch
    replay: Callable[[], None]
    logits: torch.Tensor


class RecordedModel(nn.Module):
    """A model whose passes differ in the numbers of their batches alone, as far as their shapes are the same."""

    plans_attention = False

    def __init__(self, model: nn.Module, record: Record) -> None:
        super().__init__()
        self.model = model
        self._record = record
        self._seen: set[tuple[int, ...]] = set()
        self._recordings: dict[tuple[int, ...], Recording | None] = {}

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, vocab_size] of the rows that the batch asks for, padding included."""
        if batch.shape not in self._seen:  # the first pass of a shape compiles and allocates what the others need
            self._seen.add(batch.shape)
            return self._launch(batch)
        if batch.shape not in self._recordings:
            self._recordings[batch.shape] = self._recording(batch)
        recording = self._recordings[batch.shape]
        if recording is None:
            return self._launch(batch)
        recording.batch.numbers.copy_(batch.numbers, non_blocking=True)
        recording.replay()
        return recording.logits.clone()  # the next pass of this shape overwrites them

    def _launch(self, batch: PackedBatch) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch)
        return logits

    def _recording(self, batch: PackedBatch) -> Recording | None:
        own = batch.with_numbers(batch.numbers.clone())
        try:
            replay, logits = self._record(lambda: self._launch(own))
        except RuntimeError as error:  # a graph is only faster
            log.warning("passes of shape %s cannot be recorded: %s", batch.shape, error)
            return None
        return Recording(own, replay, logits)


class CudaGraphs:
    """Records CUDA graphs; all share their memory, because no two run at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> tuple[Callable[[], None], torch.Tensor]:
        """RuntimeError if the pass does what a graph cannot hold."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()
        return graph.replay, logits
