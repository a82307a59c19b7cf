"""Runs packed passes on the cache of one device."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.checkpoints import Checkpoints, Segment
from specpool.engine.cache.spans import Span
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.attention_plan import plan_attention
from specpool.engine.passes.drafts import Draft
from specpool.engine.passes.features import fill_states
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.packing import PackedBatch, Shape, pack


class PassResult(NamedTuple):
    """The result of a pass."""

    logits: torch.Tensor  # [R, rows of the head]
    states: torch.Tensor | None  # [sum of num_states, state layers * hidden]; None: no states were needed
    batch: PackedBatch


class PassRunner:
    """A forward pass and its cache."""

    def __init__(
        self,
        forward_pass: ForwardPass,
        arena: KVArena,
        tiles: Tiles,
        query_groups: int,
        hidden_size: int,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`tiles`: shapes that make the pass batch invariant. `query_groups`: query heads per KV head.

        `checkpoints`: those of recurrent layers, if the model has any.
        """
        self.forward_pass, self.arena, self._checkpoints = forward_pass, arena, checkpoints
        self._tiles, self._query_groups, self._hidden_size = tiles, query_groups, hidden_size

    def run(
        self,
        spans: Sequence[Span],
        state_layers: tuple[int, ...] = (),
        own_states: list[torch.Tensor] | None = None,
    ) -> PassResult:
        """Cache the new tokens of spans that fit in one pass.

        `state_layers`: numbers of layers after which to return the hidden states of the spans' last `num_states`
        tokens. `own_states`: gets the states [R, hidden] of a feature draft for the rows of the logits.
        """
        batch = self.batch_of(spans)
        if state_layers and any(span.num_states for span in spans):
            shape = batch.rows, len(state_layers), self._hidden_size
            states = torch.empty(shape, dtype=torch.bfloat16, device=self.arena.device)
            batch = replace(batch, state_layers=state_layers, states=states)
        logits: torch.Tensor = self.forward_pass(batch)
        if own_states is not None and batch.own_states is not None:
            own_states.append(batch.own_states[: batch.num_logits])
        return PassResult(logits[: batch.num_logits], _states_of(batch, spans), batch)

    def batch_of(self, spans: Sequence[Span]) -> PackedBatch:
        """Pack the input of a pass, and send it to the device. The host does not wait for the copies."""
        arena, forward_pass = self.arena, self.forward_pass
        arena.flush()
        planned = forward_pass.plans_attention
        segments = self._segments(spans)
        batch = pack(spans, arena, self._padded, forward_pass.rows_per_tile, planned, segments)
        if planned:
            batch = replace(batch, attention=plan_attention(spans, arena, self._tiles, self._query_groups))
        return self._with_states(batch, spans) if forward_pass.state_size else batch

    def _segments(self, spans: Sequence[Span]) -> list[Segment]:
        """Plan the recurrence of each span, if the model has recurrent layers."""
        if self._checkpoints is None:
            return []
        firsts = accumulate((len(span.token_ids) for span in spans), initial=0)
        return [self._checkpoints.segment(span, first) for span, first in zip(spans, firsts, strict=False)]

    def plan_drafts(self, drafts: Sequence[Draft]) -> None:
        """Plan the recurrence of the rows that a draft loop may run after each draft's span."""
        if self._checkpoints is None:
            return
        for draft in drafts:
            count = draft.num_draft_tokens - 1  # the last token is not cached
            rows = Span(draft.span.slot, draft.span.end, [0] * count, 0, num_tentative=count)
            draft.segment = self._checkpoints.segment(rows, 0)

    def end_drafts(self, drafts: Sequence[Draft]) -> None:
        """Keep no checkpoints for drafts that ended before a draft loop ran any of their rows."""
        for draft in drafts:
            if self._checkpoints is not None and draft.segment is not None and len(draft.token_ids) < 2:
                self._checkpoints.undo(draft.span.slot, draft.segment)

    def _with_states(self, batch: PackedBatch, spans: Sequence[Span]) -> PackedBatch:
        """The batch with the input of a feature draft, and memory for its own states."""
        forward_pass, device = self.forward_pass, self.arena.device
        size, dtype = forward_pass.state_size, forward_pass.compute_dtype
        states = torch.zeros(batch.rows, size, dtype=dtype, device=device)
        fill_states(states, spans, forward_pass.project)
        own_states = torch.empty(batch.shape.logits, size, dtype=dtype, device=device)
        return replace(batch, input_states=states, own_states=own_states)

    def capture_graphs(self, max_rows: int, max_length: int, max_drafts: int) -> int:
        """Capture passes of up to `max_rows` rows, before serving; see `ForwardPass.capture_graphs`."""
        counts = range(1, min(max_rows, self.forward_pass.captured_rows) + 1)
        sizes = sorted({self._padded(Shape(count, 1, 0)).rows for count in counts})
        return self.forward_pass.capture_graphs(self.arena, sizes, max_length, max_drafts)

    def _padded(self, needed: Shape) -> Shape:
        rows, logits = self._tiles.rows(needed.rows), self._tiles.rows(needed.logits) if needed.logits else 0
        return self.forward_pass.padded_shape(needed._replace(rows=rows, logits=logits))


def _states_of(batch: PackedBatch, spans: Sequence[Span]) -> torch.Tensor | None:
    """The states of each span's last `num_states` tokens."""
    if batch.states is None:
        return None
    states = batch.states.flatten(1)
    if all(span.num_states == len(span.token_ids) for span in spans):
        return states[: batch.tokens]
    ends = accumulate(len(span.token_ids) for span in spans)
    return torch.cat([states[end - span.num_states : end] for span, end in zip(spans, ends, strict=True)])
