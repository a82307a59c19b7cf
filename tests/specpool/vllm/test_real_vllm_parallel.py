"""vLLM with drafts gives the same answers with two tensor-parallel ranks, and with LoRA requests in a batch.

Only `make test-vllm` runs this test.
"""

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import save_model, small_config
from transformers import PreTrainedConfig
from vllm_server import VllmServer, ask

from benchmarks.vllm_process import MAX_MODEL_LEN, draft_process

pytestmark = pytest.mark.vllm

TOKENS, RUNS, RANK = 48, 3, 8
PROMPTS = ["abc", "Once upon a time", "abc abc abc", "1, 2, 3, 4, 5"]
ADAPTER = "odd"


def save_adapter(folder: Path, config: PreTrainedConfig) -> Path:
    """Save a random LoRA adapter for all query and value projections."""
    torch.manual_seed(1)
    outputs = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, heads in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(RANK, config.hidden_size)
            weights[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(heads * config.head_dim, RANK)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": [*outputs], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


async def answers(server: VllmServer) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of concurrent answers to all prompts, without and with the adapter."""
    options = {"max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    async with server.client() as client:
        asked = [ask(client, model, prompt, **options) for model in (server.model, ADAPTER) for prompt in PROMPTS]
        ids = [choices[0].token_ids for choices in await asyncio.gather(*asked)]
    return ids[: len(PROMPTS)], ids[len(PROMPTS) :]


async def test_ranks_and_adapters(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The draft is the target itself, so its tokens are accepted without the adapter."""
    folder = tmp_path_factory.mktemp("models")
    config = small_config("llama", hidden_size=128, head_dim=32, max_position_embeddings=MAX_MODEL_LEN)
    model, adapter = save_model(folder / "model", config), save_adapter(folder / "adapter", config)
    flags = ["--tensor-parallel-size", "2", "--enable-lora", "--lora-modules", f"{ADAPTER}={adapter}"]
    # On the CPU, vLLM 0.32 applies the last slot's adapter to requests without one (vLLM pull request 48421).
    flags += ["--max-loras", "2"]
    with ExitStack() as stack:
        draft = stack.enter_context(draft_process(model, 1))
        plain, remote = (
            stack.enter_context(VllmServer(model, tmp_path_factory.mktemp("vllm"), address, *flags, cores="0|1"))
            for address in (None, draft.address)
        )
        truth = await answers(plain.wait_ready())
        remote.wait_ready()
        for _ in range(RUNS):
            assert await answers(remote) == truth
        assert truth[0] != truth[1]
        assert remote.counter("accepted") > 0
        assert remote.log.read_text().count("drafts for vLLM") == 1
