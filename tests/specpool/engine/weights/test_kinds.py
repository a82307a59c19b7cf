"""Quantized weights have the float32 bits that the reference gives them, whatever their bytes are."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import embedding, linear

from specpool.engine.weights.kinds import INT8, KINDS, SCALE_BYTES
from specpool.engine.weights.quantized import Quantized, QuantizedEmbedding, QuantizedLinear

GGML_KINDS = sorted(KINDS.keys() - {"INT8"})


def random_bytes(rows: int, row_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def finite(kind: str, rows: int, columns: int) -> Quantized:
    """A weight whose scales are neither infinite nor NaN."""
    data = random_bytes(rows, KINDS[kind].row_bytes(columns))
    if kind == "INT8":
        data[:, :SCALE_BYTES] = torch.rand(rows, 1).view(torch.uint8)
    for at in KINDS[kind].halves:
        data.unflatten(1, (-1, KINDS[kind].block_bytes))[..., at + 1] &= 0b10111111
    return Quantized(KINDS[kind], data)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether numbers have the same bits, or are both NaN: which one is not defined."""
    unknown = one.isnan()
    known = ~unknown
    return torch.equal(unknown, other.isnan()) and torch.equal(
        one[known].view(torch.int32), other[known].view(torch.int32)
    )


@pytest.mark.parametrize("kind", GGML_KINDS)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=st.integers(0, 2**32))
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_every_weight_has_the_bits_of_the_reference(kind: str, rows: int, blocks: int, seed: int) -> None:
    weight = Quantized(KINDS[kind], random_bytes(rows, blocks * KINDS[kind].block_bytes, seed))
    expected = torch.from_numpy(gguf.dequantize(weight.data.numpy(), GGMLQuantizationType[kind]))
    assert weight.shape == expected.shape
    assert weight.dequantized().dtype == expected.dtype == torch.float32
    assert same_bits(weight.dequantized(), expected)


@pytest.mark.parametrize("kind", GGML_KINDS)
def test_blocks_have_the_sizes_of_the_reference(kind: str) -> None:
    assert (KINDS[kind].block, KINDS[kind].block_bytes) == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]


@given(rows=st.integers(1, 5), columns=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_a_row_in_int8_has_one_scale(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scale = torch.randn(rows, 1, generator=generator)
    weight = Quantized(INT8, torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1))
    assert weight.shape == (rows, columns)
    assert torch.equal(weight.dequantized(), codes.float() * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_as_many_bytes_as_its_blocks(kind: str) -> None:
    its = KINDS[kind]
    for columns in (its.block, 6 * its.block):
        assert its.columns(its.row_bytes(columns)) == columns


@pytest.mark.parametrize("kind", GGML_KINDS)
def test_a_row_that_ends_within_a_block_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"rows of 300 weights are no multiple of the .* in a block of {kind}"):
        KINDS[kind].row_bytes(300)


# --- Parts of a weight


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_are_those_of_the_whole(kind: str) -> None:
    weight = finite(kind, 7, 1024)
    whole, chosen = weight.dequantized(), torch.tensor([5, 0, 0, 6])
    assert torch.equal(weight.rows(chosen).dequantized(), whole[chosen])
    assert torch.equal(weight.rows(slice(2, 4)).dequantized(), whole[2:4])
    some = weight.columns(range(256, 768))
    assert some is not None
    assert torch.equal(some.dequantized(), whole[:, 256:768])


@pytest.mark.parametrize("kind", GGML_KINDS)
def test_columns_that_cut_a_block_are_none(kind: str) -> None:
    weight, half = finite(kind, 7, 512), KINDS[kind].block // 2
    assert weight.columns(range(half, 512)) is None
    assert weight.columns(range(512 - half)) is None


def test_what_is_dequantized_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = finite("Q5_1", 11, 64)
    whole = weight.dequantized()
    monkeypatch.setattr("specpool.engine.weights.threads.AT_A_TIME", 3 * 64)
    assert torch.equal(weight.dequantized(), whole)


def test_modules_compute_what_those_of_torch_do() -> None:
    first, second, bias, x = finite("Q4_0", 5, 64), torch.randn(3, 64), torch.randn(8), torch.randn(4, 64)
    joined = QuantizedLinear([first, second], bias)
    weight = torch.cat([first.dequantized(), second])
    assert (joined.in_features, joined.out_features) == (64, 8)
    assert torch.equal(joined.weight, weight)
    assert torch.equal(joined(x), linear(x, weight, bias))
    ids = torch.tensor([[4, 0], [2, 2]])
    assert torch.equal(QuantizedEmbedding(first)(ids), embedding(ids, first.dequantized()))
