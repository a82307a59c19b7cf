"""A GPU model whose passes are captured as CUDA graphs at start, and replayed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.passes.gpu.graphs import Capture, CapturedGraphs, Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.gpu.states import StateMemory
from specpool.engine.passes.packing import PackedBatch, Shape
from specpool.engine.sampling.head import Head

MAX_CAPTURED_ROWS = 512
"""Larger passes run eagerly: GEMM dominates their time."""
ROWS_PER_TILE = (4, 1)
"""Each size is captured with few tiles of attention, for drafts and prompts, and with a tile per row."""


class CapturedModel(ForwardPass):
    """Replays passes that fit into a captured shape. Such passes differ only in the numbers and states of a batch.

    The same graphs serve any choice of layers whose hidden states a batch needs. Feature drafts record none.
    """

    plans_attention = False
    captured_rows = MAX_CAPTURED_ROWS

    def __init__(self, model: GpuModel, capture: Capture) -> None:
        super().__init__()
        self.model, self.compute_dtype, self.rows_per_tile = model, model.compute_dtype, model.rows_per_tile
        self.state_size, self.attention_kinds = model.state_size, model.attention_kinds
        self.capture = capture
        """The capture function of the device."""
        self._graphs: CapturedGraphs[Shape, PackedBatch] = CapturedGraphs(capture, model.group.any_rank)
        model.group.on_leave(self._graphs.clear)
        self._draft_loop: GpuDraftLoop | None = None
        self._logits: torch.Tensor | None = None
        """Memory for logits that all graphs share."""
        self._draft_states: tuple[torch.Tensor, torch.Tensor] | None = None
        """Memory for the input and own states of a feature draft that all graphs share."""
        self._states: StateMemory | None = None
        """Memory for the hidden states that graphs record; None if the model is a feature draft."""

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows, possibly followed by padding."""
        graph = self._graphs.find(batch.shape)
        if graph is None or not _fits(batch, graph.input):
            logits: torch.Tensor = self.model(batch)
            return logits
        captured = graph.input
        captured.numbers.copy_(batch.numbers, non_blocking=True)
        _copy(batch.input_states, captured.input_states)
        if self._states is not None and batch.state_layers:
            self._states.choose(batch.state_layers)
        graph.replay()
        _copy(captured.own_states, batch.own_states)
        if captured.states is not None:
            _copy(captured.states[:, : len(batch.state_layers)], batch.states)
        return graph.result[: batch.num_logits].clone()  # the next pass overwrites it

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Project states of the target [n, width] to those that the pass reads [n, state_size]."""
        return self.model.project(states)

    def padded_shape(self, needed: Shape) -> Shape:
        """The smallest captured shape of this number of rows that fits; otherwise that of the model."""
        rows = self.model.padded_rows(needed.rows)
        fitting = (shape for shape in self._shapes(rows) if needed.tiles <= shape.tiles and self._graphs.find(shape))
        return next(fitting, self.model.padded_shape(needed))

    def capture_graphs(self, arena: KVArena, sizes: Sequence[int], max_length: int, max_drafts: int) -> int:
        """Capture passes of these sizes, largest first, then the steps of drafts."""
        shapes = [shape for rows in sorted(sizes, reverse=True) for shape in reversed(self._shapes(rows))]
        length_of = self.model.captured_length

        def prepare(shape: Shape) -> tuple[PackedBatch, Run]:
            batch = self._padding(arena, shape, length_of(shape, max_length))
            return batch, lambda: self._run(batch)

        self._graphs.capture_all(shapes, prepare)
        self.notes += self._graphs.notes
        self.model.compile_projection(sizes)
        loop = self._draft_loop
        if loop is not None and len(self._graphs):
            counts = {self.model.padded_rows(count) for count in range(1, min(max_drafts, MAX_CAPTURED_ROWS) + 1)}
            rows_of = sorted(counts, reverse=True)
            loop.capture_graphs({rows: length_of(Shape(rows, rows, rows), max_length) for rows in rows_of})
            self.notes += loop.graphs.notes
        return self.num_graphs

    @property
    def num_graphs(self) -> int:
        """Captured graphs, those of the draft loop included."""
        return len(self._graphs) + (0 if self._draft_loop is None else len(self._draft_loop.graphs))

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Scratch bytes of the captured model, and of the memory for states."""
        states = 0 if self.state_size else StateMemory.num_bytes(min(rows, MAX_CAPTURED_ROWS), self.model.hidden_size)
        return self.model.scratch_bytes(rows, length) + states

    def draft_loop(self, arena: KVArena, head: Head) -> GpuDraftLoop | None:
        """The draft loop, whose steps `capture_graphs` captures; None if the model has none."""
        self._draft_loop = self.model.draft_loop(arena, head, self.capture)
        return self._draft_loop

    @property
    def supports_branches(self) -> bool:
        """Whether spans may be branches of their sequences."""
        return self.model.supports_branches

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run passes and drafts eagerly within this context, so probes see every operation."""
        graphs: list[CapturedGraphs[Any, Any]] = [self._graphs]
        if self._draft_loop is not None:
            graphs.append(self._draft_loop.graphs)
        for each in graphs:
            each.enabled = False
        try:
            yield
        finally:
            for each in graphs:
                each.enabled = True

    def _shapes(self, rows: int) -> list[Shape]:
        """The shapes to capture for a size, smallest first. Every segment has a tile or more."""
        counts = [-(-rows // per_tile) for per_tile in ROWS_PER_TILE]
        return [Shape(rows, tiles, rows, min(tiles, self.model.max_segments)) for tiles in counts]

    def _padding(self, arena: KVArena, shape: Shape, max_length: int) -> PackedBatch:
        """A padding batch as the input of a graph, with the shared memory for states to read or to record."""
        batch, device = PackedBatch.of_padding(arena, shape, max_length), arena.device
        if not self.state_size:
            if self._states is None:
                layers = len(self.model.layers)
                self._states = StateMemory(MAX_CAPTURED_ROWS, self.model.hidden_size, layers, device)
            return replace(batch, states=self._states.states[: shape.rows], state_slots=self._states.slots)
        if self._draft_states is None:
            memory = torch.zeros(2, MAX_CAPTURED_ROWS, self.state_size, dtype=self.compute_dtype, device=device)
            self._draft_states = memory[0], memory[1]
        inputs, own = self._draft_states
        return replace(batch, input_states=inputs[: shape.rows], own_states=own[: shape.logits])

    def _run(self, batch: PackedBatch) -> torch.Tensor:
        """A pass whose logits are in the shared memory. The first, eager pass has the most rows."""
        logits: torch.Tensor = self.model(batch)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)


def _fits(batch: PackedBatch, captured: PackedBatch) -> bool:
    """Whether a graph with this input serves the length and the state layers of a batch of its shape."""
    slots = 0 if captured.states is None else captured.states.shape[1]
    return batch.max_length <= captured.max_length and len(batch.state_layers) <= slots


def _copy(source: torch.Tensor | None, target: torch.Tensor | None) -> None:
    """Copy states; do nothing if either side has none."""
    if source is not None and target is not None:
        target.copy_(source)
