"""How `specpool top` draws its numbers: panels, in two columns where the terminal is wide enough."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rich import box
from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from specpool.cli.activity import Activity
from specpool.cli.top_view import Plan, Pool, View, Worker

WIDE_COLUMNS = 100
"""Terminal width, in columns, from which panels stand side by side."""
MOST_SHARES = 8
BAR_COLUMNS = 20
NOTHING = "-"
STATE_STYLES = {"ready": "green", "resting": "yellow", "connecting": "yellow", "refused": "red"}


@dataclass(frozen=True)
class Panels:
    """A view as rich draws it."""

    view: View

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self.view
        now = view.now or view.since_start
        left: list[RenderableType] = [_panel("Pool", _pool(view.pool)), _panel("Rates", _rates(view))]
        right: list[RenderableType] = [
            _panel("Speculation", _speculation(now, view.plan)),
            _panel("Rounds", _rounds(now)),
        ]
        yield _title(view)
        if options.max_width >= WIDE_COLUMNS:
            columns = Table.grid(Column(ratio=1), Column(ratio=1), expand=True)
            columns.add_row(Group(*left), Group(*right))
            yield columns
        else:
            yield from (*left, *right)
        yield _panel("Workers", Group(*map(_worker, view.workers)))


@dataclass(frozen=True)
class FailurePanel:
    """What is drawn instead of a server that does not answer."""

    address: str
    reason: str

    def __rich__(self) -> Panel:
        text = Text(f"{clean(self.reason)}\n\nTrying again. Ctrl-C ends.")
        return Panel(text, title=Text(f"No answer from {self.address}"), border_style="red")


def clean(text: str) -> str:
    """The text without characters that would control the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def _title(view: View) -> Text:
    span = "since its start" if view.now is None else f"of the last {view.now.seconds:.1f} s"
    return Text.assemble(
        ("specpool ", "bold"),
        f"{clean(view.version)} at {view.address}, up {_duration(view.uptime_s)}. Shares {span}.",
    )


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", box=box.ROUNDED, padding=(0, 1))


def _pool(pool: Pool) -> RenderableType:
    loads = _grid()
    loads.add_row("running", f"{pool.running} of {pool.max_num_seqs}", _bar(pool.running, pool.max_num_seqs))
    loads.add_row("queued", f"{pool.queued} of {pool.queue_size}", _bar(pool.queued, pool.queue_size))
    length = "as many as save time" if pool.draft_length is None else str(pool.draft_length)
    most = "" if pool.max_model_len is None else f", at most {pool.max_model_len} positions"
    return Group(loads, Text(f"policy {clean(pool.policy)}, draft tokens: {length}{most}", style="dim"))


def _rates(view: View) -> Table:
    rates = Table("", Column("now", justify="right"), Column("since start", justify="right"), box=None, expand=True)

    def add(name: str, number: Callable[[Activity], str]) -> None:
        rates.add_row(name, NOTHING if view.now is None else number(view.now), number(view.since_start))

    add("tokens/s", lambda done: _number(done.tokens_per_s))
    add("prompt tokens/s", lambda done: _number(done.prompt_tokens_per_s))
    add("  of them cached", lambda done: _percent(done.cached_share))
    add("requests/s", lambda done: _number(done.requests_per_s))
    add("finished/s", lambda done: _number(sum(done.finished_per_s.values())))
    add("refused/s", lambda done: _number(sum(done.refused_per_s.values())))
    for code in view.since_start.refused_per_s:
        add(f"  {clean(code)}/s", lambda done, code=code: _number(done.refused_per_s.get(code, 0.0)))  # type: ignore[misc]
    add("rounds/s", lambda done: _number(done.rounds_per_s))
    add("cache misses/s", lambda done: _number(done.cache_misses_per_s))
    return rates


def _speculation(done: Activity, plan: Plan) -> Table:
    table = _grid()
    length = done.mean_acceptance_length
    table.add_row("accepted", _percent(done.drafts.acceptance_rate), _bar(done.drafts.acceptance_rate or 0.0))
    for method, drafts in done.methods.items():
        table.add_row(
            f"  {clean(method)}", _percent(drafts.acceptance_rate), f"of {_number(drafts.tokens_per_s)} draft tokens/s"
        )
    table.add_row("mean acceptance length", NOTHING if length is None else f"{length:.2f}")
    table.add_row("draft lengths", "", _share_list(done.draft_lengths))
    expected = f"{_number(plan.expected_tokens_per_s)} tokens/s, plainly {_number(plan.plain_tokens_per_s)}"
    table.add_row("plan: draft steps", str(plan.draft_steps), expected if plan.plain_tokens_per_s else "")
    return table


def _rounds(done: Activity) -> Table:
    table = _grid()
    size = done.mean_group_size
    table.add_row("mean group size", NOTHING if size is None else f"{size:.1f}", _share_list(done.group_sizes))
    table.add_row("of the same length", _percent(done.same_length_share), _bar(done.same_length_share or 0.0))
    for stage, share in sorted(done.stage_shares.items(), key=lambda item: -item[1]):
        table.add_row(f"time: {clean(stage)}", _percent(share), _bar(share))
    return table


def _worker(worker: Worker) -> RenderableType:
    ranks = f"{worker.ranks} ranks" if (worker.ranks or 1) > 1 else ""
    known = [worker.model, worker.device, ranks, worker.dtype, worker.equivalence]
    lines: list[RenderableType] = [
        Text.assemble(
            (worker.role, "bold"),
            f" at {clean(worker.address)}: ",
            (clean(worker.state), STATE_STYLES.get(worker.state, "")),
            clean("".join(f", {part}" for part in known if part)),
        )
    ]
    if worker.slots_in_use is not None and worker.slots_total is not None:
        loads = _grid()
        loads.add_row("  slots", f"{worker.slots_in_use} of {worker.slots_total}",
                      _bar(worker.slots_in_use, worker.slots_total))  # fmt: skip
        if worker.kv_usage is not None:
            size = f" of {worker.kv_bytes / 2**20:,.0f} MiB" if worker.kv_bytes is not None else ""
            loads.add_row("  KV cache", _percent(worker.kv_usage) + size, _bar(worker.kv_usage))
        lines.append(loads)
    lines += [Text(f"  {clean(line)}", style="yellow") for line in (worker.reason, *worker.notes) if line]
    return Group(*lines)


def _grid() -> Table:
    """Rows of a name, a number, and a bar or a text."""
    return Table.grid(
        Column(no_wrap=True), Column(justify="right", no_wrap=True), Column(ratio=1), padding=(0, 1, 0, 0), expand=True
    )


def _bar(part: float, whole: float = 1.0) -> Bar:
    return Bar(size=whole or 1.0, begin=0, end=part, width=BAR_COLUMNS, color="cyan", bgcolor="bright_black")


def _share_list(shares: Mapping[int, float]) -> str:
    """The largest shares, in the order of their keys."""
    greatest: Iterable[int] = sorted(sorted(shares, key=lambda key: -shares[key])[:MOST_SHARES])
    return "  ".join(f"{key}: {_percent(shares[key])}" for key in greatest) or NOTHING


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


def _duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds % 60)} s"
