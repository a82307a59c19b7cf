"""Runs packed passes on the cache of one device."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Location, Span
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.attention_plan import plan_attention
from specpool.engine.passes.features import fill_states
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.packing import PackedBatch, Shape, pack


class PassRunner:
    """A forward pass and its cache."""

    def __init__(self, forward_pass: ForwardPass, arena: KVArena, tiles: Tiles, query_groups: int) -> None:
        """`tiles`: shapes that make the pass batch invariant. `query_groups`: query heads per KV head."""
        self.forward_pass, self.arena = forward_pass, arena
        self._tiles, self._query_groups = tiles, query_groups

    def run(
        self, spans: Sequence[Span], locations: Sequence[Location], own_states: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Cache the new tokens of spans that fit in one pass, and return their logits.

        `locations`: where each span's sequence lies in the arena. `own_states`: gets the states [R, hidden] of a
        feature draft for the same rows.
        """
        arena, forward_pass = self.arena, self.forward_pass
        planned = forward_pass.plans_attention
        batch = pack(spans, locations, arena, self._padded, forward_pass.rows_per_tile, repeats=planned)
        if planned:
            gather = arena.device.type != "cpu"
            plan = plan_attention(spans, locations, arena, self._tiles, self._query_groups, gather)
            batch = replace(batch, attention=plan)
        if forward_pass.state_size:
            batch = self._with_states(batch, spans)
        logits: torch.Tensor = forward_pass(batch)
        if own_states is not None and batch.own_states is not None:
            own_states.append(batch.own_states[: batch.num_logits])
        return logits[: batch.num_logits]

    def _with_states(self, batch: PackedBatch, spans: Sequence[Span]) -> PackedBatch:
        """The batch with the input of a feature draft, and memory for its own states."""
        forward_pass, device = self.forward_pass, self.arena.device
        size, dtype = forward_pass.state_size, forward_pass.compute_dtype
        states = torch.zeros(batch.rows, size, dtype=dtype, device=device)
        fill_states(states, spans, forward_pass.project)
        own_states = torch.empty(batch.shape.logits, size, dtype=dtype, device=device)
        return replace(batch, input_states=states, own_states=own_states)

    def capture_graphs(self, max_rows: int, max_length: int, max_sequences: int) -> int:
        """Capture passes of up to `max_rows` rows, before serving; see `ForwardPass.capture_graphs`."""
        counts = range(1, min(max_rows, self.forward_pass.captured_rows) + 1)
        sizes = sorted({self._padded(Shape(count, 1, 0)).rows for count in counts})
        return self.forward_pass.capture_graphs(self.arena, sizes, max_length, max_sequences)

    def _padded(self, needed: Shape) -> Shape:
        rows, logits = self._tiles.rows(needed.rows), self._tiles.rows(needed.logits) if needed.logits else 0
        return self.forward_pass.padded_shape(Shape(rows, needed.tiles, logits))
