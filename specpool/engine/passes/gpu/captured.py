"""A GPU model whose passes are captured as CUDA graphs, and replayed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.gpu.attention import num_splits
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.passes.gpu.graphs import Capture, CapturedGraphs, Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sampling.head import Head

MAX_CAPTURED_ROWS = 512
"""Larger passes run eagerly: GEMM dominates their time."""


class CapturedModel(ForwardPass):
    """Captures the passes of a model by shape. Passes of one shape differ only in `PackedBatch.numbers`."""

    plans_attention = False

    def __init__(self, model: GpuModel, capture: Capture) -> None:
        super().__init__()
        self.model, self.compute_dtype, self.rows_per_tile = model, model.compute_dtype, model.rows_per_tile
        self._graphs: CapturedGraphs[PackedBatch] = CapturedGraphs(capture, required=model.group.ranks > 1)
        model.group.on_leave(self._graphs.clear)
        self._logits: torch.Tensor | None = None
        """Memory for logits that all graphs share."""

    @property
    def capture(self) -> Capture | None:
        """The capture function of the device; None if passes run eagerly."""
        return self._graphs.capture

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows, padding included."""
        graph = None
        if batch.rows <= MAX_CAPTURED_ROWS:
            shape = batch.rows, batch.tiles, len(batch.logit_rows), num_splits(batch.max_length)
            graph = self._graphs.find(shape, lambda: self._prepare(batch))
        if graph is None:
            return self._run_eagerly(batch)
        graph.input.numbers.copy_(batch.numbers, non_blocking=True)
        graph.replay()
        return graph.result.clone()  # the next pass overwrites it

    def padded_rows(self, count: int) -> int:
        """Padded rows of the captured model."""
        return self.model.padded_rows(count)

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Scratch bytes of the captured model."""
        return self.model.scratch_bytes(rows, length)

    def draft_loop(self, arena: KVArena, head: Head) -> GpuDraftLoop | None:
        """The draft loop with captured steps; None if the model is sharded."""
        return self.model.draft_loop(arena, head, self.capture)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run passes eagerly within this context, so probes see every operation."""
        capture, self._graphs.capture = self._graphs.capture, None
        try:
            yield
        finally:
            self._graphs.capture = capture

    def _run_eagerly(self, batch: PackedBatch) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch)
        if self._logits is None:
            self._logits = logits.new_empty(MAX_CAPTURED_ROWS, logits.shape[1])
        return logits

    def _prepare(self, batch: PackedBatch) -> tuple[PackedBatch, Run]:
        own, shared = replace(batch, numbers=batch.numbers.clone()), self._logits
        assert shared is not None

        def run() -> torch.Tensor:
            logits = self._run_eagerly(own)
            return shared[: len(logits)].copy_(logits)

        return own, run
