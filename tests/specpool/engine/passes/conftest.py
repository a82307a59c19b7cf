"""Fixtures for tests of forward passes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from interpreted_kernels import make_dot_batch_invariant


@pytest.fixture(autouse=True)
def _imitated_arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interpret kernels like a GPU, which never warns of undefined numbers in padding."""
    make_dot_batch_invariant(monkeypatch)
    with np.errstate(over="ignore", invalid="ignore"):
        yield


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
