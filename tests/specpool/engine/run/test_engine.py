"""The engine computes the model's logits, and a token gets the same bits in every batch."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import (
    decode_alone,
    load_engine,
    random_tokens,
    rows_that_differ,
    save_model,
    small_config,
    transformers_logits,
)
from tiny_pair import MAX_MODEL_LEN, tiny_config

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.attention_plan import plan_attention
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.packing import Shape, pack
from specpool.engine.run.engine import Engine, _chunks

# Lengths on both sides of the attention tiles that CPUs need (64, 128, 256), and small ones.
LONGEST = 264
interesting_lengths = st.sampled_from([1, 2, 7, 8, 9, 62, 63, 64, 65, 127, 128, *range(250, 258)]) | st.integers(1, 256)


@dataclass(frozen=True)
class Truth:
    """Sequences decoded alone, token by token."""

    token_ids: list[list[int]]
    logits: list[torch.Tensor]  # each [LONGEST, vocab_size]
    keys: list[list[torch.Tensor]]  # of each sequence and layer [kv_heads, LONGEST, head_dim]
    values: list[list[torch.Tensor]]


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[0])


@pytest.fixture(scope="module")
def truth(engine: Engine) -> Truth:
    token_ids = [random_tokens(LONGEST, seed) for seed in range(4)]
    logits, keys, values = [], [], []
    for tokens in token_ids:
        logits.append(decode_alone(engine, tokens))
        columns = engine.layout.arena.columns_of(0, 0, LONGEST)
        keys.append([layer[:, columns].clone() for layer in engine.layout.arena.keys])
        values.append([layer[:, columns].clone() for layer in engine.layout.arena.values])
    return Truth(token_ids, logits, keys, values)


def assert_same_cache(engine: Engine, truth: Truth, sequence: int, slot: int, length: int) -> None:
    for layer, (keys, values) in enumerate(zip(truth.keys[sequence], truth.values[sequence], strict=True)):
        columns = engine.layout.arena.columns_of(slot, 0, length)
        assert torch.equal(engine.layout.arena.keys[layer][:, columns], keys[:, :length])
        assert torch.equal(engine.layout.arena.values[layer][:, columns], values[:, :length])


# --- The model's own logits


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_prefill_and_decode_match_transformers(engine: Engine, tiny_pair: tuple[Path, Path], attention: str) -> None:
    tokens = random_tokens(90)
    expected = transformers_logits(tiny_pair[0], tokens, attention)
    prefill = engine.forward([Span(3, 0, tokens[:70], 70)])
    steps = [engine.forward([Span(3, i, [tokens[i]], 1)]) for i in range(70, 90)]
    torch.testing.assert_close(torch.cat([prefill, *steps]), expected, atol=1e-4, rtol=1e-4)


def test_no_spans_give_no_logits(engine: Engine) -> None:
    assert engine.forward([]).shape == (0, engine.vocab_size)
    assert engine.forward([Span(0, 0, [1, 2, 3], 0)]).shape == (0, engine.vocab_size)


# --- Batch invariance


@st.composite
def ragged_rounds(draw: st.DrawFn) -> list[tuple[int, int, int, int, int]]:
    """For each sequence: its index, slot, cached length, number of correct draft tokens, and number of wrong ones."""
    sequences = draw(st.permutations(range(4)))[: draw(st.integers(1, 4))]
    slots = draw(st.permutations(range(8)))
    rounds = []
    for sequence, slot in zip(sequences, slots, strict=False):
        cached = draw(interesting_lengths)
        right = draw(st.integers(0, min(8, LONGEST - cached - 1)))
        rounds.append((sequence, slot, cached, right, draw(st.integers(0, 8 - right))))
    return rounds


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=ragged_rounds(), limit=st.sampled_from([1, 2, 3, 7, 16, 512]), junk=st.integers(0, 256))
def test_verification_in_a_batch_equals_decoding_alone(
    engine: Engine,
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
    rounds: list[tuple[int, int, int, int, int]],
    limit: int,
    junk: int,
) -> None:
    """Prefill, verify a partly correct draft, overwrite the rejected part. Earlier examples leave the slots dirty."""
    monkeypatch.setattr(engine, "max_num_batched_tokens", 512)
    engine.forward([Span(slot, 0, truth.token_ids[i][:cached], 0) for i, slot, cached, _, _ in rounds])
    monkeypatch.setattr(engine, "max_num_batched_tokens", limit)
    spans = []
    for i, slot, cached, right, wrong in rounds:
        foreseen = truth.token_ids[i][cached : cached + 1 + right]
        spans.append(Span(slot, cached, [*foreseen, *[junk] * wrong], right + wrong + 1))
    rows = engine.forward(spans).split([span.num_logits for span in spans])
    for (i, slot, cached, right, _), logits in zip(rounds, rows, strict=True):
        assert torch.equal(logits[: right + 1], truth.logits[i][cached : cached + right + 1])
        assert_same_cache(engine, truth, i, slot, cached + right + 1)

    again = [(i, slot, cached + right + 1) for i, slot, cached, right, _ in rounds if cached + right + 1 < LONGEST]
    rows = engine.forward([Span(slot, at, [truth.token_ids[i][at]], 1) for i, slot, at in again]).split(1)
    for (i, slot, at), logits in zip(again, rows, strict=False):
        assert torch.equal(logits[0], truth.logits[i][at])
        assert_same_cache(engine, truth, i, slot, at + 1)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    limit=st.sampled_from([1, 2, 5, 8, 17, 64, 300]),
    num_logits=st.integers(0, 90),
)
def test_prefill_chunk_size_changes_neither_logits_nor_cache(
    engine: Engine,
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    limit: int,
    num_logits: int,
) -> None:
    monkeypatch.setattr(engine, "max_num_batched_tokens", limit)
    spans = [Span(7 - i, 0, truth.token_ids[i][:n], min(n, num_logits)) for i, n in enumerate(lengths)]
    rows = engine.forward(spans).split([span.num_logits for span in spans])
    for i, (length, logits) in enumerate(zip(lengths, rows, strict=True)):
        assert torch.equal(logits, truth.logits[i][length - len(logits) : length])
        assert_same_cache(engine, truth, i, 7 - i, length)


def test_the_last_position_can_be_used(engine: Engine) -> None:
    tokens = random_tokens(MAX_MODEL_LEN)
    prefill = engine.forward([Span(0, 0, tokens, 2)])
    engine.forward([Span(5, 0, tokens[:-2], 0)])
    steps = [engine.forward([Span(5, i, tokens[i : i + 1], 1)]) for i in (MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1)]
    assert torch.equal(torch.cat(steps), prefill)


@pytest.mark.parametrize("dirt", [0.0, 1e4, -1e30])
def test_previous_slot_contents_do_not_matter(engine: Engine, truth: Truth, dirt: float) -> None:
    engine.forward([Span(3, 0, random_tokens(256, seed=9), 0)])
    columns = engine.layout.arena.columns_of(3, 0, 256)
    for tensor in (*engine.layout.arena.keys, *engine.layout.arena.values):
        tensor[:, columns] = dirt
    for length in (1, 30, 256):
        assert torch.equal(engine.forward([Span(3, 0, truth.token_ids[0][:length], 1)])[0], truth.logits[0][length - 1])
    for tensor in (*engine.layout.arena.keys, *engine.layout.arena.values):
        tensor[:, columns] = 0.0


def test_a_pass_writes_only_its_own_slots(engine: Engine, truth: Truth) -> None:
    before = [tensor.clone() for tensor in (*engine.layout.arena.keys, *engine.layout.arena.values)]
    engine.forward([Span(1, 4, truth.token_ids[0][:13], 2), Span(6, 0, truth.token_ids[1][:3], 1)])
    for old, new in zip(before, (*engine.layout.arena.keys, *engine.layout.arena.values), strict=True):
        changed = (old != new).any(0).any(-1).nonzero().flatten().tolist()
        columns_of = engine.layout.arena.columns_of
        assert set(changed) <= {*columns_of(1, 4, 13), *columns_of(6, 0, 3)}


# --- Shapes, architectures and dtypes


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 4, 16), (4, 1, 16), (8, 2, 32), (5, 5, 24)],
    ids=["mha", "mqa", "gqa", "odd"],
)
def test_every_head_grouping_is_correct_and_bitwise(tmp_path: Path, heads: int, kv_heads: int, head_dim: int) -> None:
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    folder = save_model(tmp_path, tiny_config(hidden_size=heads * head_dim, num_hidden_layers=2, **shape))
    engine = load_engine(folder)
    tokens = random_tokens(40)
    torch.testing.assert_close(decode_alone(engine, tokens), transformers_logits(folder, tokens), atol=1e-4, rtol=1e-4)
    assert engine.bitwise
    assert rows_that_differ(engine) == 0


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        slow("phi3", {}),  # one projection for queries, keys and values
        ("gemma3_text", {"sliding_window": MAX_MODEL_LEN}),  # a rotary embedding for each type of layer
        ("gpt2", {}),  # learned positions
        ("mixtral", {}),  # a mixture of experts
    ],
)
def test_other_architectures_match_transformers(tmp_path: Path, architecture: str, changes: dict[str, object]) -> None:
    folder = save_model(tmp_path, small_config(architecture, **changes))
    engine = load_engine(folder)
    tokens = random_tokens(60)
    expected = transformers_logits(folder, tokens)
    torch.testing.assert_close(decode_alone(engine, tokens), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(engine.forward([Span(2, 0, tokens, 9)]), expected[-9:], atol=1e-4, rtol=1e-4)
    assert not engine.bitwise or rows_that_differ(engine) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_decodes_as_reported(tiny_pair: tuple[Path, Path], dtype: str) -> None:
    engine = load_engine(tiny_pair[0], dtype=dtype)
    assert engine.info().dtype == dtype
    compiled = isinstance(engine.forward_pass, NativeModel)
    assert engine.layout.arena.keys[0].dtype == (torch.float32 if compiled else getattr(torch, dtype))
    tokens = random_tokens(60)
    alone = decode_alone(engine, tokens)
    torch.testing.assert_close(alone.float(), transformers_logits(tiny_pair[0], tokens), atol=0.3, rtol=0.1)
    assert not engine.bitwise or rows_that_differ(engine) == 0


def test_an_overflow_does_not_affect_the_next_sequence(tiny_pair: tuple[Path, Path]) -> None:
    """An overflow in float16 must not reach the next sequence of the slot as NaN."""
    engine = load_engine(tiny_pair[0], dtype="float16")
    tokens = random_tokens(12)
    clean = engine.forward([Span(0, 0, tokens, 12)])
    cache = torch.full((20, 2, 16), torch.inf, dtype=torch.float16)
    cache[::2] = torch.nan
    for layer in range(3):
        engine.layout.arena.write(layer, torch.arange(5, 25), cache, cache)
    assert torch.equal(engine.forward([Span(0, 0, tokens, 12)]), clean)


# --- Description and memory


def test_info_describes_model_and_memory(engine: Engine, tiny_pair: tuple[Path, Path]) -> None:
    engine.forget_all()
    info = engine.info()
    assert (info.model, info.architecture, info.dtype, info.device) == (str(tiny_pair[0]), "llama", "float32", "cpu")
    assert (info.vocab_size, info.max_model_len) == (257, MAX_MODEL_LEN)
    assert info.parameters == sum(p.numel() for p in _parameters(tiny_pair[0]))
    assert info.kv_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert (info.slots_total, info.slots_in_use) == (8, 0)
    assert info.kv_bytes_total == sum(t.numel() * 4 for t in (*engine.layout.arena.keys, *engine.layout.arena.values))
    assert info.kv_bytes_total >= 8 * MAX_MODEL_LEN * info.kv_bytes_per_token
    assert info.kv_positions_total == info.kv_positions_free == info.kv_bytes_total // info.kv_bytes_per_token
    engine.slots.take(("c", 1), 60)
    assert engine.info().kv_positions_free == info.kv_positions_total - 64
    engine.slots.release([("c", 1)])


def test_less_memory_reduces_positions_but_not_sequences(tiny_pair: tuple[Path, Path]) -> None:
    full = load_engine(tiny_pair[0], max_sequences=4).info()
    few = load_engine(tiny_pair[0], max_sequences=4, kv_memory=full.kv_bytes_total // 2 + 5).info()
    assert (few.slots_total, few.kv_positions_total) == (4, full.kv_positions_total // 2)
    most = load_engine(tiny_pair[0], max_sequences=4, kv_memory=9 * full.kv_bytes_total).info()
    assert most.kv_positions_total == full.kv_positions_total


def _parameters(folder: Path) -> list[torch.Tensor]:
    return list(load_file(folder / "model.safetensors").values())


# --- Packing


spans_of_any_kind = st.lists(
    st.tuples(st.integers(0, 100), st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=6
).map(
    lambda sizes: [
        Span(slot, start, list(range(slot * 100, slot * 100 + count)), min(count, logits))
        for slot, (start, count, logits) in enumerate(sizes)
    ]
)


LOGICAL = 1000


def scattered_arena(slots: int, pages: int, page_size: int = 16) -> KVArena:
    """Return an arena with scattered pages, in which logical column c of slot s holds the key LOGICAL * s + c."""
    tables = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(1)).view(slots, pages)
    columns = tables.numel() * page_size
    arena = KVArena(1, 1, columns, 1, torch.float32, torch.device("cpu"), (slots, pages), page_size)
    for slot, held in enumerate(tables.tolist()):
        arena.assign(slot, 0, held)
        logical = torch.arange(pages * page_size)
        arena.keys[0][0, arena.columns_of(slot, 0, len(logical)), 0] = LOGICAL * slot + logical.float()
    return arena


@st.composite
def spans_with_branches(draw: st.DrawFn) -> list[Span]:
    """Spans, some of which are branches."""
    return [
        replace(span, prefix_length=draw(st.integers(0, span.start)), offset=draw(st.integers(0, 300)))
        for span in draw(spans_of_any_kind)
    ]


@given(spans=spans_with_branches(), limit=st.integers(1, 40))
def test_chunking_keeps_every_token_and_logit_in_order(spans: list[Span], limit: int) -> None:
    chunks = _chunks(spans, limit)
    assert all(0 < sum(len(piece.token_ids) for piece in chunk) <= limit for chunk in chunks)
    assert all(sum(len(p.token_ids) for p in chunk) == limit for chunk in chunks[:-1]), "room was left"
    pieces = [piece for chunk in chunks for piece in chunk]
    for span in spans:
        mine = [piece for piece in pieces if piece.slot == span.slot]
        assert [token for piece in mine for token in piece.token_ids] == span.token_ids
        assert {(piece.prefix_length, piece.offset) for piece in mine} == {(span.prefix_length, span.offset)}
        assert [position for p in mine for position in range(p.start, p.end)] == list(range(span.start, span.end))
        wanted = [position for p in mine for position in range(p.end - p.num_logits, p.end)]
        assert wanted == list(range(span.end - span.num_logits, span.end))
    assert [piece.slot for piece in pieces] == sorted(piece.slot for piece in pieces)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spans=spans_of_any_kind,
    slots=st.permutations(range(8)),
    tiles=st.sampled_from([Tiles(), Tiles(2, 8, 8, 64)]),
    padded=st.booleans(),
)
def test_a_packed_token_attends_to_its_own_prefix(
    engine: Engine, spans: list[Span], slots: list[int], tiles: Tiles, padded: bool
) -> None:
    starts = [max(span.end for span in spans) - span.end if padded else 0 for span in spans]
    spans = [
        Span(slots[i], span.start, span.token_ids, span.num_logits, offset=start)
        for i, (span, start) in enumerate(zip(spans, starts, strict=True))
    ]
    start_of = {span.slot: span.offset for span in spans}
    arena = scattered_arena(slots=8, pages=32)
    batch = pack(spans, arena, lambda needed: Shape(tiles.rows(needed.rows), needed.tiles, needed.logits + 1))
    plan = plan_attention(spans, arena, tiles, query_groups=3)
    places = [(span.slot, position) for span in spans for position in range(span.start, span.end)]
    assert batch.tokens == len(places)
    assert len(batch.input_ids) == len(batch.positions) == tiles.rows(len(places))
    assert batch.input_ids[: batch.tokens].tolist() == [token for span in spans for token in span.token_ids]
    assert batch.positions[: batch.tokens].tolist() == [position for _, position in places]
    wanted = [(s.slot, position) for s in spans for position in range(s.end - s.num_logits, s.end)]
    assert [places[row] for row in batch.logit_rows[: batch.num_logits].tolist()] == wanted

    assert arena.keys[0][0, plan.columns[: batch.tokens], 0].tolist() == [
        LOGICAL * slot + start_of[slot] + position for slot, position in places
    ]

    if all(len(span.token_ids) <= 8 for span in spans):
        assert len(plan.calls) == (len(set(starts)) if tiles.exact else 1)
    attended = []
    results = {row: packed for packed, row in enumerate(plan.result_rows[: batch.tokens].tolist())}
    at = 0
    for call in plan.calls:
        kv_length = call.kv_length
        assert kv_length % tiles.kv == 0
        columns = call.attended(arena.keys[0])[:, 0, :, 0].int().tolist()
        assert all(found == list(range(found[0], found[0] + kv_length)) for found in columns)
        assert call.query_index.shape[1] % tiles.query == 0
        length = call.query_index.shape[1]
        masks = torch.ones(1, 1, 3 * length, kv_length, dtype=torch.bool) if call.mask is None else call.mask
        masks = masks.expand(len(columns), -1, -1, -1)
        here = range(at, at + call.query_index.numel())
        at = here.stop
        for row in results.keys() & set(here):
            packed = results[row]
            slot, position = places[packed]
            member, query = divmod(row - here.start, length)
            assert call.query_index[member, query] == packed
            first = LOGICAL * slot + start_of[slot] - columns[member][0]
            assert first == 0 or not tiles.exact
            mask = masks[member, 0].reshape(3, length, -1)[:, query]
            assert mask.sum(-1).tolist() == [position + 1] * 3
            assert mask[:, first : first + position + 1].all()
        assert masks.any(-1).all(), "a query row that sees nothing would be NaN"
        attended += [results[row] for row in results.keys() & set(here)]
    assert sorted(attended) == list(range(batch.tokens))
    assert len(plan.result_rows) == len(batch.input_ids)


@settings(max_examples=50)
@given(spans=spans_with_branches(), rows_per_tile=st.integers(1, 9))
def test_attention_tiles_cover_the_rows_of_each_sequence(spans: list[Span], rows_per_tile: int) -> None:
    arena = scattered_arena(slots=8, pages=32)
    batch = pack(spans, arena, lambda needed: Shape(*(size + 3 for size in needed)), rows_per_tile, repeats=False)
    padding = batch.rows - batch.tokens
    assert batch.slots.tolist() == [span.slot for span in spans for _ in span.token_ids] + [-1] * padding
    branches = [(span.prefix_length, span.offset) for span in spans for _ in span.token_ids if span.offset]
    numbers = zip(batch.prefix_lengths.tolist(), batch.offsets.tolist(), strict=True)
    assert [(prefix_length, offset) for prefix_length, offset in numbers if offset] == branches
    tiles = [
        range(begin, begin + size) for begin, size in zip(batch.tile_begins, batch.tile_sizes, strict=True) if size
    ]
    assert [row for tile in tiles for row in tile] == [*range(batch.tokens)]
    ends = {batch.tokens} | {sum(len(span.token_ids) for span in spans[:i]) for i in range(len(spans))}
    for tile in tiles:
        assert len(tile) == rows_per_tile or tile.stop in ends
        assert len({int(batch.slots[row]) for row in tile}) == 1
