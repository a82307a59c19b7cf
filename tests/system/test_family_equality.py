"""Exactness of families with windows, soft caps, sinks and experts, with drafts that are often wrong."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from delta_nets import DELTA_NET_SIZES, save_delta_net
from mixes import MAX_TOKENS, Case, assert_equal, make_prompt, make_request, play
from pair_service import LogitsTap, running_arrangement, serving_pair
from tiny_models import noisy_copy, save_model, small_config

from specpool.v1.common_pb2 import EQUIVALENCE_BITWISE

KINDS = ((20, 4, None), (1, 3, None), (63, 2, 5), (64, 0, None), (17, 8, None), (130, 3, None), (40, None, 0))
"""Length of the prompt, k, and number of tokens before the client cancels."""
MIX = [
    Case(make_prompt((seed % 3, length)), MAX_TOKENS - seed, k, True, seed, cancelled)
    for seed, (length, k, cancelled) in enumerate(KINDS)
]


EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
SIZED_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "q_lora_rank": 48,
    "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip
WINDOW = {"sliding_window": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "gemma2": {**WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {**WINDOW, **EXPERTS},
    "mixtral": EXPERTS | {"sliding_window": None},
    "qwen3_moe": SIZED_EXPERTS,
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "qwen3_next": {**DELTA_NET_SIZES, **SIZED_EXPERTS, "shared_expert_intermediate_size": 48},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_and_logits_are_those_of_plain_decoding(tmp_path: Path, family: str) -> None:
    worker = {"max_sequences": 5, "max_model_len": 256, "threads": 1}
    target = save_model(tmp_path / "target", small_config(family, **FAMILIES[family]))
    draft = noisy_copy(target, tmp_path / "draft")
    async with serving_pair(target, draft, worker=worker, max_num_seqs=5, max_batch_size=4) as service:
        stub, tap = service.client.stub, LogitsTap(service.target.backend.engine)
        assert (await service.client.model_info()).target.equivalence == EQUIVALENCE_BITWISE
        expected = []
        for case in MIX:
            alone = make_request(Case(case.prompt, case.max_tokens, 0, case.ignore_eos, 0, None))
            expected.append(list((await stub.Generate(alone)).token_ids))
        drafted = await stub.Generate(make_request(Case(MIX[0].prompt, MAX_TOKENS, 4, True, 0, None)))
        assert 0.05 < drafted.speculative_decoding.draft_acceptance_rate < 0.95
        for _ in range(2):
            got = await asyncio.gather(*(play(service.client, case) for case in MIX))
            assert_equal(MIX, got, expected)
        assert tap.compared > MAX_TOKENS
        assert not tap.different


@pytest.mark.parametrize(
    "arrangement", ["branches", "carried draft", pytest.param("chosen drafts", marks=pytest.mark.slow)]
)
def test_a_recurrent_draft_equal_to_its_target_is_always_right(tmp_path: Path, arrangement: str) -> None:
    """Its states are those of the target after every round, in batches and after long prompts."""
    model = save_delta_net(tmp_path)
    options = {"max_num_seqs": 5, "prefill_tokens": 32, "draft_method": "model", "num_speculative_tokens": 3}
    with running_arrangement(arrangement, model, model, **options) as (runner, service):
        requests = [
            make_request(Case(make_prompt((seed, 20 * seed + 3)), MAX_TOKENS, 3, True, 0, None)) for seed in range(6)
        ]
        for request in requests[::2]:
            request.sampling_params.temperature = 1.0

        async def ask() -> None:
            await asyncio.gather(*map(service.client.stub.Generate, requests))

        runner.run(ask())
        counters = runner.run(service.client.server_info()).counters
    assert counters.accepted_draft_tokens == counters.draft_tokens > 2 * MAX_TOKENS
    assert counters.cache_misses == 0
