"""Sequences reserve only the KV cache they can need, and wait if it is not free."""

import asyncio
from pathlib import Path

import pytest
import torch
from mixes import make_prompt
from pair_service import serving_pair
from tiny_models import load_engine, random_tokens
from tiny_pair import MAX_MODEL_LEN

from specpool.engine.cache.spans import Span

PROMPTS = [make_prompt((seed, 10 + 7 * seed)) for seed in range(12)]
MAX_TOKENS = 10
MAX_TRIES = 5


def kv_memory(target: Path, positions: int) -> int:
    return positions * load_engine(target, max_sequences=1).info().kv_bytes_per_token


@pytest.mark.parametrize(
    ("prefix_caching", "positions", "max_rounds"),  # one after the other, the requests would take 120 rounds
    [
        (True, MAX_MODEL_LEN, 60),
        pytest.param(False, MAX_MODEL_LEN, 60, marks=pytest.mark.slow),
        pytest.param(False, 2 * MAX_MODEL_LEN, 40, marks=pytest.mark.slow),
        pytest.param(True, 2 * MAX_MODEL_LEN, 40, marks=pytest.mark.slow),
    ],
)
async def test_many_short_sequences_share_the_space_of_few_long_ones(
    tiny_pair: tuple[Path, Path], prefix_caching: bool, positions: int, max_rounds: int
) -> None:
    worker = {"max_sequences": 12, "kv_memory": kv_memory(tiny_pair[0], positions)}
    async with serving_pair(tiny_pair[0], None, worker, max_num_seqs=12, prefix_caching=prefix_caching) as service:
        info = await service.client.server_info()
        assert (info.max_num_seqs, info.target.load.kv_positions_total) == (12, positions)
        asking = [service.client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True) for prompt in PROMPTS]
        together = await asyncio.gather(*asking)
        info = await service.client.server_info()
        assert info.counters.rounds <= max_rounds
        assert info.counters.cache_misses == 0
        for prompt, response in zip(PROMPTS, together, strict=True):
            alone = await service.client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert list(response.token_ids) == list(alone.token_ids)
        await service.wait_idle()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"native": False}, {"fused": False}], ids=["native", "fused", "library"])
async def test_closing_gaps_changes_no_token(tiny_pair: tuple[Path, Path], options: dict[str, bool]) -> None:
    """Long and short sequences in turn, with drafts, in a cache that is nearly always full."""
    worker = {"max_sequences": 12, "kv_memory": kv_memory(tiny_pair[0], MAX_MODEL_LEN)}
    lengths = [5, 300, 12, 90, 3, 200, 41, 150, 8, 120, 60, 30]
    prompts = [make_prompt((seed, length)) for seed, length in enumerate(lengths)]
    async with serving_pair(*tiny_pair, {**worker, **options}, max_num_seqs=12) as service:
        moves: list[tuple[int, int, int]] = []
        target = service.target._backend
        assert target is not None
        extents = target.engine.layout.extents  # type: ignore[attr-defined]
        move = extents.move
        extents.move = lambda *columns: (moves.append(columns), move(*columns))
        alone = [
            await service.client.generate(prompt, max_tokens=MAX_TOKENS + i, num_speculative_tokens=0)
            for i, prompt in enumerate(prompts)
        ]
        # Gaps depend on the order of arrival; with the tiles of other passes so few sequences fit that none appear.
        for _ in range(1 if options else MAX_TRIES):
            asking = [service.client.generate(prompt, max_tokens=MAX_TOKENS + i) for i, prompt in enumerate(prompts)]
            together = await asyncio.gather(*asking)
            assert [list(response.token_ids) for response in together] == [list(one.token_ids) for one in alone]
            if moves:
                break
        assert moves or options, "the cache was never full"


async def test_heirs_of_a_long_extent_shrink_it(tiny_pair: tuple[Path, Path]) -> None:
    worker = {"max_sequences": 12, "kv_memory": kv_memory(tiny_pair[0], MAX_MODEL_LEN)}
    system = make_prompt((0, 50))
    async with serving_pair(tiny_pair[0], None, worker, max_num_seqs=12) as service:
        await service.client.generate(system, max_tokens=MAX_MODEL_LEN - 50, stop_token_ids=range(257))
        before = (await service.client.server_info()).counters.rounds
        asking = [service.client.generate((*system, *make_prompt((i, 5))), max_tokens=15) for i in range(1, 8)]
        await asyncio.gather(*asking)
        info = await service.client.server_info()
        assert info.counters.rounds - before <= 25
        assert info.counters.cache_misses == 0


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_a_short_neighbour_at_the_end_of_the_cache_hides_no_keys(
    tiny_pair: tuple[Path, Path], fused: bool, exact: bool
) -> None:
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
