"""GGUF files of every architecture give the same bits as safetensors files, for sequences longer than the window."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_converter import convert
from gguf_files import edited_gguf
from tiny_models import (
    edited_weights,
    load_engine,
    random_tokens,
    refusal,
    rows_that_differ,
    save_model,
    small_config,
    transformers_logits,
)

from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.gguf_reader import GgufFile
from specpool.engine.models.weights import gguf_weights

LENGTH = 70
WINDOW: dict[str, Any] = {"sliding_window": 24}
FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM4_MOE = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True,
    "attention_bias": True, "n_group": 2, "topk_group": 1,
}  # fmt: skip
GEMMA = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16}
YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SHORT, LONG = [1 + number / 8 for number in range(8)], [2.0 + number for number in range(8)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": SHORT, "long_factor": LONG}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with a window": ("mistral", WINDOW),
    "llama with experts": ("mixtral", {**FOUR, "sliding_window": None}),
    "qwen2moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**FOUR, "num_experts": 4}),
    "gpt-oss": ("gpt_oss", {**FOUR, **WINDOW, "rope_parameters": {**YARN, "truncate": False}}),
    "glm4moe": ("glm4_moe", GLM4_MOE),
    "phi3": ("phi3", WINDOW),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, **WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {**GEMMA, **WINDOW, "num_hidden_layers": 6}),
    "starcoder2": ("starcoder2", {**WINDOW, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {"tie_word_embeddings": True}),
}
UNFUSED = {"qwen2moe", "olmoe", "phi3", "starcoder2", "gpt2"}
"""Architectures that take the slow pass, whose tests are slow too."""
NEITHER = {"gpt2"}  # not bit-exact in any format


def save(folder: Path, case: str, **changes: Any) -> Path:
    """Save a random model whose vectors are multiples of 1/256, so that 1 + w - 1 is w, as in published models."""
    family, own = FAMILIES[case]
    saved = save_model(folder / "saved", small_config(family, **{"vocab_size": 258, **own, **changes}))
    generator = torch.Generator().manual_seed(1)
    with edited_weights(saved) as weights:
        for weight in weights.values():
            if weight.dim() < 2:
                weight.add_(torch.randint(-64, 64, weight.shape, generator=generator) / 256)
    return saved


def logits(model: Path, **options: Any) -> torch.Tensor:
    return load_engine(model, max_model_len=80, **options).forward([Span(0, 0, random_tokens(LENGTH), LENGTH)])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in UNFUSED else []) for case in FAMILIES]
)
def test_files_give_the_bits_of_safetensors(tmp_path: Path, case: str) -> None:
    saved = save(tmp_path, case)
    engine = load_engine(convert(saved, tmp_path / "model.gguf"), max_model_len=80)
    plain = load_engine(saved, max_model_len=80)
    spans = [Span(0, 0, random_tokens(LENGTH), LENGTH)]
    actual = engine.forward(spans)
    assert torch.equal(actual, plain.forward(spans))
    assert engine.weights_fingerprint == plain.weights_fingerprint
    assert engine.numerics_fingerprint == plain.numerics_fingerprint
    torch.testing.assert_close(actual, transformers_logits(saved, random_tokens(LENGTH)), atol=1e-4, rtol=1e-4)
    if case not in NEITHER:
        assert engine.bitwise
        assert rows_that_differ(engine) == 0


def test_files_with_a_tensor_per_expert_are_read(tmp_path: Path) -> None:
    saved = save(tmp_path, "llama with experts", **WINDOW)
    apart = convert(saved, tmp_path / "apart.gguf", apart=True)
    assert "blk.0.ffn_gate.3.weight" in GgufFile(apart).tensors
    assert torch.equal(logits(apart), logits(saved))


@pytest.mark.slow
def test_phi3_files_with_long_and_short_factors_match_the_configuration(tmp_path: Path) -> None:
    rope = {**LONGROPE, "attention_factor": 1.25, "original_max_position_embeddings": 96}
    saved = save(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=96)
    file = convert(saved, tmp_path / "model.gguf")
    keys = {"phi3.rope.scaling.original_context_length": 96, "phi3.rope.scaling.attn_factor": 1.25}
    tensors = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
    arrays = {name: torch.tensor(factors).numpy() for name, factors in tensors.items()}
    assert torch.equal(logits(edited_gguf(file, tmp_path / "scaled.gguf", keys, arrays)), logits(saved))


@pytest.mark.parametrize(("case", "kind"), [("llama with experts", "Q6_K"), ("gpt-oss", "MXFP4"), ("gpt-oss", "Q8_0")])
def test_experts_are_dequantized_bit_for_bit(tmp_path: Path, case: str, kind: str) -> None:
    saved = save(tmp_path, case, hidden_size=256, intermediate_size=256)
    file = convert(saved, tmp_path / "model.gguf", kind_of=lambda name: kind if "_exps." in name else None)
    reader = gguf.GGUFReader(file)
    expected = {
        tensor.name: torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors
    }
    gate, up, down = (expected[f"blk.1.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    weights = gguf_weights(GgufFile(file), load_config(EngineOptions(model=str(file))))
    joined, after = (weights[f"model.layers.1.mlp.experts.{name}"][...] for name in ("gate_up_proj", "down_proj"))
    if case == "gpt-oss":
        joined = torch.cat([joined.mT[:, ::2], joined.mT[:, 1::2]], 1)
        after = after.mT
    assert torch.equal(joined, torch.cat([gate, up], 1))
    assert torch.equal(after, down)
    engine = load_engine(file, max_model_len=80)
    assert engine.bitwise
    was_dequantized = any("dequantized to float32: 4 bytes each" in note for note in engine.notes)
    assert was_dequantized == (case == "gpt-oss")  # the others stay quantized
    if not was_dequantized:
        expected = logits(file, weights="float32")
        torch.testing.assert_close(logits(file), expected, atol=1e-4, rtol=1e-4)


def test_multi_token_prediction_layers_are_ignored(tmp_path: Path) -> None:
    """The file's last blocks hold these layers, and block_count includes them."""
    saved = save(tmp_path, "glm4moe")
    file = convert(saved, tmp_path / "model.gguf", block_count=4, nextn_predict_layers=1)
    extra = {"blk.3.nextn.eh_proj.weight": torch.zeros(4, 4).numpy()}
    assert torch.equal(logits(edited_gguf(file, tmp_path / "more.gguf", {}, extra)), logits(saved))
    other = edited_gguf(file, tmp_path / "other.gguf", {}, {"blk.2.other.weight": torch.zeros(4).numpy()})
    assert "1 weights that the configured model does not use: blk.2.other.weight" in refusal(other)


