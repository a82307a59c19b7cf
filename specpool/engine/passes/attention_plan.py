"""The attention calls of a packed batch, for passes that attend by torch's operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Location, Span
from specpool.engine.numerics.tiles import Tiles, round_up


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: B sequences with Q query rows each, over `kv_length` columns from their origins on.

    Or one sequence whose B query rows are separate members of the batch.
    """

    origins: tuple[int, ...]  # for each sequence the first column of the arena that is attended
    kv_length: int
    gathered: torch.Tensor | None  # [B * kv_length] attended columns, if the origins are not at equal distances
    query_index: torch.Tensor  # [B, Q] packed index of each query row; padding repeats the sequence's first
    mask: torch.Tensor | None  # [B or 1, 1, groups * Q, kv_length] True where visible; None: everywhere

    def attended(self, cache: torch.Tensor) -> torch.Tensor:
        """The attended part [B, kv_heads, kv_length, dim] of keys or values [kv_heads, columns, dim]: a view, or a copy
        if the columns are gathered."""
        kv_heads, columns, dim = cache.shape
        count = len(self.origins)
        if self.gathered is not None:
            return cache[:, self.gathered].view(kv_heads, count, self.kv_length, dim).transpose(0, 1)
        stride = self.origins[1] - self.origins[0] if count > 1 else 0
        shape, strides = (count, kv_heads, self.kv_length, dim), (stride * dim, columns * dim, dim, 1)
        view = cache.as_strided(shape, strides, cache.storage_offset() + self.origins[0] * dim)
        return view.expand(len(self.query_index), -1, -1, -1)


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of one forward pass."""

    calls: tuple[AttentionCall, ...]
    result_rows: torch.Tensor  # [rows] index of each row's result among the B * Q results of all calls, concatenated


def plan_attention(
    spans: Sequence[Span], locations: Sequence[Location], arena: KVArena, tiles: Tiles, query_groups: int, gather: bool
) -> AttentionPlan:
    """The plan for spans that are packed in this order.

    `locations`: those of the spans' sequences. `query_groups`: query heads per KV head, folded into the query rows.
    `gather`: copy sequences at arbitrary locations together for one call, rather than make one call for each series of
    sequences at equal distances, which needs no copy.
    """
    packed: list[_PackedSpan] = []
    tokens = 0
    for span, location in zip(spans, locations, strict=True):
        packed.append(_PackedSpan(span, tokens, location.origin, location.start))
        tokens += len(span.token_ids)
    runs = _runs(packed, tiles, gather, arena.columns)
    result_rows = _result_rows(runs, tokens, tiles)
    padding = tiles.rows(tokens) - tokens
    return AttentionPlan(
        calls=tuple(_attention_call(run, tiles, query_groups, arena) for run in runs),
        result_rows=torch.tensor(result_rows + result_rows[:1] * padding, device=arena.device),
    )


@dataclass(frozen=True)
class _PackedSpan:
    """A span with the packed index of its first token and the location of its sequence."""

    span: Span
    first: int
    origin: int
    start: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers that decide which columns its tokens see."""
        return self.start, self.span.start, self.span.end


def _runs(packed: Sequence[_PackedSpan], tiles: Tiles, gather: bool, columns: int) -> list[list[_PackedSpan]]:
    """Groups of spans to attend in one call each: spans of few tokens at equal distances, or one long span alone.

    Exact results depend on how far into the attended columns a sequence starts, so on an exact grid only sequences with
    equal starts share a call. All sequences of a call attend as many columns as the longest of them needs, and none may
    reach beyond the end of the cache because of that.
    """
    runs: list[list[_PackedSpan]] = []
    short = 1 if tiles.by_row else max(tiles.query, 16)
    for this in sorted(packed, key=lambda this: (this.start if tiles.exact else 0, this.origin)):
        run = runs[-1] if runs else []
        previous = run[-1] if run else None
        joins = (
            previous is not None
            and (gather or len(run) == 1 or this.origin - previous.origin == run[1].origin - run[0].origin)
            and (not tiles.exact or previous.start == this.start)
            and max(len(previous.span.token_ids), len(this.span.token_ids)) <= short
            and _reach([*run, this], tiles) <= columns
        )
        if joins:
            runs[-1].append(this)
        else:
            runs.append([this])
    return runs


