"""Sequences hold only the pages that they need, and wait if none is free."""

import asyncio
from pathlib import Path

import pytest
import torch
from mixes import make_prompt
from pair_service import serving_pair
from tiny_models import decode_alone, load_engine, random_tokens
from tiny_pair import MAX_MODEL_LEN

from specpool.engine.cache.spans import Span

PROMPTS = [make_prompt((seed, 10 + 7 * seed)) for seed in range(12)]
MAX_TOKENS = 10


def kv_memory(target: Path, positions: int) -> int:
    return positions * load_engine(target, max_sequences=1).info().kv_bytes_per_token


@pytest.mark.parametrize(
    ("prefix_caching", "positions", "max_rounds"),  # one by one, the requests would take 120 rounds
    [
        (True, MAX_MODEL_LEN, 60),
        pytest.param(False, 2 * MAX_MODEL_LEN, 40, marks=pytest.mark.slow),
    ],
)
async def test_short_sequences_share_the_cache(
    tiny_pair: tuple[Path, Path], prefix_caching: bool, positions: int, max_rounds: int
) -> None:
    worker = {"max_sequences": 12, "kv_memory": kv_memory(tiny_pair[0], positions)}
    async with serving_pair(tiny_pair[0], None, worker, max_num_seqs=12, prefix_caching=prefix_caching) as service:
        info = await service.client.server_info()
        assert (info.max_num_seqs, info.target.load.kv_positions_total) == (12, positions)
        requests = [service.client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        together = await asyncio.gather(*requests)
        info = await service.client.server_info()
        assert info.counters.rounds <= max_rounds
        assert info.counters.cache_misses == 0
        for prompt, response in zip(PROMPTS, together, strict=True):
            alone = await service.client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert list(response.token_ids) == list(alone.token_ids)
        await service.wait_idle()


@pytest.mark.parametrize("options", [{}, {"native": False}, {"fused": False}], ids=["native", "fused", "library"])
def test_where_pages_lie_changes_no_bit(tiny_pair: tuple[Path, Path], options: dict[str, bool]) -> None:
    engine, tokens = load_engine(tiny_pair[0], **options), random_tokens(41)
    expected = decode_alone(engine, tokens)
    page_size = engine.info().kv_positions_multiple
    for number in range(3):  # three sequences grow page by page, so that their pages alternate
        assert engine.slots.take(("a", number), 1) is not None
    for begin in range(0, 41, page_size):
        for number in range(3):
            engine.forward([Span(engine.slots["a", number].index, begin, tokens[begin : begin + page_size], 0)])
    columns = engine.layout.arena.columns_of(engine.slots["a", 1].index, 0, 41)
    assert columns[page_size] > columns[page_size - 1] + 1
    assert torch.equal(engine.forward([Span(engine.slots["a", 1].index, 40, tokens[-1:], 1)]), expected[-1:])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_short_neighbour_at_cache_end_hides_no_keys(tiny_pair: tuple[Path, Path], fused: bool, exact: bool) -> None:
    """One attention call reads as many columns of every sequence as the longest one has."""
    memory = kv_memory(tiny_pair[0], 2 * MAX_MODEL_LEN)
    engine = load_engine(tiny_pair[0], exact, native=False, fused=fused, max_sequences=16, kv_memory=memory)
    long, short = random_tokens(280), random_tokens(5, seed=1)
    lengths = [300, *[60] * 15]
    slots = [engine.slots.take(("c", i), length) for i, length in enumerate(lengths)]
    indexes = [slot.index for slot in slots if slot is not None]
    assert len(indexes) > 2
    engine.forward([Span(indexes[0], 0, long[:-1], 0), *(Span(index, 0, short[:-1], 0) for index in indexes[1:])])
    alone = engine.forward([Span(indexes[0], 279, long[-1:], 1)])[0]
    others = [Span(index, 4, short[-1:], 1) for index in indexes[1:]]
    together = engine.forward([*others, Span(indexes[0], 279, long[-1:], 1)])[-1]
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    assert not exact or torch.equal(together, alone)
