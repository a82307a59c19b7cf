"""The gateway smg in a separate process, in front of a coordinator."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
from serving import PATIENCE_SECONDS

from specpool.rpc.ports import free_port

SMG = Path(sys.executable).parent / "smg"


@asynccontextmanager
async def gateway(coordinator: str, *flags: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """Start smg for a running coordinator; yield an OpenAI client once smg answers."""
    port, metrics_port = (str(free_port()) for _ in range(2))
    command = [SMG, "launch", "--host", "127.0.0.1", "--port", port, "--worker-urls", f"grpc://{coordinator}"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port, "--log-level", "error", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS
        ) as client:
            await _until_answering(client)
            yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _until_answering(client: openai.AsyncOpenAI) -> None:
    """Wait until smg knows the model and its tokenizer."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError, openai.NotFoundError):
                if models := (await client.models.list()).data:
                    await client.completions.create(model=models[0].id, prompt="?", max_tokens=1)
                    return
            await asyncio.sleep(0.05)
