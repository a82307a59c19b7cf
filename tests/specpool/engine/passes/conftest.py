"""Fixtures for tests of forward passes."""

import pytest
from interpreted_kernels import make_dot_batch_invariant


@pytest.fixture(autouse=True)
def _batch_invariant_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    make_dot_batch_invariant(monkeypatch)
