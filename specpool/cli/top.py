"""`specpool top`: a live view of a server, using only its public API."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict

from pydantic import Field
from rich.console import Console
from rich.live import Live
from rich.text import Text

from specpool.cli.top_panels import Panels, failure_panel
from specpool.cli.top_view import View, view_of
from specpool.cli.waiting import clean, waiting
from specpool.client import AsyncClient
from specpool.client.failures import is_permanent
from specpool.errors import RequestError, UnavailableError
from specpool.rpc.config.help import with_flags
from specpool.rpc.config.settings import CoordinatorAddress, Seconds, Settings
from specpool.rpc.security.settings import ClientSecurity
from specpool.v1 import generation_pb2 as pb

# The server queries its workers before it answers, and they may be busy.
TIMEOUT_SECONDS = 10.0


class TopSettings(Settings, ClientSecurity):
    """Show a live view of a server: workers, window, speculation, rates and rounds. Ctrl-C exits."""

    address: CoordinatorAddress = Field("127.0.0.1:50050", description="host:port of the coordinator")
    interval: Seconds = Field(2.0, ge=0.1, description="seconds between updates")
    once: bool = Field(
        False, description="print one view over one interval and exit; the default if the output is not a terminal"
    )
    wait_seconds: Seconds = Field(60.0, ge=0, description="how long a single view waits for a server; 0: not at all")
    json_object: bool = Field(False, alias="json", description="print one view as a JSON object")


def top(settings: TopSettings) -> int:
    console = Console()
    # With FORCE_COLOR and similar, rich takes a pipe for a terminal.
    is_terminal = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    live = is_terminal and not settings.once and not settings.json_object
    return asyncio.run(_show(settings, console) if live else _print_once(settings, console))


async def _show(settings: TopSettings, console: Console) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # restore the terminal, as after Ctrl-C
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    connecting = Text(f"connecting to {settings.address}")
    with contextlib.suppress(asyncio.CancelledError), Live(connecting, console=console, screen=True) as screen:
        async for view in _views(settings):
            screen.update(
                Panels(view, console.height)
                if isinstance(view, View)
                else failure_panel(settings.address, _reason(view))
            )
    return 0


def _reason(error: Exception) -> str:
    return with_flags(TopSettings, clean(str(error)))


async def _print_once(settings: TopSettings, console: Console) -> int:
    deadline = time.monotonic() + settings.wait_seconds
    async with contextlib.aclosing(_views(settings)) as views:
        view = await anext(views)
        with waiting("specpool top", settings.address) as show:
            while isinstance(view, UnavailableError) and not is_permanent(view) and time.monotonic() < deadline:
                show("no answer")
                view = await anext(views)
        if isinstance(view, View):  # rates need a second state
            view = await anext(views)
    if isinstance(view, Exception):
        print(f"specpool top: {settings.address}: {_reason(view)}", file=sys.stderr)
        return 1
    if settings.json_object:
        print(json.dumps(asdict(view)))
    else:
        console.print(Panels(view))
    return 0


async def _views(settings: TopSettings) -> AsyncGenerator[View | Exception, None]:
    """Yield a view of the server at every interval, or the error of a failed call."""
    earlier: pb.GetServerInfoResponse | None = None
    async with AsyncClient(settings.address, **settings.security) as client:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    info = await client.server_info()
                    # The call would fail before the target is connected.
                    models = await client.model_info() if info.target.HasField("model") else None
            except RequestError as error:
                earlier = None  # rates across an outage would be misleading
                yield error
            except TimeoutError:
                earlier = None
                yield TimeoutError(f"no answer within {TIMEOUT_SECONDS:g} seconds")
            else:
                yield view_of(settings.address, info, models, earlier)
                earlier = info
            await asyncio.sleep(settings.interval)
