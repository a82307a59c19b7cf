"""Logarithms and exponentials are precise, with the same bits for any slicing and number of threads."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from specpool.engine.numerics.elementary import MASS_BITS, masses, negative_log, negative_log1m

FUNCTIONS = {"log": negative_log, "log1m": negative_log1m, "masses": lambda x: masses(-x)}


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def fractions() -> torch.Tensor:
    """Floats between 0 and 1 of all magnitudes, including the edges of the polynomials' range."""
    generator = torch.Generator().manual_seed(0)
    even = torch.rand(1 << 20, generator=generator)
    small = even * 2.0 ** -torch.randint(0, 33, (1 << 20,), generator=generator)
    middles = [torch.tensor([x]).view(torch.int32) + torch.arange(-5_000, 5_000) for x in (0.2929, 0.5, 0.7071, 0.9995)]
    edges = [middle.int().view(torch.float32) for middle in middles]
    floats = torch.cat([even, small, *edges, torch.tensor([2.0**-33, 1 - 2.0**-24])])
    return floats[(floats >= 2.0**-33) & (floats < 1)]


def max_error(actual: torch.Tensor, exact: np.ndarray, minimum: float) -> float:
    """Maximum error in units in the last place of max(|exact|, minimum)."""
    size = np.maximum(np.abs(exact), minimum).astype(np.float32)
    return float((np.abs(actual.double().numpy() - exact) / np.spacing(size)).max())


def test_logarithms_are_precise() -> None:
    x = fractions()
    exact = x.double().numpy()
    assert max_error(negative_log(x), -np.log(exact), minimum=1) < 1.5
    assert max_error(negative_log(16 * x), -np.log(16 * exact), minimum=1) < 1.5
    # Small arguments give the largest noise, so their relative error counts.
    assert max_error(negative_log1m(x), -np.log1p(-exact), minimum=0) < 3


def test_masses_are_precise() -> None:
    x = -30 * fractions()
    exact = np.exp(x.double().numpy())
    actual = masses(x).double() * 2.0**-MASS_BITS
    assert np.abs(actual.numpy() - exact).max() < 2e-7
    assert masses(torch.tensor([0.0, -0.0, -1e-40, -28.0, -1e30, -torch.inf])).tolist() == [1 << 40] * 3 + [0] * 3


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_do_not_depend_on_threads_or_slicing(name: str) -> None:
    function: Callable[[torch.Tensor], torch.Tensor] = FUNCTIONS[name]
    x = fractions()[:70_001]
    expected = function(x)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(function(x), expected)
    for size in (1, 3, 7, 8, 17, 1_000):
        chunks = x[: 300 * size].split(size)
        assert torch.equal(torch.cat([function(chunk) for chunk in chunks]), expected[: 300 * size])
    assert torch.equal(function(x[::3]), expected[::3])
