"""Weights as stored equal those of transformers, and give the logits of dequantized weights bit for bit.

Unless a test says otherwise, engines have float32 activations, because int8 activations change the bits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import save_random_gguf
from test_embedded_pair import random_trained
from tiny_models import load_engine, random_tokens, rows_that_differ
from transformers import AutoModelForCausalLM

from specpool.distill.rounding import round_matrix
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.draft_folder import save_draft
from specpool.engine.models.draft_weights import load_compact, save_compact
from specpool.engine.models.facts import named_weights
from specpool.engine.models.loading import load_model
from specpool.engine.models.stored_model import build_stored_model
from specpool.engine.models.stored_weights import stored_weights
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.run.engine import Engine
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor

K_QUANTS = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8}


def alternate(*qtypes: str | None) -> Callable[[str], str | None]:
    """Give neighbouring tensors different quantization types."""
    return lambda name: qtypes[sum(name.encode()) % len(qtypes)]


def mix(name: str) -> str | None:
    """Types as in common files: mostly Q4_K, some Q6_K, and one Q5_K, which is dequantized."""
    if name == "model.layers.1.mlp.up_proj.weight":
        return "Q5_K"
    return "Q6_K" if any(part in name for part in ("v_proj", "down_proj", "lm_head", "embed")) else "Q4_K"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_gguf(tmp_path_factory.mktemp("mixed"), mix, **K_QUANTS)


@pytest.fixture(scope="module")
def quantized(mixed: Path) -> Engine:
    return load_engine(mixed, activations="float32")


def transformers_weights(file: Path) -> dict[str, torch.Tensor]:
    """Weights dequantized by transformers."""
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).state_dict()


def our_stored_weights(file: Path) -> dict[str, Any]:
    """Weights as stored, by their transformers names."""
    options = EngineOptions(model=str(file))
    config = load_config(options)
    stored = stored_weights(options, config)
    assert stored is not None
    model, report = build_stored_model(stored, config)
    assert not any(report.values())
    return named_weights(model)


def logits(engine: Engine) -> torch.Tensor:
    """Logits of prompts and decode steps in ragged batches."""
    tokens = random_tokens(90)
    first = engine.forward([Span(0, 0, tokens[:40], 3), Span(1, 0, tokens[50:53], 1), Span(2, 0, tokens[:1], 1)])
    second = engine.forward([Span(1, 3, tokens[5:9], 2), Span(0, 40, tokens[40:80], 40), Span(2, 1, tokens[1:2], 1)])
    return torch.cat([first, second, engine.forward([Span(0, 80, tokens[80:81], 1)])])


# --- Weights


@pytest.mark.parametrize(
    ("architecture", "qtype_of", "changes"),
    [
        ("llama", alternate("Q4_0", "Q4_1", "Q8_0", None), {}),
        ("llama", alternate("Q5_0", "Q5_1", "Q8_0"), {"tie_word_embeddings": True, "num_attention_heads": 8}),
        ("llama", mix, K_QUANTS),
        ("qwen2", alternate("Q4_1", "Q8_0", "Q5_0"), {}),
        # transformers 5.17 does not read the head size from such files.
        ("qwen3", alternate("Q4_K", "Q6_K", "Q8_0"), {**K_QUANTS, "head_dim": 128, "tie_word_embeddings": True}),
    ],
    ids=["llama", "tied llama", "mixed llama", "qwen2", "tied qwen3"],
)
def test_gguf_weights_match_transformers_bit_for_bit(
    tmp_path: Path, architecture: str, qtype_of: Callable[[str], str | None], changes: dict[str, Any]
) -> None:
    file = save_random_gguf(tmp_path, qtype_of, architecture, **changes)
    expected, weights = transformers_weights(file), our_stored_weights(file)
    assert weights.keys() == expected.keys()
    assert any("bias" in name for name in weights) == (architecture == "qwen2")
    for name, weight in weights.items():
        qtype = qtype_of(name) if weight.shape[1:] else None
        tied = name == "lm_head.weight" and changes.get("tie_word_embeddings")
        assert tied or isinstance(weight, Quantized) == (qtype not in (None, "Q5_K"))
        assert tied or not isinstance(weight, Quantized) or weight.qtype.name == qtype
        assert as_tensor(weight).dtype == torch.float32
        assert torch.equal(as_tensor(weight), expected[name]), name


# --- Engines


def test_quantized_engine_matches_dequantized_bit_for_bit(mixed: Path, quantized: Engine) -> None:
    dense = load_engine(mixed, weights="float32")
    assert isinstance(quantized.forward_pass, NativeModel)
    assert isinstance(dense.forward_pass, NativeModel)
    assert quantized.forward_pass.kinds.keys() == {"Q4_K", "Q6_K", "FLOAT32"}
    assert dense.forward_pass.kinds.keys() == {"FLOAT32"}
    assert quantized.bitwise
    assert dense.bitwise
    assert torch.equal(logits(quantized), logits(dense))
    assert rows_that_differ(quantized) == 0
    assert quantized.weights_fingerprint == dense.weights_fingerprint
    assert quantized.numerics_fingerprint == dense.numerics_fingerprint != ""
    assert quantized.info().weight_bytes < dense.info().weight_bytes / 3
    assert quantized.info().parameters == dense.info().parameters


@pytest.mark.slow
def test_int8_activations_change_logits_little(mixed: Path, quantized: Engine) -> None:
    engine = load_engine(mixed, activations="int8")
    assert engine.bitwise
    assert rows_that_differ(engine) == 0
    assert engine.weights_fingerprint == quantized.weights_fingerprint
    difference = (logits(engine) - logits(quantized)).norm() / logits(quantized).norm()
    assert difference < 0.1


def test_notes_name_dequantized_weights(mixed: Path, quantized: Engine, tmp_path: Path) -> None:
    assert quantized.notes == ["Q5_K weights (tensors: 1) were dequantized to float32: 4 bytes each"]
    dense = load_model(EngineOptions(model=str(mixed), device="cpu", weights="float32"))
    assert dense.notes == ("GGUF weights were dequantized to float32: 4 bytes each",)
    file = save_random_gguf(tmp_path, lambda name: None)
    assert load_model(EngineOptions(model=str(file), device="cpu")).notes == ()


def test_mixed_types_in_one_gemm_match_dequantized_bit_for_bit(tmp_path: Path) -> None:
    """The fused QKV GEMM has parts of 96 and 48 outputs, and the head is tied."""
    changes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}
    file = save_random_gguf(tmp_path, alternate("Q4_1", "Q8_0"), "qwen2", **changes)
    engine = load_engine(file, activations="float32")
    assert isinstance(engine.forward_pass, NativeModel)
    assert engine.forward_pass.kinds.keys() == {"Q4_1", "Q8_0", "FLOAT32"}
    dense = load_engine(file, weights="float32")
    assert torch.equal(logits(engine), logits(dense))
    assert engine.weights_fingerprint == dense.weights_fingerprint


@pytest.mark.parametrize(
    ("options", "compiler", "note"),
    [
        ({"native": False}, True, "GGUF weights were dequantized to float32: 4 bytes each"),
        ({"fused": False}, True, "GGUF weights were dequantized to float32: 4 bytes each"),
        ({}, False, "quantized weights"),
    ],
    ids=["torch", "library", "no compiler"],
)
def test_uncompiled_passes_dequantize_weights(
    mixed: Path, quantized: Engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], compiler: bool, note: str
) -> None:
    if not compiler:
        monkeypatch.setenv("CC", "no-such-compiler")
    engine = load_engine(mixed, **options)
    assert not isinstance(engine.forward_pass, NativeModel)
    assert engine.bitwise
    assert engine.weights_fingerprint == quantized.weights_fingerprint
    torch.testing.assert_close(logits(engine), logits(quantized), atol=1e-4, rtol=1e-4)
    assert any(note in text for text in engine.notes)


def test_other_dtypes_dequantize_weights(mixed: Path) -> None:
    engine = load_engine(mixed, dtype="bfloat16")
    assert isinstance(engine.forward_pass, NativeModel)
    assert engine.forward_pass.kinds.keys() == {"BFLOAT16"}
    assert "GGUF weights were dequantized to bfloat16: 2 bytes each" in engine.notes
    assert engine.bitwise
    assert isinstance(load_engine(mixed, dtype="float16", exact=False).forward_pass, FusedModel)


# --- Trained drafts


@pytest.mark.parametrize("kind", ["INT8", pytest.param("Q4_1", marks=pytest.mark.slow)])
def test_a_draft_keeps_its_weights_and_the_embeddings_of_its_target(tmp_path: Path, kind: str) -> None:
    target = save_random_gguf(tmp_path, lambda name: "Q8_0", num_hidden_layers=3)
    trained: dict[str, Weight] = {**random_trained(target, 70)}
    if kind == "Q4_1":
        for name, weight in random_trained(target, 70).items():
            if weight.dim() == 2:
                trained[name] = round_matrix(weight, torch.eye(weight.shape[1]))
    save_compact(tmp_path / "trained", trained)
    trained = load_compact(tmp_path / "trained")
    save_draft(tmp_path / "draft", str(target), trained)
    draft = load_engine(tmp_path / "draft", activations="float32")
    dense = load_engine(tmp_path / "draft", weights="float32")
    rounded = load_engine(tmp_path / "draft", activations="int8")
    assert draft.loaded.output_ids is not None
    assert draft.loaded.output_ids.tolist() == list(range(70))
    assert isinstance(draft.forward_pass, NativeModel)
    assert isinstance(dense.forward_pass, NativeModel)
    assert isinstance(rounded.forward_pass, NativeModel)
    assert draft.forward_pass.kinds.keys() == rounded.forward_pass.kinds.keys() == {kind, "Q8_0"}
    assert dense.forward_pass.kinds.keys() == {"FLOAT32"}
    assert draft.notes == []
    assert dense.notes == ["quantized weights were dequantized to float32: 4 bytes each"]
    assert draft.bitwise
    assert rounded.bitwise
    assert torch.equal(logits(draft), logits(dense))
    assert 0 < (logits(rounded) - logits(draft)).norm() / logits(draft).norm() < 0.1
    assert draft.weights_fingerprint == dense.weights_fingerprint

    weights = our_stored_weights(tmp_path / "draft")
    embedding = transformers_weights(target)["model.embed_tokens.weight"]
    assert torch.equal(as_tensor(weights["model.embed_tokens.weight"]), embedding)
    body = [name for name in weights if "embed" not in name and "lm_head" not in name]
    assert len(body) + 2 == len(trained)
    for name in body:
        assert torch.equal(as_tensor(weights[name]), as_tensor(trained["body." + name.removeprefix("model.")]).float())