def test_keys_that_differ_change_the_configuration(tmp_path: Path) -> None:
    file = convert(save(tmp_path, "gemma3"), tmp_path / "model.gguf")
    other = {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 500.0}
    config = load_config(EngineOptions(model=str(edited_gguf(file, tmp_path / "other.gguf", other))))
    assert config.layer_types == ["sliding_attention", "full_attention"] * 3
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 500.0
    assert config.rope_parameters["full_attention"]["rope_theta"] != 500.0


def test_a_configuration_beside_the_file_must_match(tmp_path: Path) -> None:
    saved = save(tmp_path, "llama with experts")
    expected, file = logits(saved), convert(saved, tmp_path / "model.gguf")
    (saved / "model.safetensors").unlink()
    shutil.copy(file, saved)
    assert torch.equal(logits(saved), expected)
    edited_gguf(file, saved / "model.gguf", {"llama.expert_used_count": 1})
    assert "num_experts_per_tok is 2, but the file's expert_used_count is 1" in refusal(saved)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama with experts", {"llama.expert_used_count": None}, "llama.expert_used_count is missing"),
    ("llama with experts", {"llama.expert_used_count": 5}, "num_experts_per_tok 5; it must be from 1 to its 4 experts"),
    ("llama with experts", {"llama.expert_count": 3}, "blk.0.ffn_gate_exps.weight [4, 96, 64]"),
    ("llama with experts", {"llama.expert_count": 2**31}, "llama.expert_count is 2147483648: it must be a positive"),
    ("llama with experts", {"llama.expert_feed_forward_length": 8}, "it must equal the feed_forward_length of 96"),
    ("llama with experts", {"llama.expert_gating_func": 2}, "llama.expert_gating_func is 2: "),
    ("llama with experts", {"llama.expert_weights_norm": False}, "llama.expert_weights_norm is False: "),
    ("llama with experts", {"llama.expert_weights_scale": 2.5}, "llama.expert_weights_scale is 2.5: "),
    ("llama with experts", {"llama.expert_shared_count": 1}, "llama.expert_shared_count is 1: "),
    ("llama with experts", {"llama.leading_dense_block_count": 1}, "llama.leading_dense_block_count is 1: "),
    ("llama with experts", {"llama.expert_group_count": 2}, "llama.expert_group_count is 2: "),
    ("glm4moe", {"glm4moe.expert_weights_norm": 1}, "glm4moe.expert_weights_norm is 1: it must be true or false"),
    ("glm4moe", {"glm4moe.expert_gating_func": 1}, "glm4moe.expert_gating_func is 1: "),
    ("glm4moe", {"glm4moe.nextn_predict_layers": 3}, "nextn_predict_layers is 3: it must be less than the block_count"),
    ("gpt-oss", {"gpt-oss.attention.sliding_window": None}, "gpt-oss.attention.sliding_window is missing"),
    ("gemma2", {"gemma2.final_logit_softcapping": -1.0}, "gemma2.final_logit_softcapping is -1.0: it must be"),
    ("gemma3", {"gemma3.attention.sliding_window_pattern": 0}, "gemma3.attention.sliding_window_pattern is 0: "),
    ("gemma3", {"gemma3.attention.sliding_window_pattern": [True] * 6}, "sliding_window_pattern is an array: only one"),
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("converted")
    return {
        case: convert(save(folder / case, case), folder / f"{case}.gguf") for case in {case for case, *_ in REFUSED}
    }


