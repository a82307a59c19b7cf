"""Logarithms and exponentials are close to the exact ones, with the same bits in any piece and number of threads."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from specpool.engine.numerics.elementary import MASS_BITS, masses, negative_log, negative_log_of_rest

FUNCTIONS = {"log": negative_log, "log of rest": negative_log_of_rest, "masses": lambda x: masses(-x)}


@pytest.fixture
def threads() -> Iterator[None]:
    """Leaves the number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def fractions() -> torch.Tensor:
    """Floats between 0 and 1 of all sizes, among them those next to 0, 1 and the ends of the polynomials' range."""
    generator = torch.Generator().manual_seed(0)
    even = torch.rand(1 << 20, generator=generator)
    small = even * 2.0 ** -torch.randint(0, 33, (1 << 20,), generator=generator)
    middles = [torch.tensor([x]).view(torch.int32) + torch.arange(-5_000, 5_000) for x in (0.2929, 0.5, 0.7071, 0.9995)]
    edges = [middle.int().view(torch.float32) for middle in middles]
    found = torch.cat([even, small, *edges, torch.tensor([2.0**-33, 1 - 2.0**-24])])
    return found[(found >= 2.0**-33) & (found < 1)]


def units(got: torch.Tensor, exact: np.ndarray, least: float) -> float:
    """The largest error in units of the last place, of numbers below `least` in units of that one."""
    size = np.maximum(np.abs(exact), least).astype(np.float32)
    return float((np.abs(got.double().numpy() - exact) / np.spacing(size)).max())


def test_logarithms_are_close() -> None:
    x = fractions()
    exact = x.double().numpy()
    assert units(negative_log(x), -np.log(exact), least=1) < 1.5
    assert units(negative_log(16 * x), -np.log(16 * exact), least=1) < 1.5
    # The smallest make the largest noise: they have to be as precise as the others.
    assert units(negative_log_of_rest(x), -np.log1p(-exact), least=0) < 3


def test_masses_are_close() -> None:
    x = -30 * fractions()
    exact = np.exp(x.double().numpy())
    got = masses(x).double() * 2.0**-MASS_BITS
    assert np.abs(got.numpy() - exact).max() < 2e-7
    assert masses(torch.tensor([0.0, -0.0, -1e-40, -28.0, -1e30, -torch.inf])).tolist() == [1 << 40] * 3 + [0] * 3


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_depend_on_the_number_alone(name: str) -> None:
    function: Callable[[torch.Tensor], torch.Tensor] = FUNCTIONS[name]
    x = fractions()[:70_001]
    whole = function(x)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(function(x), whole)
    for size in (1, 3, 7, 8, 17, 1_000):
        pieces = x[: 300 * size].split(size)
        assert torch.equal(torch.cat([function(piece) for piece in pieces]), whole[: 300 * size])
    assert torch.equal(function(x[::3]), whole[::3])
