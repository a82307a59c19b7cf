"""Record what `specpool top` and the dashboard show of a server under load, for docs/top.svg and docs/dashboard.png.

    python -m benchmarks.monitoring [--seconds 60]

1, 4 and 8 clients send chats to the embedded pair, for a third of the time each. Prometheus scrapes all processes every
second and answers the queries of the dashboard's panels (Debian: `apt-get install prometheus`). The view of `top`
covers the last 5 seconds. The last line printed is JSON.
"""

import argparse
import asyncio
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.dashboard import Panel, Query, ask, prometheus, read_panels
from benchmarks.report import console, finish, output_folder, parser_of, whole
from specpool.cli.processes import ProcessFailedError
from specpool.cli.top_view import View, view_of
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import own_prompts
from specpool.rpc.ports import free_port

CLIENTS = (1, 4, 8)
PANELS = (9, 11, 16)
"""Numbers of the panels in the picture."""
RATE_SECONDS, VIEW_SECONDS, START_SECONDS = 5, 5, 30
MAX_TOKENS = 128


def main() -> None:
    options = parse()
    try:
        result = asyncio.run(record(options.seconds))
    except (OSError, ProcessFailedError) as error:
        raise SystemExit(f"monitoring: {error}") from None
    finish("monitoring", result, options.output)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=whole(15, 3600), default=60, help="length of the run")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    return parser.parse_args(arguments)


async def record(seconds: int) -> dict[str, Any]:
    """Run the load. Return the series of the panels, and the view of `top`."""
    metrics_port = free_port(3)
    settings = UpSettings(port=0, metrics_port=metrics_port, log_level="error", drain_seconds=1)
    console.print("starting the service")
    async with running(settings) as address, AsyncClient(address) as client:
        with tempfile.TemporaryDirectory() as folder, prometheus(Path(folder), metrics_port) as url:
            await asyncio.gather(*(client.generate(line.prompt, max_tokens=32) for line in own_prompts()))  # warm-up
            await until_scraping(url)
            began = math.ceil(time.time())
            view = await load(client, address, seconds)
            times = range(began + RATE_SECONDS, math.floor(time.time()) + 1)
            panels = [recorded(url, panel, times) for panel in read_panels() if panel.number in PANELS]
    changes = {str(clients): round(index * seconds / len(CLIENTS)) for index, clients in enumerate(CLIENTS)}
    return {"clients_from_s": changes, "first_s": RATE_SECONDS, "panels": panels, "view": asdict(view)}


async def until_scraping(url: str) -> None:
    """Wait until Prometheus has scraped all processes. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            with suppress(OSError):  # still starting
                found = await asyncio.to_thread(ask, url, "query", query="sum(up)")
                if any(value == "3" for series in found["result"] for value in series["value"]):
                    return
            await asyncio.sleep(0.1)


async def load(client: AsyncClient, address: str, seconds: int) -> View:
    """Send requests from a growing number of clients. Return the view of `top` near the end."""
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []
        for clients in CLIENTS:
            tasks += [group.create_task(send(client, number)) for number in range(len(tasks), clients)]
            await asyncio.sleep(seconds / len(CLIENTS) - VIEW_SECONDS * (clients == CLIENTS[-1]))
        view = await view_now(client, address)
        for task in tasks:
            task.cancel()
    return view


async def send(client: AsyncClient, number: int) -> None:
    """Send one chat after another until cancelled. `number`: index of this client, which selects its first chat."""
    for line in islice(cycle(own_prompts()), 4 * number, None):
        await client.generate(line.prompt, max_tokens=MAX_TOKENS)


async def view_now(client: AsyncClient, address: str) -> View:
    earlier = await client.server_info()
    await asyncio.sleep(VIEW_SECONDS)
    return view_of(address, await client.server_info(), await client.model_info(), earlier)


def recorded(url: str, panel: Panel, times: range) -> dict[str, Any]:
    """Return the series of a panel by legend, with one value per second; None if Prometheus has none."""
    span = {"start": str(times[0]), "end": str(times[-1]), "step": "1"}
    series: dict[str, list[float | None]] = {}
    for query in panel.queries:
        for found in ask(url, "query_range", query=query.with_values(f"{RATE_SECONDS}s"), **span)["result"]:
            values = {round(at): float(value) for at, value in found["values"]}
            series[legend_of(query, found["metric"])] = [_rounded(values.get(at, math.nan)) for at in times]
    return {"title": panel.title, "unit": panel.unit, "series": series}


def legend_of(query: Query, labels: Mapping[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda name: labels[name[1]], query.legend)


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


if __name__ == "__main__":
    main()
