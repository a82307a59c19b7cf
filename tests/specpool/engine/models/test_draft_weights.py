"""Trained weights survive both file formats within half a quantization step; invalid bytes are refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specpool.engine.models.draft_weights import MAX_CODE, find_named, load_compact, load_trained, save_compact
from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("Q4_1", torch.zeros(4, 40), r"tensor a.Q4_1 is float32 \[4, 40\], not rows of bytes"),
        ("Q4_1", torch.zeros(40, dtype=torch.uint8), r"tensor a.Q4_1 is uint8 \[40\], not rows of bytes"),
        ("Q4_1", torch.zeros(4, 30, dtype=torch.uint8), "a.Q4_1 has rows of 30 bytes, not whole Q4_1 blocks"),
        ("Q4_1", torch.zeros(4, 0, dtype=torch.uint8), "tensor a.Q4_1 has rows of 0 bytes, not whole Q4_1 blocks"),
        ("INT8", torch.zeros(4, 4, dtype=torch.uint8), "tensor a.INT8 has rows of 4 bytes, not whole INT8 blocks"),
        ("INT8", torch.full((4, 9), 255, dtype=torch.uint8), "tensor a.INT8 has a scale that is infinite or NaN"),
    ],
)
def test_invalid_bytes_are_refused(name: str, data: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_named({f"a.{name}": data}, "a")


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), exponents=st.lists(st.integers(-30, 30), min_size=1, max_size=5))
def test_int8_rounds_to_half_a_step(tmp_path_factory: pytest.TempPathFactory, seed: int, exponents: list[int]) -> None:
    file = tmp_path_factory.mktemp("compact") / "draft.safetensors"
    weight = torch.randn(len(exponents), 33, generator=torch.Generator().manual_seed(seed))
    weight *= 2.0 ** torch.tensor(exponents)[:, None]
    save_compact(file, {"weight": weight})
    loaded = load_trained(file)["weight"]
    step = weight.abs().amax(1, keepdim=True) / MAX_CODE
    assert ((loaded - weight).abs() <= 0.501 * step).all()
    quantized = load_compact(file)["weight"]
    assert isinstance(quantized, Quantized)
    assert quantized.qtype is INT8
    assert torch.equal(quantized.dequantized(), loaded)


def test_quantized_matrices_are_kept(tmp_path: Path) -> None:
    blocks = Quantized(QUANTIZATION_TYPES["Q4_1"], torch.arange(80, dtype=torch.uint8).view(2, 40))
    save_compact(tmp_path / "draft", {"body.weight": blocks, "norm": torch.ones(7)})
    loaded = load_compact(tmp_path / "draft")
    assert loaded.keys() == {"body.weight", "norm"}
    weight = loaded["body.weight"]
    assert isinstance(weight, Quantized)
    assert weight.qtype is blocks.qtype
    assert torch.equal(weight.data, blocks.data)
    assert torch.equal(load_trained(tmp_path / "draft")["body.weight"], blocks.dequantized())
    save_file({"body.weight.Q4_1": torch.full((2, 20), 255, dtype=torch.uint8)}, tmp_path / "broken")
    with pytest.raises(ValueError, match=r"body\.weight\.Q4_1 has a scale that is infinite or NaN"):
        load_compact(tmp_path / "broken")


def test_vectors_ids_and_zeros_are_kept(tmp_path: Path) -> None:
    norm, ids = torch.randn(7), torch.tensor([3, 70_000], dtype=torch.int32)
    save_compact(tmp_path / "draft", {"norm": norm, "output_ids": ids, "zeros": torch.zeros(2, 3)})
    loaded = load_trained(tmp_path / "draft")
    assert torch.equal(loaded["norm"], norm.bfloat16().float())
    assert torch.equal(loaded["output_ids"], ids)
    assert torch.equal(loaded["zeros"], torch.zeros(2, 3))
