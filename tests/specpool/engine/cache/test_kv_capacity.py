"""Sequences reserve only the KV cache they can need, and wait if it is not free."""

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
def test_closing_gaps_changes_no_bit(tiny_pair: tuple[Path, Path], options: dict[str, bool]) -> None:
    # The tile depends on the processor.
    tile = load_engine(tiny_pair[0], max_sequences=1, exact=False, **options).info().kv_positions_multiple
    quarter = max(MAX_MODEL_LEN // 4, tile)
    engine = load_engine(tiny_pair[0], kv_memory=kv_memory(tiny_pair[0], 4 * quarter), **options)
    moves: list[tuple[int, int, int]] = []
    engine.layout.arena.before_move = lambda *move: moves.append(move)
    tokens = random_tokens(41)
    expected = decode_alone(engine, tokens)
    slots = [engine.slots.take(("a", i), columns) for i, columns in enumerate((quarter, 2 * quarter, quarter))]
    assert slots[1] is not None
    engine.forward([Span(slots[1].index, 0, tokens[:-1], 0)])
    engine.slots.release([("a", 0), ("a", 2)])
    assert engine.slots.take(("a", 3), 2 * quarter) is not None
    assert [count for _, _, count in moves] == [slots[1].capacity]
    assert torch.equal(engine.forward([Span(slots[1].index, 40, tokens[-1:], 1)]), expected[-1:])


async def test_inherited_extents_shrink(tiny_pair: tuple[Path, Path]) -> None:
    worker = {"max_sequences": 12, "kv_memory": kv_memory(tiny_pair[0], MAX_MODEL_LEN)}
    system = make_prompt((0, 50))
    async with serving_pair(tiny_pair[0], None, worker, max_num_seqs=12) as service:
        await service.client.generate(system, max_tokens=MAX_MODEL_LEN - 50, stop_token_ids=range(257))
        before = (await service.client.server_info()).counters.rounds
        requests = [service.client.generate((*system, *make_prompt((i, 5))), max_tokens=15) for i in range(1, 8)]
        await asyncio.gather(*requests)
        info = await service.client.server_info()
        assert info.counters.rounds - before <= 25
        assert info.counters.cache_misses == 0


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
