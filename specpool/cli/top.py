"""`specpool top`: a live view of what a server does, from its public API alone."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncGenerator
from dataclasses import asdict

import grpc
from pydantic import Field
from rich.console import Console
from rich.live import Live
from rich.text import Text

from specpool.cli.top_panels import FailurePanel, Panels, clean
from specpool.cli.top_view import View, view_of
from specpool.client import AsyncClient
from specpool.rpc.config.settings import Seconds, Settings
from specpool.rpc.security.settings import ClientSecurity
from specpool.rpc.status import status_line
from specpool.v1 import generation_pb2 as pb

# A server asks its workers before it answers, and these may be busy.
ANSWER_SECONDS = 10.0


class TopSettings(Settings, ClientSecurity):
    """Shows what a server does: pool, acceptance, groups, workers and rates. Ctrl-C ends it."""

    address: str = Field("127.0.0.1:50050", min_length=1, description="host:port of the coordinator")
    interval: Seconds = Field(2.0, ge=0.1, description="seconds between two looks at the server")
    once: bool = Field(
        False,
        description="print one view, of one interval, and end, as also happens where the output is not a terminal",
    )
    json_object: bool = Field(False, alias="json", description="print that one view as a JSON object")


def top(settings: TopSettings) -> int:
    """Runs the command; returns its exit status."""
    console = Console()
    # FORCE_COLOR and its like make rich call a pipe a terminal.
    is_terminal = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    live = is_terminal and not settings.once and not settings.json_object
    return asyncio.run(_show(settings, console) if live else _print_once(settings, console))


async def _show(settings: TopSettings, console: Console) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C, so that the terminal is left as it was
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    begin = Text(f"connecting to {settings.address}")
    with contextlib.suppress(asyncio.CancelledError), Live(begin, console=console, screen=True) as screen:
        async for seen in _looks(settings):
            screen.update(Panels(seen) if isinstance(seen, View) else FailurePanel(settings.address, seen))
    return 0


async def _print_once(settings: TopSettings, console: Console) -> int:
    async with contextlib.aclosing(_looks(settings)) as looks:
        seen = await anext(looks)
        if isinstance(seen, View):  # the first view has no earlier one to count from
            seen = await anext(looks)
    if isinstance(seen, str):
        print(f"specpool top: {settings.address}: {clean(seen)}", file=sys.stderr)
        return 1
    if settings.json_object:
        print(json.dumps(asdict(seen)))
    else:
        console.print(Panels(seen))
    return 0


async def _looks(settings: TopSettings) -> AsyncGenerator[View | str, None]:
    """The view of the server, every interval; the reason instead of a view if the call fails."""
    earlier: pb.GetServerInfoResponse | None = None
    async with AsyncClient(settings.address, **settings.security) as client:
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    info, models = await _look(client)
            except grpc.aio.AioRpcError as error:
                earlier = None  # rates across an outage would mean little
                yield status_line(error)
            except TimeoutError:
                earlier = None
                yield f"no answer within {ANSWER_SECONDS:g} seconds"
            else:
                yield view_of(settings.address, info, models, earlier)
                earlier = info
            await asyncio.sleep(settings.interval)


async def _look(client: AsyncClient) -> tuple[pb.GetServerInfoResponse, pb.GetModelInfoResponse | None]:
    """State and limits of the server; no limits while the target has not been reached, since the call would fail."""
    info = await client.server_info()
    return info, await client.model_info() if info.target.HasField("model") else None
