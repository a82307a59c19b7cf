"""The metrics of a coordinator and a sharded worker after calls that end in every way."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from scraping import Scrape, scrape
from serving import free_address, make_request, serving
from tiny_models import described_as_sharded, forget_all, load_engine

from specpool.rpc.ports import free_port
from specpool.worker.host import WorkerHost
from specpool.worker.metrics import WorkerMetrics
from target_worker.verifier import Verifier


async def scrape_coordinator_and_worker(model: Path) -> tuple[Scrape, Scrape]:
    """Return scrapes of a coordinator with vLLM's names and of a target worker with this model."""
    port = free_port()
    settings: dict[str, Any] = {"metrics_port": port, "metrics_compat": "vllm", "max_num_seqs": 1, "queue_size": 1}
    settings["target_standby_address"] = free_address()
    async with serving(with_target=False, **settings) as service:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await service.stub.Generate(make_request())
        await service.target.start(service.target_address)
        await service.until_ready()
        calls = (service.stub.Generate(make_request()) for _ in range(9))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(answer, grpc.aio.AioRpcError) for answer in answers)
        coordinator = await scrape(port)
    engine = described_as_sharded(load_engine(model))
    forget_all(engine, 1)
    host = WorkerHost(lambda report: Verifier(engine))
    await host.load()
    registry = CollectorRegistry()
    registry.register(WorkerMetrics("target", host))
    worker = Scrape.of(generate_latest(registry).decode())
    host.close()
    return coordinator, worker
