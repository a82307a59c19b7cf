from collections.abc import AsyncIterator

import pytest
from openai_service import OpenAIService, openai_service


@pytest.fixture
async def service() -> AsyncIterator[OpenAIService]:
    async with openai_service() as running:
        yield running
