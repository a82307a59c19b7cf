"""GGUF files with scaled positions give the logits of the same model with `rope_parameters`, in every pass."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import edited_gguf, gguf_config, save_gguf
from tiny_models import edit_json, load_engine, random_tokens, refusal, save_model

from specpool.engine.cache.spans import Span

LENGTH = 128
FACTOR, KIND, ORIGINAL = (f"llama.rope.scaling.{name}" for name in ("factor", "type", "original_context_length"))
OTHER_PASSES = [
    pytest.param("yarn attention", {"native": False}, marks=pytest.mark.slow),
    pytest.param("linear", {"fused": False}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a file without scaling beside its safetensors model."""
    folder = tmp_path_factory.mktemp("plain")
    saved = save_model(folder / "saved", gguf_config(max_position_embeddings=LENGTH))
    return save_gguf(saved, folder / "plain.gguf")


def logits(model: Path, **options: Any) -> torch.Tensor:
    engine = load_engine(model, weights="float32", **options)
    return engine.forward([Span(0, 0, random_tokens(60), 60)])


def llama3_factors(dimensions: int, factor: float, original: int) -> np.ndarray:
    """Return factors as llama.cpp's converter writes them."""
    factors = []
    for wavelength in 2 * np.pi * 10_000.0 ** (np.arange(0, dimensions, 2) / dimensions):
        smooth = (original / wavelength - 1) / 3
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wavelength < original / 4 else factor if wavelength > original else between)
    return np.array(factors, np.float32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]] = {
    "linear": ({FACTOR: 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
    "old key": ({"llama.rope.scale_linear": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": ({KIND: "yarn", FACTOR: 4.0, ORIGINAL: 32, "llama.rope.scaling.yarn_beta_fast": 32.0}, {}, YARN),
    "yarn attention": (
        {KIND: "yarn", FACTOR: 4.0, ORIGINAL: 32, "llama.rope.scaling.attn_factor": 0.5},
        {},
        {**YARN, "attention_factor": 0.5 * (1 + 0.1 * np.log(4.0))},
    ),
    "llama 3.1": ({ORIGINAL: 64}, {"rope_freqs.weight": llama3_factors(16, 8.0, 64)}, LLAMA3),
    "base": ({"llama.rope.freq_base": 500.0}, {}, {"rope_type": "default", "rope_theta": 500.0}),
}


@pytest.mark.parametrize(("case", "options"), [*((case, {}) for case in CASES), *OTHER_PASSES])
def test_scaled_files_match_scaled_configurations(
    tmp_path: Path, plain: Path, case: str, options: dict[str, Any]
) -> None:
    keys, tensors, rope = CASES[case]
    file = edited_gguf(plain, tmp_path / "scaled.gguf", keys, tensors)
    shutil.copytree(plain.parent / "saved", tmp_path / "saved")
    expected = edit_json(tmp_path / "saved", rope_parameters={"rope_theta": 10_000.0, **rope})
    scaled = logits(file, **options)
    torch.testing.assert_close(scaled, logits(expected, **options), atol=1e-5, rtol=1e-5)
    assert (scaled - logits(plain, **options)).abs().max() > 1e-3


UNSCALED: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "none": ({KIND: "none", FACTOR: 4.0}, {}),
    "zero": ({FACTOR: 0.0}, {}),
    "one": ({KIND: "yarn", FACTOR: 1.0, ORIGINAL: 32}, {}),
    "ones": ({KIND: "none"}, {"rope_freqs.weight": np.ones(8, np.float32)}),
    "metadata": ({"llama.rope.scaling.finetuned": True, "quantize.imatrix.file": "some"}, {}),
}


@pytest.mark.parametrize("case", UNSCALED.values(), ids=UNSCALED)
def test_neutral_scaling_changes_nothing(tmp_path: Path, plain: Path, case: tuple[Any, Any]) -> None:
    assert torch.equal(logits(edited_gguf(plain, tmp_path / "same.gguf", *case)), logits(plain))


def test_files_with_long_and_short_factors_are_served_at_the_short_length(tmp_path: Path, plain: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(2, 9, 8, dtype=np.float32)
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    keys = {KIND: "longrope", ORIGINAL: 64, "llama.rope.scaling.attn_factor": 1.25}
    file = edited_gguf(plain, tmp_path / "scaled.gguf", keys, factors)
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
        "attention_factor": 1.25, "short_factor": short.tolist(), "long_factor": long.tolist(),
    }  # fmt: skip
    shutil.copytree(plain.parent / "saved", tmp_path / "saved")
    expected = edit_json(tmp_path / "saved", rope_parameters=rope)
    scaled = logits(file, max_model_len=64)
    torch.testing.assert_close(scaled, logits(expected, max_model_len=64), atol=1e-5, rtol=1e-5)
    assert (scaled - logits(plain)).abs().max() > 1e-3
    assert "serve it with --max-model-len 64" in refusal(file, max_model_len=65)


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ({KIND: "dynamic", FACTOR: 4.0}, {}, "llama.rope.scaling.type is 'dynamic': "),
        ({KIND: "longrope"}, {}, "the tensor rope_factors_long.weight must have 8 frequency factors"),
        ({FACTOR: -4.0}, {}, "llama.rope.scaling.factor is -4.0: it must be a positive number"),
        ({FACTOR: "4"}, {}, "llama.rope.scaling.factor is '4': it must be a positive number"),
        ({"llama.rope.scaling.attn_factor": 0.5}, {}, "llama.rope.scaling.attn_factor is 0.5: "),
        ({"llama.rope.scaling.yarn_beta_fast": 16.0}, {}, "llama.rope.scaling.yarn_beta_fast is 16.0: "),
        ({"llama.rope.scaling.alpha": 8.0}, {}, "llama.rope.scaling.alpha is 8.0: "),
        ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count is 8: it does not match the head size 16"),
        (
            {},
            {"rope_freqs.weight": np.ones(4, np.float32)},
            "the tensor rope_freqs.weight must have 8 frequency factors",
        ),
        ({}, {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}, "the tensor rope_freqs.weight scales"),
        (
            {FACTOR: 4.0, ORIGINAL: 64},
            {"rope_freqs.weight": llama3_factors(16, 8.0, 64)},
            "both scale positions",
        ),
    ],
)
def test_unsupported_scaling_is_refused_by_name(
    tmp_path: Path, plain: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray], reason: str
) -> None:
    assert reason in refusal(edited_gguf(plain, tmp_path / "scaled.gguf", keys, tensors))
