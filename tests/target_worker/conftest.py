"""Engines of the tiny pair, shared by the tests of a module."""

from pathlib import Path

import pytest
from tiny_models import load_engine

from specpool.engine.run.engine import Engine


@pytest.fixture(scope="module")
def target(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[0])


@pytest.fixture(scope="module")
def draft(tiny_pair: tuple[Path, Path]) -> Engine:
    return load_engine(tiny_pair[1], exact=False)
