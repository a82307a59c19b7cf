"""Packs the new tokens of many sequences into one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from engine.cache.arena import KVArena
from engine.cache.spans import Location, Span
from engine.numerics import Tiles
from engine.passes.attention_plan import AttentionPlan
from engine.passes.kernels import splits_for


@dataclass(frozen=True)
class PackedBatch:
    """Input of one forward pass: the T tokens of all spans in one row, then padding that repeats the first token."""

    arena: KVArena
    tokens: int  # T
    rows: int
    longest: int  # positions of the longest sequence
    num_logits: int  # R
    numbers: torch.Tensor  # everything that differs between passes of one shape, moved to the device at once
    attention: AttentionPlan | None = None
    """The attention calls; None if the pass attends without a plan."""

    @property
    def input_ids(self) -> torch.Tensor:
        """Token id of each row, [rows]."""
        return self.numbers[: self.rows]

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence, [rows]."""
        return self.numbers[self.rows : 2 * self.rows]

    @property
    def columns(self) -> torch.Tensor:
        """Column of the arena in which each row is cached, [rows]."""
        return self.numbers[2 * self.rows : 3 * self.rows]

    @property
    def logit_rows(self) -> torch.Tensor:
        """Packed index of each row of logits, [R, padded like rows]."""
        return self.numbers[3 * self.rows :]

    @property
    def shape(self) -> tuple[int, ...]:
        """Everything besides its numbers that a pass without an attention plan depends on."""
        return self.rows, len(self.numbers) - 3 * self.rows, splits_for(self.longest)


def pack(spans: Sequence[Span], locations: Sequence[Location], arena: KVArena, tiles: Tiles) -> PackedBatch:
    """Concatenates the spans in their order. `locations`: those of their sequences."""
    token_ids: list[int] = []
    positions: list[int] = []
    columns: list[int] = []
    logit_rows: list[int] = []
    for span, location in zip(spans, locations, strict=True):
        token_ids.extend(span.token_ids)
        positions.extend(range(span.start, span.end))
        columns.extend(range(location.first + span.start, location.first + span.end))
        logit_rows.extend(range(len(token_ids) - span.num_logits, len(token_ids)))
    tokens, num_logits = len(token_ids), len(logit_rows)
    padding = tiles.rows(tokens) - tokens
    logit_padding = tiles.rows(num_logits) - num_logits if num_logits else 0
    padded = [numbers + numbers[:1] * padding for numbers in (token_ids, positions, columns)]
    numbers = torch.tensor(
        [*chain(*padded), *logit_rows, *logit_rows[:1] * logit_padding], pin_memory=arena.device.type == "cuda"
    )
    return PackedBatch(
        arena=arena,
        tokens=tokens,
        rows=tokens + padding,
        longest=max(span.end for span in spans),
        num_logits=num_logits,
        numbers=numbers.to(arena.device, non_blocking=True),
    )
