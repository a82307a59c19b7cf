"""Draws the panels of the Grafana dashboard without Grafana, from a Prometheus's answers to the same queries.

python -m benchmarks.dashboard [--prometheus http://127.0.0.1:9090] [--minutes 10] [--output docs/dashboard.png]
"""

import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.dates import DateFormatter
from matplotlib.figure import Figure

from benchmarks.report import parser_of

DASHBOARD = Path(__file__).parents[1] / "deploy/helm/specpool/monitoring/dashboard.json"
POINTS = 120
GRID_COLUMNS, INCHES_PER_ROW = 24, 0.42
MAX_IN_LEGEND = 8
MAX_MINUTES = 60 * 24 * 30
SECONDS_PER_DAY = 86_400
INVALID_QUERY = (400, 422)
"""HTTP statuses for a wrong query."""

Series: TypeAlias = list[tuple[str, list[float], list[float]]]
"""Name, times and values of each series; times in days since 1970, as in matplotlib."""


@dataclass(frozen=True)
class Query:
    """A query of a panel, and Grafana's template for the names of its series."""

    expression: str
    legend: str

    def with_values(self, interval: str) -> str:
        """The expression as Grafana sends it for all jobs and instances, with rates over this interval."""
        return re.sub(r"\$(job|instance)\b", ".*", self.expression).replace("$__rate_interval", interval)

    def name_of(self, labels: Mapping[str, str]) -> str:
        """The name of a series with these labels."""
        return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), self.legend)


@dataclass(frozen=True)
class Panel:
    """A panel and its place in a grid of 24 columns. Rows are panels without queries."""

    title: str
    kind: str
    unit: str
    x: int
    y: int
    width: int
    height: int
    stacked: bool
    queries: tuple[Query, ...]


def read_panels(path: Path = DASHBOARD) -> list[Panel]:
    """The panels of a dashboard, in order."""
    return [_panel(found) for found in json.loads(path.read_text())["panels"]]


def _panel(found: Mapping[str, Any]) -> Panel:
    place, defaults = found["gridPos"], found.get("fieldConfig", {}).get("defaults", {})
    queries = tuple(Query(target["expr"], target["legendFormat"]) for target in found.get("targets", ()))
    stacked = "stacking" in defaults.get("custom", {})
    grid = (place["x"], place["y"], place["w"], place["h"])
    return Panel(found["title"], found["type"], defaults.get("unit", ""), *grid, stacked, queries)


def ask(prometheus: str, path: str, **parameters: str) -> Any:
    """The answer of a Prometheus's HTTP API. OSError; ValueError: it refuses the query."""
    query = urllib.parse.urlencode(parameters)
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{query}", timeout=30) as response:
            return json.load(response)["data"]
    except urllib.error.HTTPError as error:
        if error.code not in INVALID_QUERY:
            raise
        raise ValueError(f"{parameters.get('query')}: {error.read().decode()}") from None


