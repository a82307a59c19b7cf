"""A sharded target gives the tokens and logits of one device, also in rounds with drafts."""

import asyncio
from pathlib import Path

import pytest
from mixes import MAX_TOKENS, Case, assert_equal, make_prompt, make_request, play
from pair_service import LogitsTap, PairService, serving_pair
from tiny_pair import make_tiny_pair

from specpool.engine.run.engine import Engine
from specpool.v1.common_pb2 import EQUIVALENCE_BITWISE

KINDS = ((20, 4, None), (1, None, None), (63, 2, 5), (64, 0, None), (17, 8, None), (130, 3, None), (40, None, 0))
"""Length of the prompt, k, and number of tokens before the client cancels."""
MIX = [
    Case(make_prompt((seed % 3, length)), MAX_TOKENS - seed, k, seed % 2 == 0, seed, cancelled)
    for seed, (length, k, cancelled) in enumerate(KINDS)
]
WORKER = {"max_sequences": 5, "max_num_batched_tokens": 48, "threads": 1, "device": "cpu"}
WINDOW = {"max_num_seqs": 5, "max_batch_size": 4, "prefill_tokens": 16, "overlap": "on"}


async def engine_of(service: PairService) -> Engine:
    engine: Engine = await service.target.run(lambda backend: backend.engine)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
async def test_sharded_target_gives_the_tokens_of_one_device(ranks: int, tmp_path: Path) -> None:
    pair, seen, expected = make_tiny_pair(tmp_path, num_key_value_heads=3), dict[tuple[int, ...], bytes](), []
    async with serving_pair(*pair, worker=WORKER, **WINDOW) as service:
        LogitsTap(await engine_of(service), seen)
        for case in MIX:
            alone = make_request(Case(case.prompt, case.max_tokens, 0, case.ignore_eos, 0, None))
            expected.append(list((await service.client.stub.Generate(alone)).token_ids))
    async with serving_pair(*pair, worker=WORKER, target_worker={"tensor_parallel": ranks}, **WINDOW) as service:
        engine = await engine_of(service)
        tap, info = LogitsTap(engine, seen), (await service.client.model_info()).target
        assert info.equivalence == EQUIVALENCE_BITWISE
        assert (info.tensor_parallel, info.tensor_parallel_sums) == (ranks, "whole")
        for _ in range(2):
            got = await asyncio.gather(*(play(service.client, case) for case in MIX))
            assert_equal(MIX, got, expected)
        await service.wait_idle()
        await service.target.run(lambda backend: backend.engine.close())
        assert tap.compared > 5 * MAX_TOKENS
        assert not tap.different
