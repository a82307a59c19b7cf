"""A model whose passes are captured by their shape, and repeated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.gpu.attention import splits_for
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.passes.gpu.graphs import Capture, CapturedGraphs, Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.packing import PackedBatch

MOST_ROWS = 512
"""Passes of more rows are launched: they spend their time in products."""


class CapturedModel(ForwardPass):
    """Records the passes of a model in which passes of one shape differ only in the numbers of their batches."""

    plans_attention = False

    def __init__(self, model: GpuModel, capture: Capture) -> None:
        super().__init__()
        self.model, self.compute_dtype, self.rows_per_tile = model, model.compute_dtype, model.rows_per_tile
        divided = model.group.ranks > 1
        self._graphs: CapturedGraphs[PackedBatch] = CapturedGraphs(capture, needed=divided)
        model.group.on_leave(self._graphs.clear)
        self._logits: torch.Tensor | None = None
        """Where all recordings leave their logits, so that only one of them takes memory for that."""

    @property
    def capture(self) -> Capture | None:
        """How work is captured on this device; None if nothing is."""
        return self._graphs.capture

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the rows that the batch asks for, padding included."""
        graph = None
        if batch.rows <= MOST_ROWS:
            shape = batch.rows, batch.tiles, len(batch.logit_rows), splits_for(batch.longest)
            graph = self._graphs.find(shape, lambda: self._prepared(batch))
        if graph is None:
            return self._launched(batch)
        graph.input.numbers.copy_(batch.numbers, non_blocking=True)
        graph.replay()
        return graph.result.clone()  # the next pass overwrites them

    def padded_rows(self, count: int) -> int:
        """Padded rows of the captured model."""
        return self.model.padded_rows(count)

    def scratch_bytes(self, rows: int, longest: int) -> int:
        """Scratch bytes of the captured model."""
        return self.model.scratch_bytes(rows, longest)

    def draft_loop(self, arena: KVArena, token_ids: Callable[[torch.Tensor], torch.Tensor]) -> GpuDraftLoop | None:
        """Draft steps that are captured; None if the model is divided."""
        return self.model.draft_loop(arena, token_ids, self.capture)

    @contextmanager
    def launched(self) -> Iterator[None]:
        """A context in which no pass is captured, so that what watches its operations is not captured with them."""
        capture, self._graphs.capture = self._graphs.capture, None
        try:
            yield
        finally:
            self._graphs.capture = capture

    def _launched(self, batch: PackedBatch) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch)
        if self._logits is None:
            self._logits = logits.new_empty(MOST_ROWS, logits.shape[1])
        return logits

    def _prepared(self, batch: PackedBatch) -> tuple[PackedBatch, Run]:
        own, kept = replace(batch, numbers=batch.numbers.clone()), self._logits
        assert kept is not None

        def run() -> torch.Tensor:
            logits = self._launched(own)
            return kept[: len(logits)].copy_(logits)

        return own, run
