"""Latent attention caches one vector per position, with the logits of transformers and the bits of plain decoding."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from own_drafts import Generation, Rounds
from tiny_models import (
    decode_alone,
    forget_all,
    load_engine,
    noisy_copy,
    random_tokens,
    refusal,
    round_weights,
    rows_that_differ,
    save_model,
    small_config,
    transformers_logits,
    vary,
)
from transformers import AutoConfig, AutoModelForCausalLM

from draft_worker.proposer import Proposer
from specpool.engine.cache.spans import Span
from specpool.engine.config.architectures import KIMI_LINEAR
from specpool.engine.models.facts import read_facts
from specpool.engine.passes.attention import LibraryModel
from specpool.engine.passes.families import LATENT as FAMILIES
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.native.panels import BFLOAT16
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import VerifyItem, VerifyRound
from target_worker.verifier import Verifier

SLOTS = 4
LATENT: dict[str, Any] = {
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4, "num_hidden_layers": 3,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_shared_experts": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain queries": ("deepseek_v2", {**EXPERTS, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "best experts rank groups": (
        "deepseek_v2",
        {
            **EXPERTS, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0, "attention_bias": True,
        },
    ),
    "scaled positions": (
        "deepseek_v3",
        {**EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "glm": ("glm4_moe_lite", {**EXPERTS, "rms_norm_eps": 1e-3}),
    "dense, pairs half a head apart": ("youtu", {"rope_interleave": False}),
}  # fmt: skip


def save_latent(folder: Path, family: str, changes: dict[str, Any]) -> Path:
    """Save a random model with latent attention, whose router clearly prefers some experts."""
    return vary(save_model(folder, small_config(family, **{**LATENT, **changes})), routers="gate.weight")


@pytest.mark.cpus
@pytest.mark.thorough
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers_and_are_batch_invariant(tmp_path: Path, variant: str) -> None:
    folder, tokens = save_latent(tmp_path, *VARIANTS[variant]), random_tokens(150)
    expected = transformers_logits(folder, tokens)
    for native, kind in ((False, FusedModel), (True, NativeModel)):
        engine = load_engine(folder, native=native)
        assert isinstance(engine.forward_pass, kind)
        prompt = engine.forward([Span(1, 0, tokens, 150)])
        assert torch.equal(prompt[:60], decode_alone(engine, tokens[:60]))
        torch.testing.assert_close(prompt, expected, atol=1e-4, rtol=1e-4)
        assert engine.bitwise
        assert rows_that_differ(engine) == 0


@pytest.mark.cpus
@pytest.mark.thorough
def test_branches_and_thread_counts_change_no_bit(tmp_path: Path) -> None:
    engine, tokens = load_engine(save_latent(tmp_path, *VARIANTS["glm"])), random_tokens(90)
    expected = decode_alone(engine, tokens)
    engine.forward([Span(2, 0, random_tokens(60, seed=1), 0)])
    for threads in (2, 3):
        torch.set_num_threads(threads)
        prompt = engine.forward([Span(1, 0, tokens[:50], 50), Span(2, 0, tokens[:20], 0)])
        branch = Span(2, 20, tokens[20:], 70, prefix_length=20, offset=40)
        rest = engine.forward([branch, Span(1, 50, tokens[50:], 40)])
        assert torch.equal(prompt, expected[:50])
        assert torch.equal(rest, torch.cat([expected[20:], expected[50:]]))


def test_sizes_that_fill_no_panel_run_on_torch_operations(tmp_path: Path) -> None:
    family, changes = VARIANTS["dense, pairs half a head apart"]
    engine = load_engine(save_latent(tmp_path, family, {**changes, "v_head_dim": 24}))
    assert isinstance(engine.forward_pass, FusedModel)
    assert engine.bitwise


def test_weights_stay_in_bfloat16_and_activations_fit_the_estimate(tmp_path: Path) -> None:
    folder = round_weights(save_latent(tmp_path, *VARIANTS["best experts rank groups"]))
    engine = load_engine(folder, max_num_batched_tokens=64)
    native: Any = engine.forward_pass
    assert native.kinds.keys() == {BFLOAT16}
    engine.forward([Span(1, 0, random_tokens(64), 64)])
    assert native._workspace.nbytes <= engine.info().activation_bytes


def test_int8_activations_are_refused(tmp_path: Path) -> None:
    folder = save_latent(tmp_path, *VARIANTS["dense, pairs half a head apart"])
    assert "a model without latent attention" in refusal(folder, activations="int8")


def test_sequences_may_move(tmp_path: Path) -> None:
    """With left padding, values that share the memory of keys must move once."""
    folder = save_latent(tmp_path, *VARIANTS["glm"])
    engine = load_engine(folder, kv_layout="padded", max_model_len=96)
    expected = transformers_logits(folder, random_tokens(60))
    engine.forward([Span(0, 0, random_tokens(30), 0), Span(1, 0, random_tokens(50, seed=1), 0)])
    rest = engine.forward([Span(0, 30, random_tokens(60)[30:], 30), Span(1, 50, random_tokens(1), 1)])
    torch.testing.assert_close(rest[:30], expected[30:], atol=1e-4, rtol=1e-4)


def test_without_the_fused_pass_keys_and_values_are_cached(tmp_path: Path) -> None:
    folder = save_latent(tmp_path, *VARIANTS["glm"])
    engines = [load_engine(folder, fused=fused, exact=False) for fused in (False, True)]
    assert isinstance(engines[0].forward_pass, LibraryModel)
    assert [engine.info().kv_bytes_per_token for engine in engines] == [3 * 2 * 4 * 32 * 4, 3 * 48 * 4]


HEADS = {"num_attention_heads": 16, "num_key_value_heads": 16}
SIZES = {
    "DeepSeek-V2-Lite": ("deepseek_v2", {"num_hidden_layers": 27, "hidden_size": 2048, **HEADS}, 331_776, 31_104),
    "DeepSeek-V3": ("deepseek_v3", {}, 5_996_544, 70_272),
    "GLM-4.7-Flash": ("glm4_moe_lite", {}, 962_560, 54_144),
}
"""The family, changes of its default configuration, and bytes of a position in bfloat16: expanded, and latent."""


@pytest.mark.parametrize("name", SIZES)
def test_a_position_takes_one_vector_per_layer(name: str) -> None:
    family, changes, expanded, latent = SIZES[name]
    config = AutoConfig.for_model(family, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    loaded: Any = SimpleNamespace(
        config=config, vocab_size=config.vocab_size, model=model, full=model, max_model_len=4096, output_ids=None
    )
    sizes = [read_facts(loaded, fused).kv_bytes_per_token(torch.bfloat16) for fused in (False, True)]
    assert sizes == [expanded, latent]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """A target, and a draft with nearly the same weights."""
    folder = save_latent(tmp_path_factory.mktemp("pair") / "target", *VARIANTS["scaled positions"])
    return load_engine(folder), load_engine(noisy_copy(folder, folder.with_name("draft")))


def test_tokens_with_drafts_equal_plain_decoding(pair: tuple[Engine, Engine]) -> None:
    target, draft = pair
    prompts = [tuple(random_tokens(length, seed=length)) for length in (1, 12, 40)]
    plain, drafted = ([Generation(number, prompt) for number, prompt in enumerate(prompts)] for _ in range(2))
    forget_all(target, SLOTS)
    Rounds(Verifier(target)).generate(plain, 0)
    forget_all(target, SLOTS)
    Rounds(Verifier(target, Proposer(draft))).generate(drafted, 4)
    assert [each.answer for each in drafted] == [each.answer for each in plain]
    accepted, verified = (sum(getattr(each, name) for each in drafted) for name in ("num_accepted", "num_verified"))
    assert 0 < accepted < verified


def test_a_cached_prefix_gives_the_same_token(pair: tuple[Engine, Engine]) -> None:
    target, prompt = pair[0], tuple(random_tokens(70))
    forget_all(target, SLOTS)
    verifier = Verifier(target)
    rounds = [VerifyRound("c", i, [VerifyItem(i, 0, prompt, cache_namespace=b"x")]) for i in (1, 2)]
    ((alone,),), ((shared,),) = (verifier.verify([round_]) for round_ in rounds)
    assert (alone.prefix_length, shared.prefix_length) == (0, 64)
    assert alone.token_ids == shared.token_ids


def test_every_family_is_tested() -> None:
    """`test_delta_nets` tests Kimi Linear, which has other layers, too."""
    assert {family for family, _ in VARIANTS.values()} == FAMILIES - {KIMI_LINEAR}