@pytest.mark.parametrize(("case", "keys", "reason"), REFUSED)
def test_keys_are_refused_by_name(
    tmp_path: Path, converted: dict[str, Path], case: str, keys: dict[str, Any], reason: str
) -> None:
    assert reason in refusal(edited_gguf(converted[case], tmp_path / "other.gguf", keys))


@pytest.mark.parametrize(
    ("name", "other", "reason"),
    [
        ("ffn_gate_exps.weight", (4, 96, 32), "do not hold 4 equal experts: blk.0.ffn_gate_exps.weight [4, 96, 32]"),
        ("ffn_gate_exps.weight", (6144,), "do not hold 4 equal experts: blk.0.ffn_gate_exps.weight [6144]"),
        ("ffn_down_exps.weight", (4, 96, 64), "experts.down_proj (of shape [4, 64, 96], not [4, 96, 64])"),
        ("ffn_gate_inp.weight", (5, 64), "mlp.gate.weight (of shape [4, 64], not [5, 64])"),
        ("attn_q.weight", (63, 64), "tensor blk.0.attn_q.weight has 63 rows for 4 heads"),
        ("ffn_up_exps.weight", None, "lack 1 of the model's weights: model.layers.0.mlp.experts.gate_up_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, converted: dict[str, Path], name: str, other: tuple[int, ...] | None, reason: str
) -> None:
    content = converted["llama with experts"].read_bytes()
    renamed = tmp_path / "renamed.gguf"
    renamed.write_bytes(content.replace(f"blk.0.{name}".encode(), f"blk.0.{name[:-1]}x".encode()))
    tensors = {} if other is None else {f"blk.0.{name}": torch.zeros(other).numpy()}
    assert reason in refusal(edited_gguf(renamed, tmp_path / "other.gguf", {}, tensors))


def test_unsupported_types_are_refused_before_weights_are_read(tmp_path: Path, converted: dict[str, Path]) -> None:
    extra = {"blk.0.some.weight": torch.zeros(4, dtype=torch.int32).numpy()}
    file = edited_gguf(converted["llama with experts"], tmp_path / "other.gguf", {}, extra)
    assert refusal(file).endswith("tensor blk.0.some.weight has the unsupported type I32")
