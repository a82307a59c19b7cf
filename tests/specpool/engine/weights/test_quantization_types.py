"""Quantized weights dequantize to the bits of ggml's reference, for any bytes."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import embedding, linear

from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES, SCALE_BYTES
from specpool.engine.weights.quantized import Quantized, QuantizedEmbedding, QuantizedLinear

GGML_TYPES = sorted(QUANTIZATION_TYPES.keys() - {"INT8"})


def random_bytes(rows: int, row_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def finite_weight(name: str, rows: int, columns: int) -> Quantized:
    qtype = QUANTIZATION_TYPES[name]
    data = random_bytes(rows, qtype.row_bytes(columns))
    if qtype is INT8:
        data[:, :SCALE_BYTES] = torch.rand(rows, 1).view(torch.uint8)
    for at in qtype.float16_offsets:
        data.unflatten(1, (-1, qtype.block_bytes))[..., at + 1] &= 0b10111111
    return Quantized(qtype, data)


@pytest.mark.parametrize("name", GGML_TYPES)
@settings(max_examples=10)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32))
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_dequantization_matches_ggml_bit_for_bit(name: str, rows: int, blocks: int, seed: int) -> None:
    qtype = QUANTIZATION_TYPES[name]
    assert (qtype.block, qtype.block_bytes) == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    weight = Quantized(qtype, random_bytes(rows, blocks * qtype.block_bytes, seed))
    expected = torch.from_numpy(gguf.dequantize(weight.data.numpy(), GGMLQuantizationType[name]))
    actual = weight.dequantized()
    assert weight.shape == expected.shape
    assert actual.dtype == expected.dtype == torch.float32
    known = ~expected.isnan()  # the bits of a NaN are undefined
    assert torch.equal(actual.isnan(), ~known)
    assert torch.equal(actual[known].view(torch.int32), expected[known].view(torch.int32))


@given(rows=st.integers(1, 5), columns=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_int8_rows_have_one_scale(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scale = torch.randn(rows, 1, generator=generator)
    weight = Quantized(INT8, torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1))
    assert weight.shape == (rows, columns)
    assert torch.equal(weight.dequantized(), codes.float() * scale)


@pytest.mark.parametrize("name", GGML_TYPES)
def test_partial_blocks_are_refused(name: str) -> None:
    qtype = QUANTIZATION_TYPES[name]
    assert qtype.columns(qtype.row_bytes(6 * qtype.block)) == 6 * qtype.block
    with pytest.raises(ValueError, match=f"rows of 300 .* not a multiple of {qtype.block}, the block of {name}"):
        qtype.row_bytes(300)
    weight = finite_weight(name, 7, 512)
    assert weight.columns(range(qtype.block // 2, 512)) is None
    assert weight.columns(range(512 - qtype.block // 2)) is None


@pytest.mark.parametrize("name", QUANTIZATION_TYPES)
def test_selected_rows_and_columns_keep_their_weights(name: str) -> None:
    weight = finite_weight(name, 7, 1024)
    full, rows = weight.dequantized(), torch.tensor([5, 0, 0, 6])
    assert torch.equal(weight.rows(rows).dequantized(), full[rows])
    assert torch.equal(weight.rows(slice(2, 4)).dequantized(), full[2:4])
    columns = weight.columns(range(256, 768))
    assert columns is not None
    assert torch.equal(columns.dequantized(), full[:, 256:768])


def test_dequantizing_in_slices_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = finite_weight("Q5_1", 11, 64)
    full = weight.dequantized()
    monkeypatch.setattr("specpool.engine.weights.quantized.SLICE_WEIGHTS", 3 * 64)
    assert torch.equal(weight.dequantized(), full)


def test_quantized_modules_equal_those_of_torch() -> None:
    first, second, bias, x = finite_weight("Q4_0", 5, 64), torch.randn(3, 64), torch.randn(8), torch.randn(4, 64)
    joined = QuantizedLinear([first, second], bias)
    weight = torch.cat([first.dequantized(), second])
    assert (joined.in_features, joined.out_features) == (64, 8)
    assert torch.equal(joined.weight, weight)
    assert torch.equal(joined(x), linear(x, weight, bias))
    ids = torch.tensor([[4, 0], [2, 2]])
    assert torch.equal(QuantizedEmbedding(first, nn.Embedding(1, 1))(ids), embedding(ids, first.dequantized()))
