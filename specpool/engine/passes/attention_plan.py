"""The attention calls of a packed batch, for passes that attend with torch operations."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.numerics.tiles import Tiles, round_up


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention: B sequences with Q query rows each, over `kv_length` logical columns.

    With tiles of one row, B counts the query rows of all sequences and Q is 1.
    """

    kv_length: int
    columns: torch.Tensor  # [sequences * kv_length] columns of the cache that hold the logical columns
    query_index: torch.Tensor  # [B, Q] packed index of each query row; padding repeats the sequence's first
    mask: torch.Tensor | None  # [B or 1, 1, groups * Q, kv_length] True where visible; None: everywhere
    last_seen: torch.Tensor  # [B or 1, 1, groups * Q, 1] logical column of each query row
    _windowed: dict[int, torch.Tensor] = field(default_factory=dict)  # mask by window

    def visible(self, window: int | None) -> torch.Tensor | None:
        """Return the mask for a sliding window that includes the row's own column; None: everything is visible.

        `window`: its size in columns; None: no window.
        """
        if window is None or window >= self.kv_length:
            return self.mask
        if window not in self._windowed:
            column = torch.arange(self.kv_length, device=self.last_seen.device)
            inside = column > self.last_seen - window
            self._windowed[window] = inside if self.mask is None else inside & self.mask
        return self._windowed[window]

    def attended(self, cache: torch.Tensor) -> torch.Tensor:
        """Gather [B, kv_heads, kv_length, dim] from keys or values [kv_heads, columns, dim]."""
        kv_heads, _, dim = cache.shape
        gathered = cache[:, self.columns].view(kv_heads, -1, self.kv_length, dim).transpose(0, 1)
        return gathered.expand(len(self.query_index), -1, -1, -1)


@dataclass(frozen=True)
class AttentionPlan:
    """The calls of one forward pass."""

    columns: torch.Tensor  # [rows] column of the cache for each row
    calls: tuple[AttentionCall, ...]
    result_rows: torch.Tensor  # [rows] index of each row's result in the concatenated B * Q results of all calls


@dataclass(frozen=True)
class _PackedSpan:
    """A span with the packed index of its first token."""

    span: Span
    first: int

    @property
    def start(self) -> int:
        """Logical column of the sequence's first position."""
        return self.span.offset

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.span.token_ids)

    @property
    def packed_rows(self) -> range:
        """Packed indexes of the tokens."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class _Run:
    """Spans that share a call: short ones, or one long span."""

    members: tuple[_PackedSpan, ...]
    tiles: Tiles

    @property
    def left(self) -> int:
        """Logical columns before every member's first position, which the call skips."""
        return min(member.start for member in self.members)

    @property
    def kv_length(self) -> int:
        """Logical columns attended per sequence, enough for the longest one."""
        return round_up(max(member.span.columns for member in self.members) - self.left, self.tiles.kv)

    @property
    def query_rows(self) -> int:
        """Query rows of each sequence."""
        return round_up(max(member.count for member in self.members), self.tiles.query)

    def admits(self, member: _PackedSpan) -> bool:
        """Whether a further span can share this call.

        On exact tiles, results depend on where a sequence starts within the attended columns, so starts must be equal.
        """
        last, short = self.members[-1], 1 if self.tiles.by_row else max(self.tiles.query, 16)
        same_start = not self.tiles.exact or last.start == member.start
        return same_start and max(last.count, member.count) <= short


def plan_attention(spans: Sequence[Span], arena: KVArena, tiles: Tiles, query_groups: int) -> AttentionPlan:
    """Plan the calls for spans packed in this order. Without branches, `offset` is where the sequence starts.

    `query_groups`: query heads per KV head, folded into the query rows.
    """
    packed: list[_PackedSpan] = []
    tokens = 0
    for span in spans:
        packed.append(_PackedSpan(span, tokens))
        tokens += len(span.token_ids)
    runs = _runs(packed, tiles)
    result_rows = _result_rows(runs, tokens)
    padding = tiles.rows(tokens) - tokens
    columns = list[int]()
    for span in spans:
        columns += arena.columns_of(span.slot, span.start + span.offset, len(span.token_ids))
    return AttentionPlan(
        columns=torch.tensor(columns + columns[:1] * padding, device=arena.device),
        calls=tuple(_attention_call(run, query_groups, arena) for run in runs),
        result_rows=torch.tensor(result_rows + result_rows[:1] * padding, device=arena.device),
    )


def _runs(packed: Sequence[_PackedSpan], tiles: Tiles) -> list[_Run]:
    """Group spans greedily."""
    runs: list[_Run] = []
    for member in sorted(packed, key=lambda member: (member.start if tiles.exact else 0, member.count)):
        if runs and runs[-1].admits(member):
            runs[-1] = _Run((*runs[-1].members, member), tiles)
        else:
            runs.append(_Run((member,), tiles))
    return runs


def _result_rows(runs: list[_Run], tokens: int) -> list[int]:
    """For each packed token, the index of its result among the results of all calls."""
    result_rows = [0] * tokens
    index = 0
    for run in runs:
        rows = run.query_rows
        for member in run.members:
            result_rows[member.first : member.first + member.count] = range(index, index + member.count)
            index += rows
    return result_rows


def _attention_call(run: _Run, query_groups: int, arena: KVArena) -> AttentionCall:
    device, query_rows, kv_length = arena.device, run.query_rows, run.kv_length
    query_index = [[*member.packed_rows, *[member.first] * (query_rows - member.count)] for member in run.members]
    if run.tiles.by_row:
        query_index = [[row] for rows in query_index for row in rows]
    columns = [column for each in run.members for column in arena.columns_of(each.span.slot, run.left, kv_length)]
    mask, last_seen = _mask(run, query_groups, device)
    return AttentionCall(
        kv_length=kv_length,
        columns=torch.tensor(columns, device=device),
        query_index=torch.tensor(query_index, device=device),
        mask=mask,
        last_seen=last_seen,
    )


def _mask(run: _Run, query_groups: int, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the mask of the columns that each query row sees, and the last of these columns.

    Sequences that see the same columns share one mask, or need none.
    """
    query_rows, kv_length, left = run.query_rows, run.kv_length, run.left
    alike = len({(member.start, member.span.start, member.span.end) for member in run.members}) == 1
    if alike and query_rows == 1 and kv_length == run.members[0].span.end:
        return None, torch.full((1, 1, 1, 1), kv_length - 1, device=device)
    starts: list[int] = []
    last_seen: list[list[int]] = []
    for member in run.members[:1] if alike else run.members:
        start = member.start - left
        first = start + member.span.start
        starts.append(start)
        last_seen.append([*range(first, start + member.span.end), *[first] * (query_rows - member.count)])
    if run.tiles.by_row:
        starts = [start for start, rows in zip(starts, last_seen, strict=True) for _ in rows]
        last_seen, query_rows = [[last] for rows in last_seen for last in rows], 1
    column = torch.arange(kv_length, device=device)
    last = torch.tensor(last_seen, device=device)[..., None]
    visible = column <= last  # [B or 1, Q, kv_length]
    if any(starts):
        visible &= column >= torch.tensor(starts, device=device)[:, None, None]
    by_head = [each[:, None, None].expand(-1, 1, query_groups, -1, -1).flatten(2, 3) for each in (visible, last)]
    return by_head[0], by_head[1]
