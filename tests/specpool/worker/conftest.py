"""Workers for the tests of this folder."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tiny_models import load_engine
from worker_service import DRAFT, TARGET, Worker, serving

from specpool.engine.run.engine import Engine


@pytest.fixture(scope="module")
def engines(tiny_pair: tuple[Path, Path]) -> dict[str, Engine]:
    return {TARGET.name: load_engine(tiny_pair[0]), DRAFT.name: load_engine(tiny_pair[1], exact=False)}


@pytest.fixture
async def target(engines: dict[str, Engine]) -> AsyncIterator[Worker]:
    async with serving(TARGET, engines[TARGET.name]) as worker:
        yield worker


@pytest.fixture
async def draft(engines: dict[str, Engine]) -> AsyncIterator[Worker]:
    async with serving(DRAFT, engines[DRAFT.name]) as worker:
        yield worker


@pytest.fixture(params=[TARGET, DRAFT], ids=["target", "draft"])
async def worker(request: pytest.FixtureRequest, engines: dict[str, Engine]) -> AsyncIterator[Worker]:
    async with serving(request.param, engines[request.param.name]) as worker:
        yield worker
