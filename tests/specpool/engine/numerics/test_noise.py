"""Noise follows the Gumbel distribution, precisely, and depends only on seed, position and token."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpool.engine.numerics import noise
from specpool.engine.numerics.noise import gumbel


def test_noise_follows_the_gumbel_distribution_independently() -> None:
    token_ids = torch.arange(5_000, dtype=torch.int32)
    drawn = torch.stack([gumbel(11, position, token_ids) for position in range(100)])
    assert torch.isfinite(drawn).all()
    assert drawn.mean() == pytest.approx(0.5772, abs=0.01)
    assert drawn.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for rows in (drawn, drawn.T[:100, :], torch.stack([gumbel(seed, 3, token_ids) for seed in range(100)])):
        correlations = torch.corrcoef(rows).fill_diagonal_(0)
        assert correlations.abs().max() < 6 / math.sqrt(rows.shape[1])


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31), chosen=st.lists(st.integers(0, 99_999), max_size=9)
)
def test_noise_of_a_token_does_not_depend_on_other_tokens(seed: int, position: int, chosen: list[int]) -> None:
    """A draft with a smaller vocabulary therefore shares the noise."""
    full = gumbel(seed, position, torch.arange(100_000, dtype=torch.int32))
    alone = gumbel(seed, position, torch.tensor(chosen, dtype=torch.int32))
    assert torch.equal(alone, full[torch.tensor(chosen, dtype=torch.long)])


def test_noise_is_the_same_in_every_release() -> None:
    """A client's seed must give the same tokens after an upgrade."""
    drawn = gumbel(42, 1_000, torch.tensor([0, 1, 50_000, 2**31 - 1], dtype=torch.int32))
    assert [x.hex() for x in drawn.tolist()] == [
        "-0x1.9a040a0000000p+0",
        "-0x1.4cb22c0000000p+0",
        "-0x1.8fe2d60000000p+0",
        "0x1.0f05280000000p+0",
    ]


def test_noise_is_precise_and_finite_for_all_bits() -> None:
    ends = [torch.arange(-(2**31), -(2**31) + 5_000), torch.arange(-5_000, 5_000), torch.arange(2**31 - 5_000, 2**31)]
    bits = torch.cat(
        [*ends, torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0))]
    ).int()
    uniform = noise._uniform(bits)
    assert (uniform.min().item(), uniform.max().item()) == (2.0**-33, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-uniform.double().numpy()))
    actual = noise._gumbel(bits)
    errors = np.abs(actual.double().numpy() - exact) / np.spacing(np.maximum(np.abs(exact), 1).astype(np.float32))
    assert errors.max() < 3  # units in the last place
    excess = noise._gumbel_bound(bits) - actual
    assert 0 <= excess.min() <= excess.max() < noise._BOUND_ERROR


@settings(max_examples=50)
@given(
    size=st.sampled_from([1, 2, 40, 1_000, 20_000]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_skipped_noise_never_changes_the_argmax(size: int, spread: float, seed: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    values[seed % size :: 3] = -math.inf
    token_ids = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).int()
    expected = token_ids[(values + gumbel(seed, 5, token_ids)).argmax()]
    assert noise.argmax_with_noise(values, seed, 5, token_ids) == int(expected)
