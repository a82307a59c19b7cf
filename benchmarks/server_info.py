"""The coordinator's counters before and after a run."""

import asyncio

from coordinator.workers.recent import RECENT_SECONDS
from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb


async def current_info(client: AsyncClient) -> pb.GetServerInfoResponse:
    """Return the server info, once the coordinator no longer reuses an older answer."""
    await asyncio.sleep(RECENT_SECONDS)
    return await client.server_info()
