"""Dashboard and alert rules in a real Prometheus that scrapes three real processes: `make test-monitoring`."""

import asyncio
import contextlib
import itertools
import math
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from deployment import ROOT
from test_monitoring import PANELS, RULES, LabeledQuery

from benchmarks.dashboard import ALERTS, CONFIGURATION, Query, ask, prometheus
from specpool.cli.processes import end
from specpool.cli.up import services_of
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.rpc.ports import free_port

pytestmark = pytest.mark.prometheus
PATIENCE_SECONDS = 120


@pytest.fixture(autouse=True)
def _installed() -> None:
    for program in ("prometheus", "promtool"):
        if shutil.which(program) is None:
            pytest.fail(f"{program} is missing; on Debian: apt-get install prometheus", pytrace=False)


@pytest.mark.parametrize(
    "command",
    [("check", "rules", ALERTS), ("check", "config", CONFIGURATION),
     ("test", "rules", ROOT / "tests/deploy/alerts_test.yaml")],
)  # fmt: skip
def test_promtool_accepts(command: tuple[object, ...]) -> None:
    done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@asynccontextmanager
async def specpool(pair: tuple[Path, Path], metrics_port: int) -> AsyncIterator[AsyncClient]:
    """Run the processes of `specpool up --standby` with a short queue; one request is refused before workers start."""
    settings = UpSettings(
        metrics_port=metrics_port, port=free_port(), standby=True, max_num_seqs=4, threads=1, max_model_len=512,
        log_level="error",
    )  # fmt: skip
    *workers, coordinator = services_of(settings, *map(str, pair))
    coordinator.arguments += ["--queue-size", "2"]
    async with AsyncExitStack() as stack, AsyncClient(coordinator.address, retry_seconds=0) as client:
        for service in (coordinator, *workers):
            await service.start()
            assert service.process is not None
            stack.push_async_callback(end, service.process, 10.0)
            if service is coordinator:
                await until_answering(client)
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await client.generate("too early")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(service.wait_serving() for service in (*workers, coordinator)))
        yield client


async def until_answering(client: AsyncClient) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await client.server_info()
                return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def load(client: AsyncClient) -> AsyncIterator[None]:
    """Overfill the window and its queue, with every draft method."""
    methods: list[dict[str, Any]] = [
        {},
        {"num_speculative_tokens": 3, "draft_method": "model"},
        {"num_speculative_tokens": 3, "draft_method": "ngram"},
    ]

    async def send(index: int) -> None:
        for number in itertools.count(index):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await client.generate("abc" * (1 + number % 4), max_tokens=40, ignore_eos=True, **methods[number % 3])
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(send(index)) for index in range(8)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_answered(url: str, query: Query, began: float) -> bool:
    """Return whether a query has a finite value, in series with every label of the legend."""
    span = {"start": str(began), "end": str(time.time()), "step": "1"}
    try:
        result = ask(url, "query_range", query=query.with_values("10s"), **span)["result"]
    except OSError:  # still starting
        return False
    for series in result:
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= series["metric"].keys(), query
    return any(math.isfinite(float(value)) for series in result for _, value in series["values"])


async def test_prometheus_answers_every_query(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    began, port = time.time(), free_port(4)
    selectors = [selector for rule in RULES for selector in LabeledQuery(rule["expr"]).selectors()]
    missing = {query for panel in PANELS for query in panel.queries}
    # No HTTP server runs here.
    missing |= {Query(each.prettify(), "") for each in selectors if not each.name.startswith("specpool:http_")}
    async with specpool(tiny_pair, port) as client, load(client):
        with prometheus(tmp_path, port) as url:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while missing and time.monotonic() < deadline:
                missing = {query for query in missing if not await asyncio.to_thread(is_answered, url, query, began)}
                await asyncio.sleep(0.5)
            rules = [rule for group in ask(url, "rules")["groups"] for rule in group["rules"]]
            targets = ask(url, "targets")["activeTargets"]
    assert missing == set()
    assert {rule["name"]: rule["health"] for rule in rules} == {rule["alert"]: "ok" for rule in RULES}
    assert [target["health"] for target in targets] == ["up"] * 3