def main() -> None:
    """Parses the command line, asks, draws."""
    parser = parser_of(__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--output", type=Path, default=Path("docs/dashboard.png"))
    arguments = parser.parse_args()
    if not 1 <= arguments.minutes <= MAX_MINUTES:
        parser.error(f"--minutes: {arguments.minutes:g} is not from 1 to {MAX_MINUTES}")
    end = time.time()
    span = (end - 60 * arguments.minutes, end)
    try:
        figure = dashboard_figure(read_panels(), lambda query: answers(arguments.prometheus, query, span))
    except (OSError, ValueError, HTTPException) as error:
        raise SystemExit(f"dashboard: --prometheus {arguments.prometheus}: {error}") from None
    try:
        figure.savefig(arguments.output, dpi=60)
    except (OSError, ValueError) as error:
        raise SystemExit(f"dashboard: --output {arguments.output}: {error}") from None


def answers(prometheus: str, query: Query, span: tuple[float, float]) -> Series:
    """The series of a query over a span in seconds since the epoch."""
    step = (span[1] - span[0]) / POINTS
    data = ask(
        prometheus, "query_range", query=query.with_values(f"{max(20, math.ceil(4 * step))}s"),
        start=str(span[0]), end=str(span[1]), step=str(step),
    )  # fmt: skip
    return [
        (
            query.name_of(found["metric"]),
            [at / SECONDS_PER_DAY for at, _ in found["values"]],
            [float(value) for _, value in found["values"]],
        )
        for found in data["result"]
    ]


def dashboard_figure(panels: list[Panel], answer: Callable[[Query], Series]) -> Figure:
    """All panels in their places."""
    rows = max(panel.y + panel.height for panel in panels)
    figure = Figure(figsize=(GRID_COLUMNS, rows * INCHES_PER_ROW))
    for panel in panels:
        left, bottom = panel.x / GRID_COLUMNS, 1 - (panel.y + panel.height) / rows
        width, height = panel.width / GRID_COLUMNS, panel.height / rows
        if panel.kind == "row":
            figure.text(left + 0.005, bottom + height / 2, panel.title, weight="bold", size=15, va="center")
            continue
        axes = figure.add_axes((left + 0.13 * width, bottom + 0.12 * height, 0.85 * width, 0.74 * height))
        axes.set_title(panel.title, loc="left", fontsize=10)
        DRAW[panel.kind](axes, panel, [series for query in panel.queries for series in answer(query)])
    return figure


def _lines(axes: Axes, panel: Panel, series: Series) -> None:
    if panel.stacked and series:
        times = max((times for _, times, _ in series), key=len)
        by_time = [dict(zip(own, values, strict=True)) for _, own, values in series]
        heights = [[known.get(at, 0.0) for at in times] for known in by_time]
        axes.stackplot(times, heights, alpha=0.7, labels=[name for name, _, _ in series])
    else:
        for name, times, values in series:
            axes.plot(times, values, label=name, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: _text(value, panel.unit))
    _times(axes)
    if 0 < len(series) <= MAX_IN_LEGEND:
        axes.legend(fontsize=7, loc="upper left")


def _heat(axes: Axes, panel: Panel, series: Series) -> None:
    """Draws the buckets of a histogram; Prometheus's buckets are cumulative."""
    ordered = sorted(series, key=lambda found: float(found[0]))
    if not ordered:
        return
    times = ordered[0][1]
    below, cells = [0.0] * len(times), []
    for _, _, values in ordered:
        cells.append([value - less for value, less in zip(values, below, strict=True)])
        below = values
    axes.pcolormesh(times, range(len(cells)), cells, cmap="Blues", norm=Normalize(0), shading="nearest")
    axes.set_yticks(range(len(cells)), labels=[name for name, _, _ in ordered], fontsize=7)
    _times(axes)


def _states(axes: Axes, panel: Panel, series: Series) -> None:
    """Draws a bar wherever a series is 1."""
    color = {"Links ready": "tab:green", "Models hanging": "tab:red"}.get(panel.title, "tab:orange")
    for row, (name, times, values) in enumerate(series):
        axes.fill_between(times, row - 0.4, row + 0.4, where=[value == 1 for value in values], color=color, step="post")
        axes.text(times[0], row, name, fontsize=7, va="center")
        axes.set_xlim(times[0], times[-1])
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(series) - 0.4)
    _times(axes)


def _number(axes: Axes, panel: Panel, series: Series) -> None:
    axes.axis("off")
    text = "\n".join(f"{_text(values[-1], panel.unit)} {name}" for name, _, values in series)
    axes.text(0.5, 0.5, text, size=16, ha="center", va="center", transform=axes.transAxes)


def _table(axes: Axes, panel: Panel, series: Series) -> None:
    axes.axis("off")
    axes.text(0, 1, "\n".join(name for name, _, _ in series), size=9, va="top", transform=axes.transAxes)


def _times(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))
    axes.tick_params(labelsize=7)


def _text(value: float, unit: str) -> str:
    match unit:
        case "percentunit":
            return f"{value:.0%}"
        case "s":
            return f"{value:g} s" if value >= 1 else f"{1000 * value:.3g} ms"
        case "bytes":
            return f"{value / 2**20:,.0f} MiB"
    return f"{value:,.3g}"


DRAW: dict[str, Callable[[Axes, Panel, Series], None]] = {
    "timeseries": _lines, "heatmap": _heat, "state-timeline": _states, "stat": _number, "table": _table,
}  # fmt: skip


if __name__ == "__main__":
    main()
