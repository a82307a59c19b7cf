"""Tokens do not depend on drafts by the target's own multi-token prediction (MTP) layer, in a worker or carried."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from mixes import MAX_TOKENS, Case, assert_equal, make_prompt, make_request, play
from mtp_models import make_alike, save_mtp_target
from pair_service import serving_pair

KINDS = ((20, 4, None), (1, 3, None), (63, 2, 5), (64, 0, None), (17, 8, None), (130, 3, None))
"""Length of the prompt, k, and number of tokens before the client cancels."""
MIX = [
    Case(make_prompt((seed % 3, length)), MAX_TOKENS - seed, k, True, seed, cancelled)
    for seed, (length, k, cancelled) in enumerate(KINDS)
]
SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        "glm4_moe",
        "qwen3_5_text",
        *(pytest.param(name, marks=SLOW) for name in ("qwen3_next", "qwen3_5_moe_text")),
    ],
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_mtp_target(tmp_path_factory.mktemp(request.param), request.param)
    make_alike(folder)
    return folder


@pytest.mark.parametrize("is_carried", [True, False], ids=["carried", "worker"])
async def test_tokens_and_logits_are_those_of_plain_decoding(target: Path, is_carried: bool) -> None:
    worker: dict[str, Any] = {"max_sequences": 5, "max_model_len": 256, "threads": 1, "target_model": str(target)}
    options: dict[str, Any] = {"target_worker": {"draft": "mtp"}} if is_carried else {}
    draft = None if is_carried else Path("mtp")
    async with serving_pair(target, draft, worker=worker, max_num_seqs=5, max_batch_size=4, **options) as service:
        stub, expected = service.client.stub, list[list[int]]()
        for case in MIX:
            alone = make_request(Case(case.prompt, case.max_tokens, 0, case.ignore_eos, 0, None))
            expected.append(list((await stub.Generate(alone)).token_ids))
        requests = [make_request(Case(case.prompt, MAX_TOKENS, 4, True, 0, None)) for case in MIX]
        drafted = [each.speculative_decoding for each in await asyncio.gather(*map(stub.Generate, requests))]
        accepted = sum(each.num_accepted_draft_tokens for each in drafted)
        assert 0 < accepted < sum(each.num_draft_tokens for each in drafted)
        got = await asyncio.gather(*(play(service.client, case) for case in MIX))
        assert_equal(MIX, got, expected)
