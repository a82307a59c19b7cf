"""Finds the tile shapes that make this device's GEMMs and attention batch-invariant."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from specpool.engine.numerics.tiles import Tiles, round_up
from specpool.engine.passes.modules import PrepackedLinear
from specpool.engine.probes.inputs import ProbeInputs

log = logging.getLogger(__name__)
Choice = TypeVar("Choice")
Linear = nn.Linear | PrepackedLinear

# (minimum rows, multiple of rows), cheapest first. The first one with which all probed layers agree is chosen.
ROW_TILE_SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 8), (16, 16), (32, 32), (64, 64))
# The last resort: every pass has exactly this many rows, so each GEMM of a layer has one shape.
ONE_SHAPE = Tiles(min_rows=64, row_multiple=64, max_rows=64)
ROW_TILES = (*(Tiles(*tile_shape) for tile_shape in ROW_TILE_SHAPES), ONE_SHAPE)
# (multiple of query rows, multiple of KV columns), cheapest first.
ATTENTION_TILE_SHAPES = (
    *((1, 64), (1, 128), (1, 256), (1, 512)),
    *((8, 64), (8, 128), (8, 256), (8, 512), (16, 512), (32, 512)),
)
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 128, 200, 256, 384, 512)
# From this multiple on, every row count that such tiles allow is probed.
COARSE = 32
# Wide layers cost more, so fewer row counts are probed.
MANY_FEATURES, FEW_COUNTS = 8192, (1, 2, 3, 5, 8, 16, 17, 32, 33, 64, 65, 80, 96, 128, 160, 200, 256)
NOT_FOUND = "no batch-invariant shape found for %s; equivalence is numeric"


@torch.inference_mode()
def choose_tiles(model: nn.Module, attention: tuple[int, int, int] | None) -> Tiles | None:
    """The cheapest tiles on which all linear layers and attention are batch-invariant.

    `attention`: KV heads, query heads per KV head, and head size; None if attention needs no tiles. Return None if
    there are no such tiles, and log the layer.
    """
    numbers = ProbeInputs(next(model.parameters()))
    rows = _row_tiles(model, numbers)
    tile_shape: tuple[int, int] | None = (1, 1)
    if attention is not None and rows is not None:
        tile_shape = _attention_tile_shape(*attention, numbers)
    if rows is None or tile_shape is None:
        return None
    tiles = Tiles(rows.min_rows, rows.row_multiple, *tile_shape, max_rows=rows.max_rows)
    log.info("batch-invariant with %s", tiles)
    return tiles


def _row_tiles(model: nn.Module, numbers: ProbeInputs) -> Tiles | None:
    """The cheapest row tiles on which all linear layers agree. Their `max_rows` is the largest probed count."""
    shapes = {
        (type(module), module.in_features, module.out_features, module.bias is not None)
        for module in model.modules()
        if isinstance(module, PrepackedLinear) or type(module) is nn.Linear
    }
    rows = ROW_TILES[0]
    for kind, inputs, outputs, biased in sorted(shapes, key=str):
        probe = _linear_probe(kind, inputs, outputs, biased, numbers)
        # Coarser tiles also suit the previous layers: their row counts are a subset.
        candidates = ROW_TILES[ROW_TILES.index(rows) :]
        chosen = _first(candidates, partial(_layer_agrees, *probe))
        if chosen is None:
            log.warning(NOT_FOUND, f"{kind.__name__} with {inputs} inputs and {outputs} outputs")
            return None
        rows = chosen
    probed = min((_row_counts(outputs)[-1] for _, _, outputs, _ in shapes), default=ROW_COUNTS[-1])
    return replace(rows, max_rows=rows.max_rows or probed)


def _attention_tile_shape(kv_heads: int, groups: int, dim: int, numbers: ProbeInputs) -> tuple[int, int] | None:
    """The cheapest tile shape on which attention is batch-invariant."""
    tile_shape = _first(
        ATTENTION_TILE_SHAPES, lambda tile_shape: _attention_agrees(*tile_shape, kv_heads, groups, dim, numbers)
    )
    if tile_shape is None:
        log.warning(NOT_FOUND, f"attention with {kv_heads} KV heads, {groups} query heads each, head size {dim}")
    return tile_shape


def _first(choices: Sequence[Choice], agrees: Callable[[Choice], bool]) -> Choice | None:
    return next((choice for choice in choices if agrees(choice)), None)


def _linear_probe(
    kind: type[nn.Module], inputs: int, outputs: int, biased: bool, numbers: ProbeInputs
) -> tuple[Linear, torch.Tensor]:
    """A layer of this kind and shape, and the maximum number of input rows, whose dot products cancel."""
    weight, x = numbers.gemm(outputs, inputs, _row_counts(outputs)[-1])
    linear = nn.Linear(inputs, outputs, biased, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if biased:
        linear.bias = nn.Parameter(torch.zeros(outputs).to(weight), requires_grad=False)
    return linear if kind is nn.Linear else PrepackedLinear(linear), x


def _row_counts(outputs: int) -> tuple[int, ...]:
    return FEW_COUNTS if outputs > MANY_FEATURES else ROW_COUNTS


def _layer_agrees(linear: Linear, x: torch.Tensor, tiles: Tiles) -> bool:
    """Whether rows have the same bits in all passes on these tiles."""
    return (_rows_agree if tiles.max_rows is None else _one_shape_agrees)(linear, x, tiles)


def _rows_agree(linear: Linear, x: torch.Tensor, tiles: Tiles) -> bool:
    """Whether rows have the same bits among fewer rows and at every other index."""
    counts = {tiles.rows(count) for count in _row_counts(linear.out_features)}
    if tiles.row_multiple >= COARSE:
        counts.update(range(tiles.row_multiple, len(x), tiles.row_multiple))
    reference = linear(x)
    fewer_agree = all(torch.equal(linear(x[-count:]), reference[-count:]) for count in counts if count < len(x))
    return fewer_agree and _next_index_agrees(linear, x, reference)


def _one_shape_agrees(linear: Linear, x: torch.Tensor, tiles: Tiles) -> bool:
    """Whether rows have the same bits at every index and beside any other rows, in passes of one shape."""
    count = tiles.min_rows
    rows, others = x[:count], x[count : 2 * count]
    reference = linear(rows)
    if not _next_index_agrees(linear, rows, reference):
        return False
    index = torch.arange(count, device=x.device)
    for probed in (index < count // 2, index % 2 == 1):
        for beside in (others, others[:1]):  # padding repeats one row
            mixed = torch.where(probed[:, None], rows, beside)
            if not torch.equal(linear(mixed)[probed], reference[probed]):
                return False
    return True


def _next_index_agrees(linear: Linear, x: torch.Tensor, reference: torch.Tensor) -> bool:
    """Whether every row has the same bits at the next index, and so at every index."""
    return torch.equal(linear(x.roll(1, 0)), reference.roll(1, 0))


def _attention_agrees(query: int, kv: int, kv_heads: int, groups: int, dim: int, numbers: ProbeInputs) -> bool:
    """Whether a query row has the same bits with more rows, other sequences, or a longer cache behind it."""
    max_length = 4 * kv if kv >= 256 else 1024
    keys, values = numbers.normal(5, kv_heads, max_length, dim), numbers.normal(5, kv_heads, max_length, dim)
    row = torch.zeros(kv_heads, groups, dim).to(keys)  # weighs all visible positions equally

    def attend_by_row(batch: int, rows: int, index: int, length: int, visible: int) -> torch.Tensor:
        """The probed row's result in a call with one row each of several sequences, or with several rows of one."""
        count = max(batch, rows)
        index = index if batch == 1 else count - 1
        q = numbers.normal(count, kv_heads, groups, dim)
        q[index] = row
        positions = numbers.below(length, count, 1)
        positions[index] = visible - 1
        mask = (torch.arange(length, device=q.device) <= positions)[:, None, None].expand(count, 1, groups, length)
        members = slice(5 - batch, 5)
        k, v = (cache[members, :, :length].expand(count, -1, -1, -1) for cache in (keys, values))
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)[index]

    def attend_together(batch: int, rows: int, index: int, length: int, visible: int) -> torch.Tensor:
        """The probed row's result in a call with several rows of each of several sequences."""
        q = numbers.normal(batch, kv_heads, groups, rows, dim)
        q[-1, :, :, index] = row
        positions = numbers.below(length, batch, rows)
        positions[-1, index] = visible - 1
        mask = (torch.arange(length, device=q.device) <= positions[..., None])[:, None, None]
        mask = mask.expand(batch, 1, groups, rows, length).reshape(batch, 1, groups * rows, length)
        members = slice(5 - batch, 5)  # the probed row always attends to the last sequence
        q = q.reshape(batch, kv_heads, groups * rows, dim)
        out = scaled_dot_product_attention(q, keys[members, :, :length], values[members, :, :length], attn_mask=mask)
        return out.reshape(batch, kv_heads, groups, rows, dim)[-1, :, :, index]

    attend = attend_by_row if query == 1 else attend_together
    for visible in (2, 30, 64, 102, 250, 302, 512, 702, 1002):
        values[-1, :, :visible] = numbers.cancelling(visible, kv_heads, dim)[numbers.order(visible)].transpose(0, 1)
        length = round_up(visible, kv)
        reference = attend(1, query, 0, length, visible)
        variants = _attention_variants(query, range(length, max_length + 1, kv))
        if not all(torch.equal(attend(*variant, visible), reference) for variant in variants):
            return False
    return True


def _attention_variants(query: int, lengths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Calls that must give the same result: (sequences, query rows, index of the probed row, attended columns)."""
    shortest = lengths[0]
    variants = [(1, query, query - 1, shortest), (2, query, 1 % query, shortest), (5, query, 0, shortest)]
    variants += [(1, query * many, query * many - 1, shortest) for many in (2, 3, 5, 8, 16, 64)]
    return variants + [(2, query, 0, length) for length in lengths]
