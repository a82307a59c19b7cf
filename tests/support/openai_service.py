"""The HTTP server in front of a coordinator with fake workers, and the real `openai` client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from secure_service import until
from serving import Serving, serving

from specpool.openai.server import OpenAIServer
from specpool.openai.settings import OpenAISettings

MODEL = "served"
KEY = "no-token-needed"


@dataclass
class OpenAIService:
    """A running HTTP server, its coordinator, and a client."""

    server: OpenAIServer
    url: str
    client: AsyncOpenAI
    coordinator: Serving


@asynccontextmanager
async def openai_server(address: str, **settings: Any) -> AsyncIterator[tuple[OpenAIServer, str]]:
    """Run an HTTP server in front of these coordinators; yield its address."""
    options = {"port": 0, "drain_seconds": 0, "coordinator_address": address, **settings}
    server = OpenAIServer(OpenAISettings(**options))
    port = await server.start()
    scheme = "https" if "tls_cert" in settings else "http"
    try:
        yield server, f"{scheme}://127.0.0.1:{port}"
    finally:
        server.stop(drain=False)
        await server.wait_stopped()


@asynccontextmanager
async def openai_service(
    front: dict[str, Any] | None = None, max_retries: int = 0, **settings: Any
) -> AsyncIterator[OpenAIService]:
    """Run everything and wait until it serves. `front`: settings of the HTTP server."""
    async with (
        serving(served_model_name=MODEL, **settings) as coordinator,
        openai_server(coordinator.address, **(front or {})) as (server, url),
        AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=max_retries) as client,
    ):
        await until(lambda: server.coordinators.is_serving)
        yield OpenAIService(server, url, client, coordinator)
