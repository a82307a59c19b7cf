"""The panels of `specpool top`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from specpool.cli.top_drafts import Draft
from specpool.cli.top_view import Activity, View, Window, Worker
from specpool.cli.waiting import clean

WIDE_COLUMNS = 80
"""Minimum terminal width for two columns of panels."""
MAX_SHARES, MIN_SHARE = 8, 0.005
FINGERPRINT_DIGITS = 8
BAR_COLUMNS = 20
UNDEFINED = "-"
STATE_STYLES = {"ready": "green", "refused": "red"}


@dataclass(frozen=True)
class Panels:
    """Renders a view, workers first. On a small screen, each worker takes one line."""

    view: View
    height: int | None = None
    """Lines of the screen; None: unlimited."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        detailed = self._parts(options.max_width, is_detailed=True)
        is_small = self.height is not None and len(console.render_lines(Group(*detailed), options)) > self.height
        yield from self._parts(options.max_width, is_detailed=False) if is_small else detailed

    def _parts(self, width: int, is_detailed: bool) -> list[RenderableType]:
        view = self.view
        now = view.now or view.since_start
        period = "since its start" if view.now is None else f"of the last {now.seconds:.1f} s"
        title = f"{clean(view.version)} at {view.address}, up {_duration(view.uptime_s)}. Shares {period}."
        workers = [*map(_detailed_worker if is_detailed else _worker_line, view.workers)]
        workers += map(_draft_line, view.drafts)
        load = _panel("Window", _window(view.window, is_detailed)), _panel("Speculation", _speculation(now))
        parts: list[RenderableType] = [
            Text.assemble(("specpool ", "bold"), title),
            _panel("Workers", Group(*workers)),
        ]
        if width >= WIDE_COLUMNS:
            columns = Table.grid(Column(ratio=1), Column(ratio=1), expand=True)
            columns.add_row(Group(*load), _panel("Rates", _rates(view)))
            parts.append(columns)
        else:
            parts += [*load, _panel("Rates", _rates(view))]
        return [*parts, _panel("Rounds", _rounds(now))]


def failure_panel(address: str, reason: str) -> Panel:
    """Return the panel that replaces the view when a call fails."""
    text = Text(f"{clean(reason)}\n\nRetrying. Ctrl-C exits.")
    return Panel(text, title=Text(f"No answer from {address}"), border_style="red")


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))


def _window(window: Window, is_detailed: bool) -> RenderableType:
    loads = _grid()
    loads.add_row("running", f"{window.running} of {window.max_num_seqs}", _bar(window.running, window.max_num_seqs))
    loads.add_row("queued", f"{window.queued} of {window.queue_size}", _bar(window.queued, window.queue_size))
    if not is_detailed:
        return loads
    tokens = "adaptive" if window.draft_length is None else str(window.draft_length)
    limit = "" if window.max_model_len is None else f", maximum {window.max_model_len} positions"
    return Group(loads, Text(f"policy {clean(window.policy)}, draft tokens: {tokens}{limit}", style="dim"))


def _rates(view: View) -> Table:
    periods = (Column(period, justify="right") for period in ("now", "overall"))
    rates = Table("", *periods, box=None, expand=True, pad_edge=False)

    def add(name: str, number: Callable[[Activity], str]) -> None:
        rates.add_row(name, UNDEFINED if view.now is None else number(view.now), number(view.since_start))

    add("tokens/s", lambda activity: _number(activity.tokens_per_s))
    add("prompt tokens/s", lambda activity: _number(activity.prompt_tokens_per_s))
    add("  cached", lambda activity: _percent(activity.cached_share))
    add("requests/s", lambda activity: _number(activity.requests_per_s))
    add("finished/s", lambda activity: _number(sum(activity.finished_per_s.values())))
    add("refused/s", lambda activity: _number(sum(activity.refused_per_s.values())))
    for code in view.since_start.refused_per_s:
        add(f"  {clean(code)}", lambda activity, code=code: _number(activity.refused_per_s.get(code, 0.0)))  # type: ignore[misc]
    add("rounds/s", lambda activity: _number(activity.rounds_per_s))
    add("cache misses/s", lambda activity: _number(activity.cache_misses_per_s))
    return rates


def _speculation(activity: Activity) -> RenderableType:
    """Show the gain from drafts over all rounds, then in rounds with draft tokens only."""
    table = _grid()
    table.add_row("tokens per round", _length(activity.tokens_per_round), "all rounds")
    drafted = f"{_percent(activity.drafted_share)} of rounds"
    table.add_row("  with drafts", _length(activity.mean_acceptance_length), drafted)
    rate = activity.drafts.acceptance_rate
    table.add_row("drafts accepted", _percent(rate), _bar(rate or 0.0))
    for method, drafts in activity.methods.items():
        table.add_row(f"  {clean(method)}", _percent(drafts.acceptance_rate), f"of {_number(drafts.tokens_per_s)}/s")
    return Group(table, Text(f"draft tokens  {_share_list(activity.draft_lengths)}"))


