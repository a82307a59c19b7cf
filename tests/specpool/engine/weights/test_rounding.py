"""Rounded weights are valid Q4_1 blocks near the originals."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from specpool.engine.weights.quantized import Quantized
from specpool.engine.weights.rounding import BLOCK, MAX_CODE, Q4_1, choose_scales, from_codes, pack, to_codes

EQUAL = torch.eye(BLOCK)
seeds = st.integers(0, 2**32)


def rounded(block: torch.Tensor, metric: torch.Tensor = EQUAL) -> torch.Tensor:
    """One block of every row, rounded."""
    scale, minimum = choose_scales(block, metric)
    return from_codes(to_codes(block, scale, minimum), scale, minimum)


def random_blocks(seed: int, exponents: list[int], offset: float = 0.0) -> torch.Tensor:
    """A block with a magnitude of 2^exponent for each exponent."""
    numbers = torch.randn(len(exponents), BLOCK, generator=torch.Generator().manual_seed(seed)) + offset
    return numbers * 2.0 ** torch.tensor(exponents)[:, None]


@given(rows=st.integers(1, 5), blocks=st.integers(1, 4), seed=seeds)
def test_packed_codes_dequantize_to_the_same_weights(rows: int, blocks: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, MAX_CODE + 1, (rows, blocks * BLOCK), generator=generator).float()
    scales, minimums = torch.randn(2, rows, blocks, generator=generator).half()
    weight = pack(codes, scales, minimums)
    expected = from_codes(codes.unflatten(1, (blocks, BLOCK)), scales[..., None], minimums[..., None]).flatten(1)
    assert isinstance(weight, Quantized)
    assert weight.qtype is Q4_1
    assert torch.equal(weight.dequantized(), expected)
    by_library = gguf.dequantize(weight.data.numpy(), GGMLQuantizationType.Q4_1)
    assert torch.equal(torch.from_numpy(by_library), expected)


@given(seed=seeds, exponents=st.lists(st.integers(-8, 12), min_size=1, max_size=4), offset=st.floats(-3, 3))
def test_squared_errors_are_at_most_those_of_the_full_range(seed: int, exponents: list[int], offset: float) -> None:
    block = random_blocks(seed, exponents, offset)
    low, high = block.amin(1), block.amax(1)
    # Half a step, and the float16 rounding of scale and minimum.
    bound = (high - low) / MAX_CODE / 2 + (high - low + low.abs()) * 2.0**-11 + 2.0**-20
    errors = (rounded(block) - block).square().mean(1).sqrt()
    assert (errors <= bound).all()


@given(seed=seeds)
def test_important_columns_are_rounded_better(seed: int) -> None:
    block = random_blocks(seed, [0] * 64)
    metric = torch.where(torch.arange(BLOCK) < 8, 100.0, 1.0).diag()

    def error(rounded_block: torch.Tensor) -> float:
        return (rounded_block - block)[:, :8].square().mean().item()

    assert error(rounded(block, metric)) < error(rounded(block))


@pytest.mark.parametrize("number", [0.0, 0.7, -3e4, 1e-9])
def test_blocks_of_one_number_stay_constant(number: float) -> None:
    block = torch.full((2, BLOCK), number)
    assert torch.equal(rounded(block), block.half().float())


def test_outliers_beyond_float16_give_finite_blocks() -> None:
    scale, minimum = choose_scales(random_blocks(0, [30, -40]), EQUAL)
    assert scale.isfinite().all()
    assert minimum.isfinite().all()
