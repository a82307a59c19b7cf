"""The fused pass matches the logits of transformers, and is batch-invariant."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import load_engine, random_tokens, round_weights, rows_that_differ, small_config
from transformers import AutoModelForCausalLM

from benchmarks.pair import save_tokenizer
from specpool.engine.cache.memory import weight_bytes
from specpool.engine.cache.spans import Span
from specpool.engine.config.architectures import RECURRENT_LAYERS
from specpool.engine.passes.attention import LibraryModel
from specpool.engine.passes.families import FAMILIES, LATENT, activation_of, is_fusable
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.kinds import SILU
from specpool.engine.passes.modules import can_prepack
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.native.panels import BFLOAT16
from specpool.engine.passes.rotary import BLOCK, RotaryTables
from specpool.engine.run.engine import Engine

THETA = {"rope_theta": 10_000.0}
WINDOW: dict[str, Any] = {"sliding_window": 24}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3": (
        "llama",
        {
            "rope_parameters": {
                **THETA, "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "yarn": (
        "llama",
        {"rope_parameters": {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "glm4, biased": ("glm4", {"attention_bias": True}),
    "seed_oss": ("seed_oss", {}),
    "mistral, window": ("mistral", WINDOW),
    "qwen2, window": ("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "ministral": ("ministral", {**WINDOW, "layer_types": MIXED}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3_text": ("gemma3_text", {**WINDOW, "layer_types": MIXED}),
    "mixtral": ("mixtral", {**WINDOW, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3_moe, not renormalized": ("qwen3_moe", {**EXPERTS, "num_experts": 8, "mlp_only_layers": [0]}),
    "glm4_moe": (
        "glm4_moe",
        {
            **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
            "n_shared_experts": 2, "use_qk_norm": True, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
        },
    ),
    "gpt_oss": ("gpt_oss", {**WINDOW, "num_local_experts": 8, "num_experts_per_tok": 3, "layer_types": MIXED}),
}  # fmt: skip


def save_random(folder: Path, architecture: str, changes: dict[str, Any]) -> Path:
    """Save a model with random norms and biases, too, and weights that bfloat16 represents exactly."""
    torch.manual_seed(0)
    config = small_config(architecture, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_router = name.endswith(("gate.weight", "router.weight"))
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.5 if is_router else 0.12)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return round_weights(folder)


def logits_of(engine: Engine) -> torch.Tensor:
    """Logits of a prompt and its continuation, and of another sequence."""
    tokens, other = random_tokens(60), random_tokens(9, seed=1)
    first = engine.forward([Span(2, 0, tokens[:40], 40), Span(5, 0, other[:1], 1)])
    rest = engine.forward([Span(5, 1, other[1:], 8), Span(2, 40, tokens[40:59], 19)])
    return torch.cat([first, rest, engine.forward([Span(2, 59, tokens[59:], 1)])])


SLOW = {"yarn", "mistral", "qwen2", "glm4", "seed_oss", "gemma", "ministral"}  # the others cover them
SLOW |= {"mistral, window", "qwen2, window", "mixtral", "qwen3_moe"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in VARIANTS]
)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The folder of a model, and the logits of transformers."""
    folder = save_random(tmp_path_factory.mktemp("variant"), *VARIANTS[request.param])
    library = load_engine(folder, fused=False)
    assert isinstance(library.forward_pass, LibraryModel)
    return folder, logits_of(library)


PASSES = {"torch": (FusedModel, "float32"), "native": (NativeModel, "float32"), "bfloat16": (NativeModel, "bfloat16")}


@pytest.mark.parametrize("kind", PASSES)
def test_logits_match_transformers_and_are_batch_invariant(variant: tuple[Path, torch.Tensor], kind: str) -> None:
    folder, expected = variant
    model, dtype = PASSES[kind]
    fused = load_engine(folder, native=model is NativeModel, dtype=dtype)
    assert isinstance(fused.forward_pass, model)
    torch.testing.assert_close(logits_of(fused), expected, atol=2e-5, rtol=1e-4)
    assert fused.bitwise
    assert rows_that_differ(fused) == 0


def test_every_family_is_tested() -> None:
    tested_elsewhere = RECURRENT_LAYERS.keys() | LATENT
    assert {architecture for architecture, _ in VARIANTS.values()} == FAMILIES - tested_elsewhere


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gpt2", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 2.0}}),
    ],
)
def test_other_models_are_not_fusable(architecture: str, changes: dict[str, Any]) -> None:
    assert not is_fusable(small_config(architecture, **changes))


@pytest.mark.parametrize(
    ("dtype", "native", "tied"), [("float32", True, True), ("float32", False, False), ("bfloat16", False, True)]
)
def test_no_weight_is_stored_twice(tmp_path: Path, dtype: str, native: bool, tied: bool) -> None:
    folder = save_random(tmp_path, "llama", {"tie_word_embeddings": tied, "vocab_size": 288})
    engine = load_engine(folder, dtype=dtype, native=native)
    assert sum(weight.numel() for weight in engine.loaded.model.parameters()) == engine.loaded.config.hidden_size
    if native:
        assert isinstance(engine.forward_pass, NativeModel)
        # Matrices stay in bfloat16, as saved. Each norm takes whole cache lines.
        norms = 5 * 64
        matrices = 2 * (engine.info().parameters - norms)
        assert engine.forward_pass.kinds == {BFLOAT16: matrices}
        assert 4 * norms <= weight_bytes(engine.forward_pass) - matrices <= 8 * norms
        return
    stored = weight_bytes(engine.forward_pass) // engine.facts.dtype.itemsize
    prepacked = can_prepack(engine.facts.dtype, engine.facts.device)
    head = 288 * 64 if tied and prepacked else 0  # embeddings cannot be looked up in it
    assert stored == engine.info().parameters + head


def test_the_rotary_tables_grow_with_the_longest_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpool.engine.passes.rotary.BLOCK", 16)
    folder = save_random(tmp_path, "qwen3", {})
    grown, library = load_engine(folder), load_engine(folder, fused=False)
    torch.testing.assert_close(logits_of(grown), logits_of(library), atol=2e-5, rtol=1e-4)
    assert rows_that_differ(grown) == 0


def test_the_bits_of_a_rotary_position_do_not_depend_on_the_longest_sequence(tmp_path: Path) -> None:
    rotary = AutoModelForCausalLM.from_config(small_config("llama", max_position_embeddings=20_000)).model.rotary_emb
    gradually, at_once = (RotaryTables(rotary, 16, torch.empty(0)) for _ in range(2))
    for length in (1, BLOCK + 1, 3 * BLOCK):
        tables = gradually(length)
        assert all(len(table) >= length for table in tables)
    assert all(map(torch.equal, gradually(1), at_once(3 * BLOCK)))
    positions = torch.tensor([[0, BLOCK - 1, BLOCK, 3 * BLOCK - 1]])
    cosines, _ = rotary(torch.empty(0), positions)
    torch.testing.assert_close(at_once(1)[0][positions[0]], cosines[0])


@pytest.mark.parametrize(("architecture", "key"), [("gemma", "hidden_act"), ("gemma2", "hidden_activation")])
def test_each_gemma_has_its_own_key_for_the_activation(architecture: str, key: str) -> None:
    """transformers ignores the other key."""
    other = {"hidden_act": "hidden_activation", "hidden_activation": "hidden_act"}[key]
    assert activation_of(small_config(architecture, **{other: "silu"})) != SILU
    assert activation_of(small_config(architecture, **{key: "silu"})) == SILU
