"""Packs the new tokens of many sequences into one row."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.checkpoints import NONE, Segment
from specpool.engine.cache.spans import Span
from specpool.engine.numerics.uploads import upload
from specpool.engine.passes.attention_plan import AttentionPlan

# Order of the arrays in `PackedBatch.numbers`: one number per row, then one per tile of attention.
INPUT_IDS, POSITIONS, SLOTS, PREFIX_LENGTHS, OFFSETS = range(5)
TILE_BEGINS, TILE_SIZES = range(2)
NUMBERS_PER_ROW = OFFSETS + 1
PADDING = Segment(0, 0, 0, NONE, 0, 0, NONE, 0, 0)


class Shape(NamedTuple):
    """Sizes of a pass. A captured graph serves all passes of its shape."""

    rows: int
    tiles: int  # of attention, in a pass without an attention plan
    logits: int
    segments: int = 0  # of recurrent layers


@dataclass(frozen=True)
class PackedBatch:
    """Input of one forward pass: the T tokens of all spans in one row, then padding."""

    arena: KVArena
    tokens: int  # T
    rows: int
    tiles: int  # of attention, in a pass without an attention plan
    max_length: int  # positions of the longest sequence
    num_logits: int  # R
    numbers: torch.Tensor  # everything that differs between passes of one shape, copied to the device at once
    attention: AttentionPlan | None = None
    """The attention calls; None if the pass attends without a plan."""
    input_states: torch.Tensor | None = None
    """Input of a pass that reads states, [rows, hidden]. See `features`."""
    own_states: torch.Tensor | None = None
    """Output of a pass that reads states: the last layer's states of the rows of logits, [R, padded, hidden]."""
    logits_in_order: bool = False
    """Whether the pass may ignore `logit_rows`, which are all rows in order."""
    state_layers: tuple[int, ...] = ()
    """Numbers of layers after which to record the hidden states."""
    states: torch.Tensor | None = None
    """Output: bfloat16 states [rows, state layers, hidden]; None without state layers."""
    num_segments: int = 0
    """Number of segments, padding included; 0: the model has no recurrent layers."""
    state_slots: torch.Tensor | None = None
    """Index in `states` by number of layers, [layers + 1] int32, on the device; -1: not recorded. For GPU kernels."""

    @classmethod
    def of_padding(cls, arena: KVArena, shape: Shape, max_length: int) -> "PackedBatch":
        """A batch without tokens, whose padding is neither cached nor attended."""
        rows, tiles, logits, segments = shape
        size = NUMBERS_PER_ROW * rows + 2 * tiles + logits + len(Segment._fields) * segments
        numbers = torch.zeros(size, dtype=torch.int64, device=arena.device)
        numbers[SLOTS * rows : (SLOTS + 1) * rows] = -1
        return cls(arena, 0, rows, tiles, max_length, 0, numbers, num_segments=segments)

    def record_states(self, num_layers: int, hidden: torch.Tensor) -> None:
        """Record the hidden states [rows, hidden] after this number of layers, if they are needed."""
        if self.states is not None and num_layers in self.state_layers:
            self.states[:, self.state_layers.index(num_layers)] = hidden

    @property
    def shape(self) -> Shape:
        """The padded sizes of the pass."""
        return Shape(self.rows, self.tiles, self._first_segment - self._first_logit_row, self.num_segments)

    @property
    def input_ids(self) -> torch.Tensor:
        """Token id of each row, [rows]."""
        return self._of_rows(INPUT_IDS)

    @property
    def positions(self) -> torch.Tensor:
        """Position of each row in its sequence, [rows]."""
        return self._of_rows(POSITIONS)

    @property
    def slots(self) -> torch.Tensor:
        """Slot of each row's sequence, [rows]; -1: the row is padding, neither cached nor attended."""
        return self._of_rows(SLOTS)

    @property
    def prefix_lengths(self) -> torch.Tensor:
        """Positions before each row's branch, [rows]."""
        return self._of_rows(PREFIX_LENGTHS)

    @property
    def offsets(self) -> torch.Tensor:
        """Shift of later positions to the right, in logical columns, [rows]; 0: the row is not part of a branch."""
        return self._of_rows(OFFSETS)

    @property
    def tile_begins(self) -> torch.Tensor:
        """First row of each tile of attention, [tiles]."""
        return self.numbers[NUMBERS_PER_ROW * self.rows :][: self.tiles]

    @property
    def tile_sizes(self) -> torch.Tensor:
        """Rows of each tile, all of one span, [tiles]; 0: no rows."""
        return self.numbers[NUMBERS_PER_ROW * self.rows + self.tiles :][: self.tiles]

    @property
    def logit_rows(self) -> torch.Tensor:
        """Packed index of each row of logits, [R, padded]."""
        return self.numbers[self._first_logit_row : self._first_segment]

    @property
    def segments(self) -> torch.Tensor:
        """How recurrent layers run each span, [segments, fields of `Segment`]; padding has no rows."""
        return self.numbers[self._first_segment :].view(self.num_segments, -1)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Memory addresses of the numbers of rows in order, then of logit rows, for compiled code."""
        first, size = self.numbers.data_ptr(), self.numbers.element_size()
        starts = (*range(0, NUMBERS_PER_ROW * self.rows, self.rows), self._first_logit_row)
        return tuple(first + size * start for start in starts)

    @property
    def _first_segment(self) -> int:
        return len(self.numbers) - len(Segment._fields) * self.num_segments

    @property
    def _first_logit_row(self) -> int:
        return NUMBERS_PER_ROW * self.rows + 2 * self.tiles

    def _of_rows(self, number: int) -> torch.Tensor:
        return self.numbers[number * self.rows : (number + 1) * self.rows]


def pack(
    spans: Sequence[Span],
    arena: KVArena,
    padded: Callable[[Shape], Shape],
    rows_per_tile: int = 1,
    repeats: bool = True,
    segments: Sequence[Segment] = (),
) -> PackedBatch:
    """Concatenate the spans in order.

    `padded`: the padded shape of a pass that needs this one. `rows_per_tile`: maximum rows of a tile of attention.
    `repeats`: padding repeats the first token, for passes that plan attention; otherwise it is neither cached nor
    attended. `segments`: how recurrent layers run each span, if the model has such layers.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    begins: list[int] = []
    sizes: list[int] = []
    logit_rows: list[int] = []
    # Lists, because array operations take several times as long for a few rows.
    for span in spans:
        first, count = len(input_ids), len(span.token_ids)
        input_ids += span.token_ids
        positions += range(span.start, span.end)
        slots += [span.slot] * count
        begins += range(first, first + count, rows_per_tile)
        sizes += [rows_per_tile] * (count // rows_per_tile) + [count % rows_per_tile] * (count % rows_per_tile > 0)
        logit_rows += range(first + count - span.num_logits, first + count)
    tokens, num_logits = len(input_ids), len(logit_rows)
    rows, tiles, logits, num_segments = padded(Shape(tokens, len(begins), num_logits, len(segments)))
    for numbers, padding in ((input_ids, 0), (positions, 0), (slots, -1)):
        numbers.extend([numbers[0] if repeats else padding] * (rows - tokens))
    for numbers in (begins, sizes):
        numbers.extend([0] * (tiles - len(numbers)))
    logit_rows += (logit_rows[:1] or [0]) * (logits - num_logits)
    of_rows = array("q", input_ids + positions + slots) + _branches(spans, rows)
    of_segments = [*chain.from_iterable(segments), *PADDING * (num_segments - len(segments))]
    packed = torch.frombuffer(of_rows + array("q", begins + sizes + logit_rows + of_segments), dtype=torch.int64)
    return PackedBatch(
        arena=arena,
        tokens=tokens,
        rows=rows,
        tiles=tiles,
        max_length=max(span.end for span in spans),
        num_logits=num_logits,
        numbers=upload(packed, arena.device),
        num_segments=num_segments,
    )


def _branches(spans: Sequence[Span], rows: int) -> "array[int]":
    """The prefix length of each row, then the offset of each row."""
    numbers = array("q", bytes(2 * array("q").itemsize * rows))
    if any(span.offset for span in spans):
        at = 0
        for span in spans:
            count = len(span.token_ids)
            numbers[at : at + count] = array("q", [span.prefix_length]) * count
            numbers[rows + at : rows + at + count] = array("q", [span.offset]) * count
            at += count
    return numbers
