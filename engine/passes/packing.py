"""Packs the new tokens of many sequences into one row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.cache.arena import KVArena
from engine.cache.spans import Location, Span
from engine.passes.attention_plan import AttentionPlan

# Numbers of each row, and of each tile of attention.
INPUT_IDS, POSITIONS, COLUMNS = range(3)
TILE_BEGINS, TILE_SIZES = range(2)


@dataclass(frozen=True)
class PackedBatch:
    """Input of one forward pass: the T tokens of all spans in one row, then padding."""

    arena: KVArena
    tokens: int  # T
    rows: int
    tiles: int  # of attention, in a pass without an attention plan
    longest: int  # positions of the longest sequence
    num_logits: int  # R
    numbers: torch.Tensor  # everything that differs between passes of one shape, moved to the device at once
    attention: AttentionPlan | None = None
    """The attention calls; None if the pass attends without a plan."""

    @property
    def input_ids(self) -> torch.Tensor:
        """Token id of each row, [rows]."""
        return self._of_rows(INPUT_IDS)

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence, [rows]."""
        return self._of_rows(POSITIONS)

    @property
    def columns(self) -> torch.Tensor:
        """Column of the arena in which each row is cached, [rows]; -1: it is not cached."""
        return self._of_rows(COLUMNS)

    @property
    def tile_begins(self) -> torch.Tensor:
        """The first row of each tile of attention, [tiles]."""
        return self.numbers[3 * self.rows :][: self.tiles]

    @property
    def tile_sizes(self) -> torch.Tensor:
        """How many rows, of one sequence, share each tile, [tiles]; 0: none."""
        return self.numbers[3 * self.rows + self.tiles :][: self.tiles]

    @property
    def logit_rows(self) -> torch.Tensor:
        """Packed index of each row of logits, [R, padded like rows]."""
        return self.numbers[3 * self.rows + 2 * self.tiles :]

    def _of_rows(self, number: int) -> torch.Tensor:
        return self.numbers[number * self.rows : (number + 1) * self.rows]


def pack(
    spans: Sequence[Span],
    locations: Sequence[Location],
    arena: KVArena,
    padded: Callable[[int], int],
    rows_per_tile: int = 1,
    repeats: bool = True,
) -> PackedBatch:
    """Concatenates the spans in their order. `locations`: those of their sequences.

    `padded`: to how many a number of tokens, tiles or rows of logits is padded. `rows_per_tile`: most rows that share a
    tile of attention. `repeats`: padding repeats the first token, for passes that plan attention; otherwise it is
    neither cached nor attended.
    """
    lengths = np.array([len(span.token_ids) for span in spans])
    tokens = int(lengths.sum())
    first = lengths.cumsum() - lengths
    index = np.arange(tokens) - np.repeat(first, lengths)  # of each token in its span
    numbers = np.zeros((3, padded(tokens)), np.int64)
    own = numbers[:, :tokens]
    own[INPUT_IDS] = np.fromiter(chain.from_iterable(span.token_ids for span in spans), np.int64, tokens)
    own[POSITIONS] = index + np.repeat([span.start for span in spans], lengths)
    own[COLUMNS] = own[POSITIONS] + np.repeat([location.first for location in locations], lengths)
    begins = np.flatnonzero(index % rows_per_tile == 0)
    tiles = np.zeros((2, padded(len(begins))), np.int64)
    tiles[TILE_BEGINS, : len(begins)] = begins
    left = np.repeat(lengths, lengths) - index  # in the span, from each token on
    tiles[TILE_SIZES, : len(begins)] = np.minimum(left[begins], rows_per_tile)
    if repeats:
        numbers[:, tokens:] = numbers[:, :1]
    else:
        numbers[COLUMNS, tokens:] = -1
    wanted = np.array([span.num_logits for span in spans])
    num_logits = int(wanted.sum())
    logit_rows = np.zeros(padded(num_logits) if num_logits else 0, np.int64)
    before = wanted.cumsum() - wanted
    logit_rows[:num_logits] = np.arange(num_logits) + np.repeat(first + lengths - wanted - before, wanted)
    if num_logits:
        logit_rows[num_logits:] = logit_rows[0]
    together = torch.from_numpy(np.concatenate([numbers.ravel(), tiles.ravel(), logit_rows]))
    if arena.device.type == "cuda":
        together = together.pin_memory()
    return PackedBatch(
        arena=arena,
        tokens=tokens,
        rows=numbers.shape[1],
        tiles=tiles.shape[1],
        longest=max(span.end for span in spans),
        num_logits=num_logits,
        numbers=together.to(arena.device, non_blocking=True),
    )
