"""Packs the new tokens of many sequences into one row. The only place where anything is padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv_cache import KVArena
from engine.numerics import Tiles, round_up


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
class AttentionCall:
    """Sequences attended in one call: B neighbouring or listed slots, Q query rows each, over `kv_length` positions."""

    slots: slice | torch.Tensor  # a slice is a view of the arena, a tensor [B] a gather
    query_index: torch.Tensor  # [B, Q] packed index of each query row; padding repeats the sequence's first
    kv_length: int
    mask: torch.Tensor  # [B, 1, groups * Q, kv_length] True where visible
    rows: torch.Tensor  # [n] which of the B * Q results are real ...
    packed: torch.Tensor  # [n] ... and the packed index each belongs to


@dataclass(frozen=True)
class PackedBatch:
    """One forward pass: T tokens of all spans in one row, followed by padding."""

    arena: KVArena
    tokens: int  # T
    longest: int  # positions of the longest sequence
    input_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [T]
    logit_rows: torch.Tensor  # [R, padded like rows] packed index of each row of logits
    num_logits: int  # R
    calls: tuple[AttentionCall, ...]


def pack(spans: Sequence[Span], arena: KVArena, tiles: Tiles, query_groups: int, gather: bool) -> PackedBatch:
    """Lays out the spans one behind the other, in their order.

    `query_groups`: query heads per KV head, folded into the query rows. `gather`: attend to scattered slots by copying
    them together (one call), rather than by a call for each run of neighbours (no copy).
    """
    device = arena.keys[0].device
    starts: list[int] = []
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for span in spans:
        starts.append(len(token_ids))
        token_ids.extend(span.token_ids)
        positions.extend(range(span.start, span.end))
        slots.extend([span.slot] * len(span.token_ids))
        logit_rows.extend(range(len(token_ids) - span.num_logits, len(token_ids)))
    tokens, num_logits = len(token_ids), len(logit_rows)
    padding = tiles.rows(tokens) - tokens
    logit_padding = tiles.rows(num_logits) - num_logits if num_logits else 0
    calls = [
        _attention_call([(spans[i], starts[i]) for i in run], tiles, query_groups, arena)
        for run in _runs(spans, tiles.query, gather)
    ]
    return PackedBatch(
        arena=arena,
        tokens=tokens,
        longest=max(span.end for span in spans),
        input_ids=torch.tensor(token_ids + token_ids[:1] * padding, device=device),
        positions=torch.tensor(positions + positions[:1] * padding, device=device),
        slots=torch.tensor(slots, device=device),
        logit_rows=torch.tensor(logit_rows + logit_rows[:1] * logit_padding, device=device, dtype=torch.long),
        num_logits=num_logits,
        calls=tuple(calls),
    )


def _runs(spans: Sequence[Span], query_tile: int, gather: bool) -> list[list[int]]:
    """Indices of spans to attend together: few-token spans of neighbouring slots; a long one alone."""
    runs: list[list[int]] = []
    short = max(query_tile, 16)
    for i in sorted(range(len(spans)), key=lambda i: spans[i].slot):
        previous = spans[runs[-1][-1]] if runs else None
        joins = (
            previous is not None
            and (gather or previous.slot + 1 == spans[i].slot)
            and max(len(previous.token_ids), len(spans[i].token_ids)) <= short
        )
        if joins:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _attention_call(members: list[tuple[Span, int]], tiles: Tiles, query_groups: int, arena: KVArena) -> AttentionCall:
    device = arena.keys[0].device
    longest = round_up(max(len(span.token_ids) for span, _ in members), tiles.query)
    kv_length = min(round_up(max(span.end for span, _ in members), tiles.kv), arena.keys[0].shape[2])
    query_index: list[list[int]] = []
    query_position: list[list[int]] = []
    rows: list[int] = []
    packed: list[int] = []
    for b, (span, first) in enumerate(members):
        count = len(span.token_ids)
        padding = longest - count
        query_index.append([*range(first, first + count), *[first] * padding])
        query_position.append([*range(span.start, span.end), *[span.start] * padding])
        rows.extend(range(b * longest, b * longest + count))
        packed.extend(range(first, first + count))
    visible = torch.arange(kv_length, device=device) <= torch.tensor(query_position, device=device)[..., None]
    mask = visible[:, None, None].expand(len(members), 1, query_groups, longest, kv_length)
    slots = [span.slot for span, _ in members]
    neighbours = slots == list(range(slots[0], slots[0] + len(slots)))
    return AttentionCall(
        slots=slice(slots[0], slots[0] + len(slots)) if neighbours else torch.tensor(slots, device=device),
        query_index=torch.tensor(query_index, device=device),
        kv_length=kv_length,
        mask=mask.reshape(len(members), 1, query_groups * longest, kv_length),
        rows=torch.tensor(rows, device=device),
        packed=torch.tensor(packed, device=device),
    )
