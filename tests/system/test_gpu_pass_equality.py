"""Exactness with the GPU pass in both workers: CUDA graph replay and the draft loop."""

import asyncio
from pathlib import Path

import pytest
from interpreted_kernels import imitate_graphs
from mixes import MAX_TOKENS, Case, assert_equal, make_prompt, make_request, play
from pair_service import serving_pair

from specpool.engine.run.engine import Engine
from specpool.v1.common_pb2 import EQUIVALENCE_BITWISE

# Prompt length, num_draft_tokens, and generated tokens after which the client cancels.
KINDS = ((20, 4, None), (1, None, None), (63, 2, 5), (64, 0, None), (17, 8, None), (130, 3, None), (40, None, 0))
MIX = [
    Case(make_prompt((seed % 3, length)), MAX_TOKENS - seed, k, seed % 2 == 0, seed, cancelled)
    for seed, (length, k, cancelled) in enumerate(KINDS)
]
Pair = tuple[Path, Path]


@pytest.mark.slow
async def test_tokens_are_those_of_plain_decoding(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_graphs, drafted = imitate_graphs(monkeypatch), 0
    draft = Engine.draft

    def counting(engine: Engine, *arguments: object) -> object:
        nonlocal drafted
        drafted += 1
        return draft(engine, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "draft", counting)
    worker = {"native": False, "max_sequences": 5, "max_model_len": 256, "threads": 1}
    async with serving_pair(*tiny_pair, worker=worker, max_num_seqs=5, max_batch_size=4, prefill_tokens=16) as service:
        assert (await service.client.model_info()).target.equivalence == EQUIVALENCE_BITWISE
        expected = []
        for case in MIX:
            alone = make_request(Case(case.prompt, case.max_tokens, 0, case.ignore_eos, 0, None))
            expected.append(list((await service.client.stub.Generate(alone)).token_ids))
        for _ in range(2):
            got = await asyncio.gather(*(play(service.client, case) for case in MIX))
            assert_equal(MIX, got, expected)
    assert drafted > 10
    assert fake_graphs.replayed > fake_graphs.captured > 2
