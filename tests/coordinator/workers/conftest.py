"""Fixtures for links to workers."""

from collections.abc import AsyncIterator

import pytest_asyncio

from coordinator.prompts.tokenizer_pool import TokenizerPool


@pytest_asyncio.fixture
async def tokenizers() -> AsyncIterator[TokenizerPool]:
    pool = TokenizerPool(max_waiting=100)
    yield pool
    await pool.close()
