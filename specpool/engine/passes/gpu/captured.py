"""A GPU model whose passes are captured as CUDA graphs at start, and replayed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.passes.gpu.graphs import Capture, CapturedGraph, CapturedGraphs, Run
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.passes.packing import PackedBatch, Shape
from specpool.engine.sampling.head import Head

MAX_CAPTURED_ROWS = 512
"""Larger passes run eagerly: GEMM dominates their time."""
ROWS_PER_TILE = (4, 1)
"""Each size is captured with few tiles of attention, for drafts and prompts, and with a tile per row."""


StateKey = tuple[Shape, tuple[int, ...]]
"""A shape, and the numbers of layers after which to record the hidden states."""


class CapturedModel(ForwardPass):
    """Replays passes that fit into a captured shape. Such passes differ only in the numbers and states of a batch.

    A pass that records hidden states is captured when one of its shape first occurs, for the first choice of layers
    only: passes with other layers run eagerly. `capture_states` captures such passes at start, if the layers are known.
    """

    plans_attention = False
    captured_rows = MAX_CAPTURED_ROWS

    def __init__(self, model: GpuModel, capture: Capture) -> None:
        super().__init__()
        self.model, self.compute_dtype, self.rows_per_tile = model, model.compute_dtype, model.rows_per_tile
        self.state_size = model.state_size
        self.capture = capture
        """The capture function of the device."""
        self._graphs: CapturedGraphs[Shape, PackedBatch] = CapturedGraphs(capture, model.group.any_rank)
        self._state_graphs: CapturedGraphs[StateKey, PackedBatch] = CapturedGraphs(capture, model.group.any_rank)
        """Graphs that record hidden states."""
        self._tried: set[StateKey] = set()
        """Keys of `_state_graphs` whose capture succeeded or failed."""
        model.group.on_leave(self._clear_graphs)
        self._draft_loop: GpuDraftLoop | None = None
        self._logits: torch.Tensor | None = None
        """Memory for logits that all graphs share."""
        self._draft_states: tuple[torch.Tensor, torch.Tensor] | None = None
        """Memory for the input and own states of a feature draft that all graphs share."""
        self._states: dict[tuple[int, ...], torch.Tensor] = {}
        """Memory for hidden states that all graphs share, by layers."""

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows, possibly followed by padding."""
        graph = self._graphs.find(batch.shape)
        if graph is not None and batch.states is not None:
            graph = self._find_with_states(batch, batch.states, graph.input)
        if graph is None or batch.max_length > graph.input.max_length:
            logits: torch.Tensor = self.model(batch)
            return logits
        captured = graph.input
        captured.numbers.copy_(batch.numbers, non_blocking=True)
        _copy(batch.input_states, captured.input_states)
        graph.replay()
        _copy(captured.own_states, batch.own_states)
        _copy(captured.states, batch.states)
        return graph.result[: batch.num_logits].clone()  # the next pass overwrites it

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Project states of the target [n, width] to those that the pass reads [n, state_size]."""
        return self.model.project(states)

    def padded_shape(self, needed: Shape) -> Shape:
        """The smallest captured shape of this number of rows that fits; otherwise that of the model."""
        rows = self.model.padded_rows(needed.rows)
        fitting = (shape for shape in _shapes(rows) if needed.tiles <= shape.tiles and self._graphs.find(shape))
        return next(fitting, self.model.padded_shape(needed))

    def capture_graphs(self, arena: KVArena, sizes: Sequence[int], max_length: int, max_sequences: int) -> int:
        """Capture passes of these sizes, largest first, then the steps of drafts."""
        shapes = [shape for rows in sorted(sizes, reverse=True) for shape in reversed(_shapes(rows))]
        length_of = self.model.captured_length

        def prepare(shape: Shape) -> tuple[PackedBatch, Run]:
            batch = self._padding(arena, shape, length_of(shape, max_length))
            return batch, lambda: self._run(batch)

        self._graphs.capture_all(shapes, prepare)
        self.notes += self._graphs.notes
        loop = self._draft_loop
        if loop is not None and len(self._graphs):
            counts = {self.model.padded_rows(count) for count in range(1, min(max_sequences, MAX_CAPTURED_ROWS) + 1)}
            rows_of = sorted(counts, reverse=True)
            loop.capture_graphs({rows: length_of(Shape(rows, rows, rows), max_length) for rows in rows_of})
            self.notes += loop.graphs.notes
        return self.num_graphs

    def capture_states(self, layers: tuple[int, ...], hidden_size: int) -> int:
        """Capture the passes that record the states after these layers."""
        for batch in self._graphs.inputs():
            states = torch.empty(
                batch.rows, len(layers), hidden_size, dtype=torch.bfloat16, device=batch.numbers.device
            )
            self._find_with_states(replace(batch, state_layers=layers, states=states), states, batch)
        self.notes += self._state_graphs.notes
        return len(self._state_graphs)

    @property
    def num_graphs(self) -> int:
        """Captured graphs, those of the draft loop included."""
        return len(self._graphs) + (0 if self._draft_loop is None else len(self._draft_loop.graphs))

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Scratch bytes of the captured model."""
        return self.model.scratch_bytes(rows, length)

    def draft_loop(self, arena: KVArena, head: Head) -> GpuDraftLoop | None:
        """The draft loop, whose steps `capture_graphs` captures; None if the model is sharded."""
        self._draft_loop = self.model.draft_loop(arena, head, self.capture)
        return self._draft_loop

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run passes and drafts eagerly within this context, so probes see every operation."""
        graphs: list[CapturedGraphs[Any, Any]] = [self._graphs, self._state_graphs]
        if self._draft_loop is not None:
            graphs.append(self._draft_loop.graphs)
        for each in graphs:
            each.enabled = False
        try:
            yield
        finally:
            for each in graphs:
                each.enabled = True

    def _find_with_states(
        self, batch: PackedBatch, states: torch.Tensor, stateless: PackedBatch
    ) -> CapturedGraph[PackedBatch] | None:
        """The graph of a batch with states, captured now if need be. `stateless`: input of the graph without states."""
        key = batch.shape, batch.state_layers
        if key not in self._tried:
            if batch.state_layers not in self._states:
                if self._states:
                    return None
                self._states[batch.state_layers] = states.new_empty(MAX_CAPTURED_ROWS, *states.shape[1:])
            self._tried.add(key)
            memory = self._states[batch.state_layers][: batch.rows]
            own = self._padding(batch.arena, batch.shape, stateless.max_length)
            own = replace(own, state_layers=batch.state_layers, states=memory)
            self._state_graphs.capture_all([key], lambda _: (own, lambda: self._run(own)))
        return self._state_graphs.find(key)

    def _padding(self, arena: KVArena, shape: Shape, max_length: int) -> PackedBatch:
        """A padding batch as the input of a graph, with the shared memory for states if the model reads them."""
        batch = PackedBatch.of_padding(arena, shape, max_length)
        if not self.state_size:
            return batch
        if self._draft_states is None:
            memory = torch.zeros(
                2, MAX_CAPTURED_ROWS, self.state_size, dtype=self.compute_dtype, device=batch.numbers.device
            )
            self._draft_states = memory[0], memory[1]
        inputs, own = self._draft_states
        return replace(batch, input_states=inputs[: shape.rows], own_states=own[: shape.logits])

    def _clear_graphs(self) -> None:
        self._graphs.clear()
        self._state_graphs.clear()

    def _run(self, batch: PackedBatch) -> torch.Tensor:
        """A pass whose logits are in the shared memory. The first, eager pass has the most rows."""
        logits: torch.Tensor = self.model(batch)
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        return self._logits[: len(logits)].copy_(logits)


def _copy(source: torch.Tensor | None, target: torch.Tensor | None) -> None:
    """Copy states; do nothing if either side has none."""
    if source is not None and target is not None:
        target.copy_(source)


def _shapes(rows: int) -> list[Shape]:
    """The shapes to capture for a size, smallest first."""
    return [Shape(rows, -(-rows // per_tile), rows) for per_tile in ROWS_PER_TILE]