def _rounds(activity: Activity) -> RenderableType:
    size, same = activity.mean_group_size, _percent(activity.same_length_share)
    mean = UNDEFINED if size is None else f"{size:.1f}"
    stages = sorted(activity.stage_shares.items(), key=lambda item: -item[1])
    times = "  ".join(f"{clean(stage)}: {_percent(share)}" for stage, share in stages)
    return Text(
        f"sequences  {_share_list(activity.group_sizes)}  mean {mean}  same length {same}\ntime  {times or UNDEFINED}"
    )


def _worker_line(worker: Worker) -> RenderableType:
    """Describe a worker on one line, starting with its state, and the reason for the state on another."""
    parts = []
    if worker.slots_in_use is not None:
        parts.append(f"{worker.slots_in_use} of {worker.slots_total} slots")
    if worker.kv_usage is not None:
        parts.append(f"KV cache {_percent(worker.kv_usage)}")
    details = ", ".join([*parts, f"at {clean(worker.address)}"])
    role = f"{worker.role}{' with the target' if worker.is_carried else ''} "
    line = Text.assemble((role, "bold"), _state(worker), f", {details}", no_wrap=True, overflow="ellipsis")
    return Group(line, *_warnings(worker.reason))


def _draft_line(draft: Draft) -> Text:
    """Format a draft model on one line of at most 80 columns."""
    gain = UNDEFINED if draft.gain is None else f"{draft.gain:.2f}x"
    text = f": gain {gain}, {_percent(draft.acceptance_rate)} accepted, share {_percent(draft.share)}"
    fingerprint = draft.weights_fingerprint[:FINGERPRINT_DIGITS]
    name = draft.name if fingerprint in draft.name else f"{draft.name} ({fingerprint})"
    return Text.assemble((f"draft {clean(name)}", "bold"), text, no_wrap=True, overflow="ellipsis")


def _detailed_worker(worker: Worker) -> RenderableType:
    ranks = f"{worker.ranks} ranks" if (worker.ranks or 1) > 1 else ""
    activations = f"{worker.activations} activations" if worker.activations else ""
    details = [worker.model, worker.device, ranks, worker.dtype, activations, worker.equivalence]
    lines: list[RenderableType] = [
        Text.assemble(
            (worker.role, "bold"),
            f"{' with the target' if worker.is_carried else ''} at {clean(worker.address)}: ",
            _state(worker),
            clean("".join(f", {part}" for part in details if part)),
        )
    ]
    if worker.slots_in_use is not None and worker.slots_total is not None:
        loads, used, total = _grid(), worker.slots_in_use, worker.slots_total
        loads.add_row("  slots", f"{used} of {total}", _bar(used, total))
        if worker.kv_usage is not None:
            size = f" of {worker.kv_bytes / 2**20:,.0f} MiB" if worker.kv_bytes is not None else ""
            loads.add_row("  KV cache", _percent(worker.kv_usage) + size, _bar(worker.kv_usage))
        if worker.state_bytes:
            loads.add_row("  states", f"{worker.state_bytes / 2**20:,.0f} MiB")
        lines.append(loads)
    return Group(*lines, *_warnings(worker.reason, *worker.notes))


def _state(worker: Worker) -> tuple[str, str]:
    return clean(worker.state), STATE_STYLES.get(worker.state, "yellow")


def _warnings(*texts: str) -> list[Text]:
    return [Text(f"  {clean(text)}", style="yellow") for text in texts if text]


def _grid() -> Table:
    """Lay out rows of a name, a number, and a bar or text."""
    columns = Column(no_wrap=True), Column(justify="right", no_wrap=True), Column(ratio=1)
    return Table.grid(*columns, padding=(0, 1, 0, 0), expand=True)


def _bar(part: float, total: float = 1.0) -> Bar:
    return Bar(size=total or 1.0, begin=0, end=part, width=BAR_COLUMNS, color="cyan", bgcolor="bright_black")


def _share_list(shares: Mapping[int, float]) -> str:
    """Return the largest shares of at least 0.5%, in the order of their keys."""
    shown = [key for key in shares if shares[key] >= MIN_SHARE]
    largest = sorted(sorted(shown, key=lambda key: -shares[key])[:MAX_SHARES])
    return "  ".join(f"{key}: {_percent(shares[key])}" for key in largest) or UNDEFINED


def _length(tokens: float | None) -> str:
    return UNDEFINED if tokens is None else f"{tokens:.2f}"


def _percent(share: float | None) -> str:
    return UNDEFINED if share is None else f"{share:.0%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds % 60)} s"
