"""The accept kernel, interpreted, follows the rule of the target worker."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.passes.gpu.accept import accept
from specpool.engine.passes.gpu.choice import no_numbers
from specpool.engine.passes.packing import POSITIONS, SLOTS, PackedBatch, Shape, pack
from target_worker.verifier import accept as accept_on_host

ROWS_PER_TILE = 8

tokens = st.integers(0, 2)
"""Few tokens, so that drafts are often right."""


@st.composite
def verified_spans(draw: st.DrawFn) -> tuple[list[int], list[int], bool]:
    """Return a span's draft tokens, the target's choices after its rows, and whether a draft follows."""
    draft = draw(st.lists(tokens, max_size=ROWS_PER_TILE - 1))
    right = draw(st.integers(0, len(draft)))
    others = draw(st.lists(tokens, min_size=len(draft) + 1 - right, max_size=len(draft) + 1 - right))
    return draft, draft[:right] + others, draw(st.booleans())


@given(st.lists(verified_spans(), min_size=1, max_size=5))
def test_the_device_accepts_the_tokens_of_the_host(spans: list[tuple[list[int], list[int], bool]]) -> None:
    starts = [10 * i for i in range(len(spans))]
    target = packed([Span(i, starts[i], [1, *draft], len(draft) + 1) for i, (draft, _, _) in enumerate(spans)])
    draft = packed(
        [
            Span(i if drafts else -1, starts[i] + 1, [0] * len(choices), 1)
            for i, (_, choices, drafts) in enumerate(spans)
        ]
    )
    numbers = no_numbers(8, recurs=False)
    numbers[SLOTS, : len(spans)] = torch.tensor([i if drafts else -1 for i, (_, _, drafts) in enumerate(spans)])
    chosen = [choice for _, choices, _ in spans for choice in choices]
    accept(torch.tensor([chosen, chosen]).double(), target, draft, numbers, len(spans), ROWS_PER_TILE)
    begin = 0
    for i, (drafted, choices, drafts) in enumerate(spans):
        gained, end = accept_on_host(drafted, choices), begin + len(choices)
        count = len(gained)
        assert draft.input_ids[begin : begin + count].tolist() == gained
        assert draft.positions[begin:end].tolist() == [*range(starts[i] + 1, starts[i] + 1 + len(choices))]
        assert draft.slots[begin:end].tolist() == [i if drafts and j < count else -1 for j in range(len(choices))]
        assert (draft.tile_begins[i], draft.tile_sizes[i]) == (begin, count if drafts else 0)
        assert draft.logit_rows[i] == begin + count - 1
        assert numbers[POSITIONS, i] == (starts[i] + 1 + count if drafts else 0)
        begin = end
    assert draft.slots[begin:].tolist() == [-1] * (draft.rows - begin)


def packed(spans: list[Span]) -> PackedBatch:
    """Pack spans for a pass on a GPU, with padding."""
    arena = KVArena.of_one_sequence(1, 1, 64, 16, torch.float32, torch.device("cpu"))
    return pack(
        spans, arena, lambda needed: Shape(*(size + 3 for size in needed)), rows_per_tile=ROWS_PER_TILE, repeats=False
    )
