"""Packs the new tokens of many sequences into one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.kv_cache import KVArena
from engine.numerics import Tiles

if TYPE_CHECKING:
    from engine.attention_plan import AttentionPlan


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence: they take the positions from `start` on in `slot`."""

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int
    """For how many of the last tokens logits are wanted."""

    @property
    def end(self) -> int:
        """Positions of the sequence once these tokens are cached."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class PackedBatch:
    """One forward pass: T tokens of all spans in one row, followed by padding."""

    arena: KVArena
    tokens: int  # T
    longest: int  # positions of the longest sequence
    input_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    columns: torch.Tensor  # [T] where in the arena each token is cached
    logit_rows: torch.Tensor  # [R, padded like rows] packed index of each row of logits
    num_logits: int  # R
    attention: "AttentionPlan | None" = None
    """None: the model attends by itself."""


@dataclass(frozen=True)
class Place:
    """Where a sequence lies in the arena: its extent begins at column `origin`, position 0 is `start` columns later."""

    origin: int
    start: int = 0

    @property
    def first(self) -> int:
        """The column of position 0."""
        return self.origin + self.start


def pack(spans: Sequence[Span], places: Sequence[Place], arena: KVArena, tiles: Tiles) -> PackedBatch:
    """Lays out the spans one behind the other, in their order; `places` are those of their sequences."""
    device = arena.device
    token_ids: list[int] = []
    positions: list[int] = []
    columns: list[int] = []
    logit_rows: list[int] = []
    for span, place in zip(spans, places, strict=True):
        token_ids.extend(span.token_ids)
        positions.extend(range(span.start, span.end))
        columns.extend(range(place.first + span.start, place.first + span.end))
        logit_rows.extend(range(len(token_ids) - span.num_logits, len(token_ids)))
    tokens, num_logits = len(token_ids), len(logit_rows)
    padding = tiles.rows(tokens) - tokens
    logit_padding = tiles.rows(num_logits) - num_logits if num_logits else 0
    return PackedBatch(
        arena=arena,
        tokens=tokens,
        longest=max(span.end for span in spans),
        input_ids=torch.tensor(token_ids + token_ids[:1] * padding, device=device),
        positions=torch.tensor(positions + positions[:1] * padding, device=device),
        columns=torch.tensor(columns, device=device),
        logit_rows=torch.tensor(logit_rows + logit_rows[:1] * logit_padding, device=device, dtype=torch.long),
        num_logits=num_logits,
    )
