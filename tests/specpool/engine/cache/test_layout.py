"""Both KV layouts give the same bits; the padded one right-aligns its batch with as few moves as possible."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import decode_alone, load_engine, random_tokens

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.extents import Extents
from specpool.engine.cache.layout import LAYOUTS, KVLayout, PaddedLayout, SlotLayout
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine

SEQUENCES, MAX_LENGTH = 4, 300


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[0], kv_layout="padded", max_model_len=MAX_LENGTH)


@pytest.fixture(scope="module")
def truth(tiny_pair: tuple[Path, Path]) -> list[torch.Tensor]:
    """Logits of every sequence decoded alone, token by token, in place."""
    slots = load_engine(tiny_pair[0], max_model_len=MAX_LENGTH)
    return [decode_alone(slots, random_tokens(MAX_LENGTH, seed)) for seed in range(SEQUENCES)]


def make_layout(layout: type[KVLayout], slots: int = 4, columns: int = 64) -> Any:
    arena = KVArena(2, 1, slots * columns, 1, torch.float32, torch.device("cpu"))
    return layout(arena, Extents(slots, columns))


def write(layout: PaddedLayout | SlotLayout, spans: list[Span]) -> list[int]:
    """Write number n at position n of every sequence, as a forward pass would."""
    starts = layout.align(spans)
    for span, start in zip(spans, starts, strict=True):
        positions = torch.arange(span.start, span.end)
        numbers = positions.float()[:, None, None]
        for layer in range(2):
            layout.arena.write(layer, layout.origin(span.slot) + start + positions, numbers, -numbers)
    return starts


# A round: for each participating sequence, how many tokens are fed and how many of them are rejected.
rounds = st.lists(
    st.dictionaries(st.integers(0, SEQUENCES - 1), st.tuples(st.integers(1, 40), st.integers(0, 8)), min_size=1),
    min_size=1,
    max_size=12,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=rounds)
def test_padded_logits_equal_decoding_alone_in_place(
    engine: Engine, truth: list[torch.Tensor], rounds: list[dict[int, tuple[int, int]]]
) -> None:
    """Arbitrary groups, round after round; a full sequence starts anew."""
    assert engine.bitwise
    assert engine.info().kv_layout == "padded"
    cached = [0] * SEQUENCES
    for round_ in rounds:
        spans = []
        for i, (fed, _) in round_.items():
            if cached[i] + fed > MAX_LENGTH:
                cached[i] = 0
            spans.append(Span(i, cached[i], random_tokens(MAX_LENGTH, i)[cached[i] : cached[i] + fed], fed))
        rows = engine.forward(spans).split([span.num_logits for span in spans])
        for (i, (fed, rejected)), got in zip(round_.items(), rows, strict=True):
            assert torch.equal(got, truth[i][cached[i] : cached[i] + fed])
            cached[i] += fed - min(rejected, fed)


@settings(max_examples=40, deadline=None)
@given(rounds=rounds)
def test_padding_never_accumulates_and_nothing_is_lost(rounds: list[dict[int, tuple[int, int]]]) -> None:
    layout = make_layout(PaddedLayout, SEQUENCES, columns=MAX_LENGTH)
    cached = [0] * SEQUENCES
    for round_ in rounds:
        spans = []
        for i, (fed, _) in round_.items():
            if cached[i] + fed > MAX_LENGTH:
                cached[i] = 0
            spans.append(Span(i, cached[i], [0] * fed, 0))
        starts = write(layout, spans)
        assert len({start + span.end for start, span in zip(starts, spans, strict=True)}) == 1, "not right-aligned"
        assert min(starts) == 0, "padding accumulated"
        for span, start in zip(spans, starts, strict=True):
            first = layout.origin(span.slot) + start
            found = layout.arena.keys[1][0, first : first + span.end, 0]
            assert found.tolist() == list(range(span.end))
        for i, (fed, rejected) in round_.items():
            cached[i] += fed - min(rejected, fed)


def record_moves(layout: PaddedLayout) -> list[tuple[int, ...]]:
    moves: list[tuple[int, ...]] = []
    layout.arena.before_move = lambda *move: moves.append(move)
    return moves


def test_sequences_of_equal_length_never_move() -> None:
    layout = make_layout(PaddedLayout)
    moved = record_moves(layout)
    layout.align([Span(slot, 0, [0] * 9, 0) for slot in range(3)])
    layout.align([Span(slot, 9, [0] * 5, 5) for slot in range(3)])
    layout.align([Span(slot, 12, [0] * 5, 5) for slot in range(3)])  # two tokens of each were rejected
    layout.align([Span(slot, 17, [0], 1) for slot in (0, 2)])
    assert moved == []


def test_draft_steps_of_a_padded_batch_move_nothing() -> None:
    layout = make_layout(PaddedLayout)
    layout.align([Span(0, 0, [0] * 9, 0), Span(1, 0, [0] * 4, 0)])
    moved = record_moves(layout)
    for step in range(5):
        assert layout.align([Span(0, 9 + step, [0], 1), Span(1, 4 + step, [0], 1)]) == [0, 5]
    layout.align([Span(1, 9, [0], 1)])  # alone, it is the longest
    assert moved == [(64 + 5, 64, 9)]


def test_rejection_moves_only_its_own_sequence() -> None:
    layout = make_layout(PaddedLayout)
    layout.align([Span(0, 0, [0] * 9, 0), Span(1, 0, [0] * 9, 0), Span(2, 0, [0] * 4, 0)])
    moved = record_moves(layout)
    # Sequence 1 lost two tokens; the others keep their alignment.
    layout.align([Span(0, 9, [0] * 3, 3), Span(1, 7, [0] * 3, 3), Span(2, 4, [0] * 3, 3)])
    assert moved == [(64, 64 + 2, 7)]


def test_the_slot_layout_moves_nothing() -> None:
    layout = make_layout(SlotLayout)
    assert layout.align([Span(0, 5, [0] * 3, 3), Span(2, 40, [0], 1)]) == [0, 0]
    assert set(LAYOUTS) == {"slots", "padded"}


def test_padding_is_not_a_token(engine: Engine, truth: list[torch.Tensor]) -> None:
    """A short sequence of end-of-sequence tokens, padded beside a long one, keeps its logits."""
    eos = engine.loaded.tokenizer.eos_token_ids[0]
    alone = engine.forward([Span(1, 0, [eos] * 5, 5)])
    engine.forward([Span(0, 0, random_tokens(90, 0), 0)])
    together = engine.forward([Span(0, 90, random_tokens(MAX_LENGTH, 0)[90:92], 2), Span(1, 0, [eos] * 5, 5)])
    assert torch.equal(together[2:], alone)
    assert torch.equal(together[:2], truth[0][90:92])
