"""Runs packed passes on the cache of one device."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Location, Span
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.attention_plan import plan_attention
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.packing import pack


class PassRunner:
    """A forward pass and its cache."""

    def __init__(self, forward_pass: ForwardPass, arena: KVArena, tiles: Tiles, query_groups: int) -> None:
        """`tiles`: shapes that make the pass batch invariant. `query_groups`: query heads per KV head."""
        self.forward_pass, self.arena = forward_pass, arena
        self._tiles, self._query_groups = tiles, query_groups

    def run(self, spans: Sequence[Span], locations: Sequence[Location]) -> torch.Tensor:
        """Caches the new tokens of spans that fit in one pass, and returns their logits.

        `locations`: where the sequence of each span lies.
        """
        arena, forward_pass = self.arena, self.forward_pass
        planned = forward_pass.plans_attention
        batch = pack(spans, locations, arena, self._padded_rows, forward_pass.rows_per_tile, repeats=planned)
        if planned:
            gather = arena.device.type != "cpu"
            plan = plan_attention(spans, locations, arena, self._tiles, self._query_groups, gather)
            batch = replace(batch, attention=plan)
        logits: torch.Tensor = forward_pass(batch)
        return logits[: batch.num_logits]

    def _padded_rows(self, count: int) -> int:
        return self._tiles.rows(self.forward_pass.padded_rows(count))