def _kv_length(run: list[_PackedSpan], tiles: Tiles) -> int:
    """Number of columns that a call attends for each of its sequences."""
    left = min(this.start for this in run)
    return round_up(max(this.start + this.span.end for this in run) - left, tiles.kv)


def _reach(run: list[_PackedSpan], tiles: Tiles) -> int:
    """The column after the last one that a call attends."""
    return max(this.origin for this in run) + min(this.start for this in run) + _kv_length(run, tiles)


def _query_rows(run: list[_PackedSpan], tiles: Tiles) -> int:
    """Number of query rows of each sequence of a call."""
    return round_up(max(len(this.span.token_ids) for this in run), tiles.query)


def _result_rows(runs: list[list[_PackedSpan]], tokens: int, tiles: Tiles) -> list[int]:
    """For each packed token the index of its result among the results of all calls."""
    result_rows = [0] * tokens
    at = 0
    for run in runs:
        rows = _query_rows(run, tiles)
        for this in run:
            count = len(this.span.token_ids)
            result_rows[this.first : this.first + count] = range(at, at + count)
            at += rows
    return result_rows


def _attention_call(run: list[_PackedSpan], tiles: Tiles, query_groups: int, arena: KVArena) -> AttentionCall:
    device = arena.device
    longest = _query_rows(run, tiles)
    left = min(this.start for this in run)
    kv_length = _kv_length(run, tiles)
    assert _reach(run, tiles) <= arena.columns, "the extent of a sequence is shorter than its own tile"
    query_index: list[list[int]] = []
    for this in run:
        count = len(this.span.token_ids)
        query_index.append([*range(this.first, this.first + count), *[this.first] * (longest - count)])
    if tiles.by_row:
        query_index = [[row] for rows in query_index for row in rows]
    origins = tuple(this.origin + left for this in run)
    distances = {after - before for before, after in pairwise(origins)}
    columns = [column for origin in origins for column in range(origin, origin + kv_length)]
    return AttentionCall(
        origins=origins,
        kv_length=kv_length,
        gathered=torch.tensor(columns, device=device) if len(distances) > 1 else None,
        query_index=torch.tensor(query_index, device=device),
        mask=_mask(run, longest, left, kv_length, query_groups, tiles.by_row, device),
    )


def _mask(
    run: list[_PackedSpan],
    longest: int,
    left: int,
    kv_length: int,
    query_groups: int,
    by_row: bool,
    device: torch.device,
) -> torch.Tensor | None:
    """The columns that each query row sees. Sequences of equal length share one mask, or need none."""
    alike = len({this.shape for this in run}) == 1
    if alike and longest == 1 and kv_length == run[0].span.end:
        return None
    starts: list[int] = []
    last_seen: list[list[int]] = []
    for this in run[:1] if alike else run:
        start, begin, end = this.start - left, this.span.start, this.span.end
        starts.append(start)
        last_seen.append([*range(start + begin, start + end), *[start + begin] * (longest - end + begin)])
    if by_row:
        starts = [start for start, rows in zip(starts, last_seen, strict=True) for _ in rows]
        last_seen, longest = [[last] for rows in last_seen for last in rows], 1
    column = torch.arange(kv_length, device=device)
    visible = column <= torch.tensor(last_seen, device=device)[..., None]  # [B or 1, Q, kv_length]
    if any(starts):
        visible &= column >= torch.tensor(starts, device=device)[:, None, None]
    mask = visible[:, None, None].expand(len(starts), 1, query_groups, longest, kv_length)
    return mask.reshape(len(starts), 1, query_groups * longest, kv_length)
