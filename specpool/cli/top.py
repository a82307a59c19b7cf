"""`specpool top`: a live view of a server, using only its public API."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import asdict, dataclass

from pydantic import Field
from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from specpool.cli.top_view import Activity, Plan, View, Window, Worker, view_of
from specpool.cli.waiting import clean, waiting
from specpool.client import AsyncClient
from specpool.client.failures import is_permanent
from specpool.errors import RequestError, UnavailableError
from specpool.rpc.config.settings import CoordinatorAddress, Seconds, Settings
from specpool.rpc.security.settings import ClientSecurity
from specpool.v1 import generation_pb2 as pb

# The server queries its workers before it answers, and they may be busy.
TIMEOUT_SECONDS = 10.0
WIDE_COLUMNS = 100
"""Minimum terminal width for two columns of panels."""
MAX_SHARES = 8
BAR_COLUMNS = 20
UNDEFINED = "-"
STATE_STYLES = {"ready": "green", "refused": "red"}


class TopSettings(Settings, ClientSecurity):
    """Show a live view of a server: window, acceptance, groups, workers and rates. Ctrl-C exits."""

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
            screen.update(Panels(view) if isinstance(view, View) else failure_panel(settings.address, str(view)))
    return 0


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
        print(f"specpool top: {settings.address}: {clean(str(view))}", file=sys.stderr)
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


@dataclass(frozen=True)
class Panels:
    """Renders a view, in two columns on a wide terminal."""

    view: View

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self.view
        now = view.now or view.since_start
        period = "since its start" if view.now is None else f"of the last {now.seconds:.1f} s"
        yield Text.assemble(
            ("specpool ", "bold"),
            f"{clean(view.version)} at {view.address}, up {_duration(view.uptime_s)}. Shares {period}.",
        )
        left = Group(_panel("Window", _window(view.window)), _panel("Rates", _rates(view)))
        right = Group(_panel("Speculation", _speculation(now, view.plan)), _panel("Rounds", _rounds(now)))
        if options.max_width >= WIDE_COLUMNS:
            columns = Table.grid(Column(ratio=1), Column(ratio=1), expand=True)
            columns.add_row(left, right)
            yield columns
        else:
            yield from (left, right)
        yield _panel("Workers", Group(*map(_worker, view.workers)))


def failure_panel(address: str, reason: str) -> Panel:
    """Replace the view if a call fails."""
    text = Text(f"{clean(reason)}\n\nRetrying. Ctrl-C ends.")
    return Panel(text, title=Text(f"No answer from {address}"), border_style="red")


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))


def _window(window: Window) -> RenderableType:
    loads = _grid()
    loads.add_row("running", f"{window.running} of {window.max_num_seqs}", _bar(window.running, window.max_num_seqs))
    loads.add_row("queued", f"{window.queued} of {window.queue_size}", _bar(window.queued, window.queue_size))
    tokens = "adaptive" if window.draft_length is None else str(window.draft_length)
    limit = "" if window.max_model_len is None else f", maximum {window.max_model_len} positions"
    return Group(loads, Text(f"policy {clean(window.policy)}, draft tokens: {tokens}{limit}", style="dim"))


def _rates(view: View) -> Table:
    rates = Table("", Column("now", justify="right"), Column("since start", justify="right"), box=None, expand=True)

    def add(name: str, number: Callable[[Activity], str]) -> None:
        rates.add_row(name, UNDEFINED if view.now is None else number(view.now), number(view.since_start))

    add("tokens/s", lambda activity: _number(activity.tokens_per_s))
    add("prompt tokens/s", lambda activity: _number(activity.prompt_tokens_per_s))
    add("  cached", lambda activity: _percent(activity.cached_share))
    add("requests/s", lambda activity: _number(activity.requests_per_s))
    add("finished/s", lambda activity: _number(sum(activity.finished_per_s.values())))
    add("refused/s", lambda activity: _number(sum(activity.refused_per_s.values())))
    for code in view.since_start.refused_per_s:
        add(f"  {clean(code)}/s", lambda activity, code=code: _number(activity.refused_per_s.get(code, 0.0)))  # type: ignore[misc]
    add("rounds/s", lambda activity: _number(activity.rounds_per_s))
    add("cache misses/s", lambda activity: _number(activity.cache_misses_per_s))
    return rates


def _speculation(activity: Activity, plan: Plan) -> Table:
    table = _grid()
    rate, length = activity.drafts.acceptance_rate, activity.mean_acceptance_length
    table.add_row("accepted", _percent(rate), _bar(rate or 0.0))
    for method, drafts in activity.methods.items():
        speed = f"of {_number(drafts.tokens_per_s)} draft tokens/s"
        table.add_row(f"  {clean(method)}", _percent(drafts.acceptance_rate), speed)
    table.add_row("mean acceptance length", UNDEFINED if length is None else f"{length:.2f}")
    table.add_row("draft tokens", "", _share_list(activity.draft_lengths))
    expected = f"{_number(plan.expected_tokens_per_s)} tokens/s, plain {_number(plan.plain_tokens_per_s)}"
    table.add_row("plan: draft steps", str(plan.draft_steps), expected if plan.plain_tokens_per_s else "")
    return table


def _rounds(activity: Activity) -> Table:
    table = _grid()
    size = activity.mean_group_size
    table.add_row("mean group size", UNDEFINED if size is None else f"{size:.1f}", _share_list(activity.group_sizes))
    table.add_row("same length", _percent(activity.same_length_share), _bar(activity.same_length_share or 0.0))
    for stage, share in sorted(activity.stage_shares.items(), key=lambda item: -item[1]):
        table.add_row(f"time: {clean(stage)}", _percent(share), _bar(share))
    return table


def _worker(worker: Worker) -> RenderableType:
    ranks = f"{worker.ranks} ranks" if (worker.ranks or 1) > 1 else ""
    activations = f"{worker.activations} activations" if worker.activations else ""
    details = [worker.model, worker.device, ranks, worker.dtype, activations, worker.equivalence]
    lines: list[RenderableType] = [
        Text.assemble(
            (worker.role, "bold"),
            f"{' with the target' if worker.is_carried else ''} at {clean(worker.address)}: ",
            (clean(worker.state), STATE_STYLES.get(worker.state, "yellow")),
            clean("".join(f", {part}" for part in details if part)),
        )
    ]
    if worker.slots_in_use is not None and worker.slots_total is not None:
        loads, used, total = _grid(), worker.slots_in_use, worker.slots_total
        loads.add_row("  slots", f"{used} of {total}", _bar(used, total))
        if worker.kv_usage is not None:
            size = f" of {worker.kv_bytes / 2**20:,.0f} MiB" if worker.kv_bytes is not None else ""
            loads.add_row("  KV cache", _percent(worker.kv_usage) + size, _bar(worker.kv_usage))
        lines.append(loads)
    lines += [Text(f"  {clean(line)}", style="yellow") for line in (worker.reason, *worker.notes) if line]
    return Group(*lines)


def _grid() -> Table:
    """Lay out rows of a name, a number, and a bar or text."""
    columns = Column(no_wrap=True), Column(justify="right", no_wrap=True), Column(ratio=1)
    return Table.grid(*columns, padding=(0, 1, 0, 0), expand=True)


def _bar(part: float, total: float = 1.0) -> Bar:
    return Bar(size=total or 1.0, begin=0, end=part, width=BAR_COLUMNS, color="cyan", bgcolor="bright_black")


def _share_list(shares: Mapping[int, float]) -> str:
    """Return the largest shares, in the order of their keys."""
    largest = sorted(sorted(shares, key=lambda key: -shares[key])[:MAX_SHARES])
    return "  ".join(f"{key}: {_percent(shares[key])}" for key in largest) or UNDEFINED


def _percent(share: float | None) -> str:
    return UNDEFINED if share is None else f"{share:.0%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds % 60)} s"
