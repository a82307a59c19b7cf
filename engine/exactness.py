"""Finds the shapes under which this device gives a row the same bits in every batch, and proves it on the model."""

import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from engine.linear import PrepackedLinear
from engine.numerics import Tiles, round_up
from engine.packing import Span

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

# Cheapest first. The first one under which all probed shapes agree is taken; the last is taken untested.
ROW_GRIDS = ((1, 1), (2, 1), (4, 1), (8, 1), (8, 8), (16, 16), (32, 32), (64, 64))
ATTENTION_GRIDS = ((8, 64), (8, 128), (8, 256), (8, 512), (16, 512), (32, 512))
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 128, 200, 256, 384, 512)
# Results this wide cost too much to probe at many rows, and an output head never sees many.
MANY_FEATURES, FEW_ROWS = 8192, 64


@torch.inference_mode()
def choose_tiles(model: nn.Module, kv_heads: int, query_groups: int, head_dim: int) -> Tiles:
    """The cheapest grid under which every linear layer's shape and attention give the same bits whatever the batch."""
    every = [module for module in model.modules() if isinstance(module, nn.Linear | PrepackedLinear)]
    linears = {(module.in_features, module.out_features): module for module in every}
    sample = next(model.parameters())
    generator = torch.Generator().manual_seed(0)

    def random_like(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(sample.device, sample.dtype)

    rows = _first(ROW_GRIDS, lambda grid: all(_rows_agree(m, Tiles(*grid), random_like) for m in linears.values()))
    query, kv = _first(
        ATTENTION_GRIDS, lambda grid: _attention_agrees(*grid, kv_heads, query_groups, head_dim, random_like)
    )
    tiles = Tiles(*rows, query, kv)
    log.info("exact numerics with %s", tiles)
    return tiles


def _first(grids: tuple[tuple[int, int], ...], agrees: Callable[[tuple[int, int]], bool]) -> tuple[int, int]:
    return next((grid for grid in grids[:-1] if agrees(grid)), grids[-1])


def _rows_agree(linear: nn.Module, tiles: Tiles, random_like: Callable[..., torch.Tensor]) -> bool:
    limit = FEW_ROWS if linear.out_features > MANY_FEATURES else ROW_COUNTS[-1]
    counts = sorted({tiles.rows(count) for count in ROW_COUNTS if count <= limit})
    x = random_like(counts[-1], linear.in_features)
    reference = linear(x)
    return all(torch.equal(linear(x[:count]), reference[:count]) for count in counts[:-1])


def _attention_agrees(
    query: int, kv: int, kv_heads: int, groups: int, dim: int, random_like: Callable[..., torch.Tensor]
) -> bool:
    """Whether one query row's result survives more rows, other sequences beside it, and a longer cache behind it."""
    most = 4 * kv if kv >= 256 else 1024
    keys, values = random_like(5, kv_heads, most, dim), random_like(5, kv_heads, most, dim)
    row = random_like(1, kv_heads, groups, 1, dim)

    def attend(batch: int, rows: int, at: int, length: int, position: int) -> torch.Tensor:
        q = random_like(batch, kv_heads, groups, rows, dim)
        q[-1, :, :, at] = row[0, :, :, 0]
        positions = torch.randint(0, length, (batch, rows), device=q.device)
        positions[-1, at] = position
        mask = (torch.arange(length, device=q.device) <= positions[..., None])[:, None, None]
        mask = mask.expand(batch, 1, groups, rows, length).reshape(batch, 1, groups * rows, length)
        members = slice(5 - batch, 5)  # the probed row always attends to the last sequence's cache
        q = q.reshape(batch, kv_heads, groups * rows, dim)
        out = scaled_dot_product_attention(q, keys[members, :, :length], values[members, :, :length], attn_mask=mask)
        return out.reshape(batch, kv_heads, groups, rows, dim)[-1, :, :, at]

    for position in (0, 30, 63, 100, 250, 300, 511, 700, 1000):
        length = round_up(position + 1, kv)
        reference = attend(1, query, 0, length, position)
        variants = [(1, query, query - 1, length), (2, query, 1 % query, length), (5, query, 0, length)]
        variants += [(1, query * many, query * many - 1, length) for many in (2, 3, 5, 8, 16, 64)]
        variants += [(2, query, 0, longer) for longer in range(length, most + 1, kv)]
        if not all(torch.equal(attend(*variant, position), reference) for variant in variants):
            return False
    return True


def self_test(engine: "Engine") -> bool:
    """Whether logits are bit for bit the same for sequences alone, token by token, and in a ragged batch with drafts.

    Uses the engine's own slots, which must be free, with random tokens and lengths around the grid's edges.
    """
    chance = random.Random(0)
    steps, longest = 5, engine.max_model_len - 8
    lengths = [n for n in (3, 17, engine.tiles.kv - 2, engine.tiles.kv + 40) if n <= longest][: engine.slots.total]
    truth = [[chance.randrange(engine.vocab_size) for _ in range(n + steps)] for n in lengths]

    alone = []
    for length, tokens in zip(lengths, truth, strict=True):
        spans = [Span(0, 0, tokens[:length], 1)]
        spans += [Span(0, p, tokens[p : p + 1], 1) for p in range(length, length + steps)]
        alone.append(torch.cat([engine.forward([span]) for span in spans]))

    slots = list(range(len(lengths)))
    chance.shuffle(slots)
    # All prompts but their last tokens in one pass of chunks, then everything that is left as one round of drafts.
    engine.forward([Span(s, 0, t[: n - 1], 0) for s, n, t in zip(slots, lengths, truth, strict=True)])
    drafts = [chance.randint(1, steps) for _ in lengths]
    spans = [Span(s, n - 1, t[n - 1 : n + d], d + 1) for s, n, t, d in zip(slots, lengths, truth, drafts, strict=True)]
    together = engine.forward(spans).split([span.num_logits for span in spans])
    same = all(torch.equal(rows, one[: len(rows)]) for rows, one in zip(together, alone, strict=True))
    (log.info if same else log.warning)("self-test: equivalence is %s", "bitwise" if same else "numeric")
    return same
