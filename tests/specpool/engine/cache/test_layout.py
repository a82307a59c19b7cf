"""Both KV layouts give the same bits; the padded one right-aligns its batch with as few moves as possible."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import decode_alone, load_engine, random_tokens

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.layout import PaddedLayout
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


# A round: for each participating sequence, how many tokens are fed and how many of them are rejected.
rounds = st.lists(
    st.dictionaries(st.integers(0, SEQUENCES - 1), st.tuples(st.integers(1, 40), st.integers(0, 8)), min_size=1),
    min_size=1,
    max_size=12,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=rounds)
def test_padded_logits_match_in_place_decoding_bit_for_bit(
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
        for (i, (fed, rejected)), actual in zip(round_.items(), rows, strict=True):
            assert torch.equal(actual, truth[i][cached[i] : cached[i] + fed])
            cached[i] += fed - min(rejected, fed)


@settings(max_examples=40)
@given(rounds=rounds)
def test_padding_never_accumulates_and_few_sequences_move(rounds: list[dict[int, tuple[int, int]]]) -> None:
    cpu = torch.device("cpu")
    arena = KVArena(2, 1, SEQUENCES * MAX_LENGTH, 1, torch.float32, cpu, (SEQUENCES, 1), MAX_LENGTH)
    for slot in range(SEQUENCES):
        arena.assign(slot, 0, [SEQUENCES - 1 - slot])
    layout = PaddedLayout(arena)
    cached, starts = [0] * SEQUENCES, [0] * SEQUENCES
    for round_ in rounds:
        spans = []
        for i, (fed, _) in round_.items():
            if cached[i] + fed > MAX_LENGTH:
                cached[i] = 0
            spans.append(Span(i, cached[i], [0] * fed, 0))
        right_edge, before = max(span.end for span in spans), arena.keys[1].clone()
        aligned = layout.align(spans)
        for span in aligned:
            assert span.offset == right_edge - span.end
            columns = arena.columns_of(span.slot, 0, MAX_LENGTH)
            if not span.start or span.offset == starts[span.slot]:
                assert torch.equal(arena.keys[1][:, columns], before[:, columns])
            starts[span.slot] = span.offset
            own = torch.tensor(columns[span.offset : span.offset + span.end])
            new = torch.arange(span.start, span.end)  # number n is cached at position n
            arena.write(1, own[span.start :], new.float()[:, None, None], -new.float()[:, None, None])
            assert arena.keys[1][0, own, 0].tolist() == list(range(span.end))
            cached[span.slot] = span.end - min(round_[span.slot][1], len(span.token_ids))


def test_padding_is_not_the_end_of_sequence_token(engine: Engine, truth: list[torch.Tensor]) -> None:
    """A short sequence of end-of-sequence tokens, padded beside a long one, keeps its logits."""
    eos = engine.loaded.tokenizer.eos_token_ids[0]
    alone = engine.forward([Span(1, 0, [eos] * 5, 5)])
    engine.forward([Span(0, 0, random_tokens(90, 0), 0)])
    together = engine.forward([Span(0, 90, random_tokens(MAX_LENGTH, 0)[90:92], 2), Span(1, 0, [eos] * 5, 5)])
    assert torch.equal(together[2:], alone)
    assert torch.equal(together[:2], truth[0][90:92])
