"""Draws the panels of the Grafana dashboard without Grafana, from the answers of a Prometheus to the same queries.

python -m benchmarks.dashboard [--prometheus http://127.0.0.1:9090] [--minutes 10] [--output docs/dashboard.png]
"""

import argparse
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

DASHBOARD = Path(__file__).parents[1] / "deploy/helm/specpool/monitoring/dashboard.json"
POINTS = 120
GRID_COLUMNS = 24
INCHES_PER_COLUMN, INCHES_PER_ROW = 1.0, 0.42
MOST_IN_LEGEND = 8
MOST_MINUTES = 60 * 24 * 30

SECONDS_PER_DAY = 86_400
REFUSALS = (400, 422)
"""HTTP statuses of a query that is wrong."""

Series: TypeAlias = list[tuple[str, list[float], list[float]]]
"""Name, times and values of each series; times in days since 1970, as matplotlib counts them."""


@dataclass(frozen=True)
class Query:
    """A query of a panel, and the template by which Grafana names its series."""

    expression: str
    legend: str

    def with_values(self, interval: str) -> str:
        """The expression as Grafana would send it, with all jobs and instances, and rates over this interval."""
        return re.sub(r"\$(job|instance)\b", ".*", self.expression).replace("$__rate_interval", interval)

    def name_of(self, labels: Mapping[str, str]) -> str:
        """The name of a series with these labels."""
        return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), self.legend)


@dataclass(frozen=True)
class Panel:
    """A panel, with its place in a grid of 24 columns. Rows are panels without queries."""

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
    """The panels of a dashboard, in its order."""
    return [_panel(found) for found in json.loads(path.read_text())["panels"]]


def ask(prometheus: str, path: str, **parameters: str) -> Any:
    """What the HTTP API of a Prometheus answers. OSError; ValueError if it refuses the query."""
    query = urllib.parse.urlencode(parameters)
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{query}", timeout=30) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code not in REFUSALS:
            raise
        raise ValueError(f"{parameters.get('query')}: {error.read().decode()}") from None
    return answer["data"]


def main() -> None:
    """Parses the command line, asks, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--output", type=Path, default=Path("docs/dashboard.png"))
    arguments = parser.parse_args()
    if not 1 <= arguments.minutes <= MOST_MINUTES:
        parser.error(f"--minutes: {arguments.minutes:g} is not from 1 to {MOST_MINUTES}")
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
    """The series that answer a query, over a span in seconds since the epoch."""
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
    """All panels at their places."""
    rows = max(panel.y + panel.height for panel in panels)
    figure = Figure(figsize=(GRID_COLUMNS * INCHES_PER_COLUMN, rows * INCHES_PER_ROW))
    for panel in panels:
        box = (panel.x / GRID_COLUMNS, 1 - (panel.y + panel.height) / rows)
        size = (panel.width / GRID_COLUMNS, panel.height / rows)
        if panel.kind == "row":
            figure.text(box[0] + 0.005, box[1] + size[1] / 2, panel.title, weight="bold", size=15, va="center")
            continue
        axes = figure.add_axes((box[0] + 0.13 * size[0], box[1] + 0.12 * size[1], 0.85 * size[0], 0.74 * size[1]))
        axes.set_title(panel.title, loc="left", fontsize=10)
        DRAWN[panel.kind](axes, panel, [series for query in panel.queries for series in answer(query)])
    return figure


def _panel(found: Mapping[str, Any]) -> Panel:
    place, defaults = found["gridPos"], found.get("fieldConfig", {}).get("defaults", {})
    return Panel(
        title=found["title"],
        kind=found["type"],
        unit=defaults.get("unit", ""),
        x=place["x"],
        y=place["y"],
        width=place["w"],
        height=place["h"],
        stacked="stacking" in defaults.get("custom", {}),
        queries=tuple(Query(target["expr"], target["legendFormat"]) for target in found.get("targets", ())),
    )


def _lines(axes: Axes, panel: Panel, series: Series) -> None:
    if panel.stacked and series:
        times = max((times for _, times, _ in series), key=len)
        by_time = [dict(zip(its, values, strict=True)) for _, its, values in series]
        axes.stackplot(times, [[known.get(at, 0.0) for at in times] for known in by_time], alpha=0.7,
                       labels=[name for name, _, _ in series])  # fmt: skip
    else:
        for name, times, values in series:
            axes.plot(times, values, label=name, linewidth=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: _text(value, panel.unit))
    _times(axes)
    if 0 < len(series) <= MOST_IN_LEGEND:
        axes.legend(fontsize=7, loc="upper left")


def _heat(axes: Axes, panel: Panel, series: Series) -> None:
    """Draws the buckets of a histogram, which Prometheus gives as sums up to each bound."""
    ordered = sorted(series, key=lambda found: float(found[0]))
    if not ordered:
        return
    times = ordered[0][1]
    below, cells, names = [0.0] * len(times), [], []
    for name, _, values in ordered:
        cells.append([value - less for value, less in zip(values, below, strict=True)])
        below = values
        names.append(name)
    axes.pcolormesh(times, range(len(names)), cells, cmap="Blues", norm=Normalize(0), shading="nearest")
    axes.set_yticks(range(len(names)), labels=names, fontsize=7)
    _times(axes)


def _states(axes: Axes, panel: Panel, series: Series) -> None:
    """Draws a bar for each series, where it is 1."""
    color = {"Links ready": "tab:green", "Models hanging": "tab:red"}.get(panel.title, "tab:orange")
    for row, (_, times, values) in enumerate(series):
        axes.fill_between(times, row - 0.4, row + 0.4, where=[value == 1 for value in values], color=color, step="post")
    for row, (name, times, _) in enumerate(series):
        axes.text(times[0], row, name, fontsize=7, va="center")
        axes.set_xlim(times[0], times[-1])
    axes.set_yticks([])
    axes.set_ylim(-0.6, len(series) - 0.4)
    _times(axes)


def _number(axes: Axes, panel: Panel, series: Series) -> None:
    axes.axis("off")
    last = [(name, values[-1]) for name, _, values in series]
    text = "\n".join(f"{_text(value, panel.unit)} {name}" for name, value in last)
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


DRAWN: dict[str, Callable[[Axes, Panel, Series], None]] = {
    "timeseries": _lines,
    "heatmap": _heat,
    "state-timeline": _states,
    "stat": _number,
    "table": _table,
}


if __name__ == "__main__":
    main()
