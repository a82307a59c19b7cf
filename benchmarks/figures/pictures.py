"""The pictures of the docs, drawn from the results. Each shows the date of its result."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from pydantic import TypeAdapter
from rich.console import Console, RenderableType

from benchmarks.figures.pages import Results
from specpool.cli.demo import table_of
from specpool.cli.top_panels import Panels
from specpool.cli.top_view import View

DASHBOARD = "docs/dashboard.png"
KEY = "Source"
"""Entry of a PNG file that names the result, and its hash."""


def demo_picture(results: Results) -> str:
    """The table of `specpool demo`, as SVG."""
    result = {name: value for name, value in results["demo"].items() if name != "run"}
    return _terminal(60, results["demo"]["run"], results["demo"]["run"]["command"], table_of(result))


def top_picture(results: Results) -> str:
    """The view of `specpool top`, as SVG."""
    result = results["monitoring"]
    view = TypeAdapter(View).validate_python(result["view"])
    return _terminal(100, result["run"], "specpool top", Panels(view))


def _terminal(width: int, run: dict[str, Any], command: str, shown: RenderableType) -> str:
    console = Console(record=True, width=width, force_terminal=True, file=StringIO())
    console.print(f"$ {command}", shown, sep="\n")
    return console.export_svg(title=f"{command.partition(' -')[0]}, {run['date']}")


def dashboard_figure(results: Results) -> Figure:
    """Plots of the dashboard's panels."""
    result = results["monitoring"]
    run, panels = result["run"], result["panels"]
    figure = Figure(figsize=(8, 2.4 * len(panels)), layout="constrained")
    figure.suptitle(f"Panels of the dashboard: the embedded pair on {run['machine']}, {run['date']}", fontsize=10)
    for axes, panel in zip(figure.subplots(len(panels), sharex=True), panels, strict=True):
        _plot(axes, panel, result["first_s"], result["clients_from_s"])
    axes.set_xlabel("seconds")
    return figure


def _plot(axes: Axes, panel: dict[str, Any], first: int, clients: dict[str, int]) -> None:
    scale, unit = (1000, " (ms)") if panel["unit"] == "s" else (1, "")
    axes.set_title(panel["title"] + unit, loc="left", fontsize=10)
    for legend, values in panel["series"].items():
        shown = [None if value is None else scale * value for value in values]
        axes.plot(range(first, first + len(shown)), shown, label=legend)  # type: ignore[arg-type]
    for count, begin in clients.items():
        axes.axvline(begin, color="grey", linewidth=0.8, linestyle=":")
        axes.annotate(
            f" {count} client{'s' * (count != '1')}", (begin, 1), xycoords=("data", "axes fraction"), va="top"
        )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


SVGS: dict[str, Callable[[Results], str]] = {"docs/demo.svg": demo_picture, "docs/top.svg": top_picture}
SOURCES = {"docs/demo.svg": "demo", "docs/top.svg": "monitoring", DASHBOARD: "monitoring"}
"""The result that each picture shows."""


def draw(root: Path, results: Results) -> None:
    """Draw the pictures that differ from the results."""
    for name in set(outdated(root, results)):
        if name == DASHBOARD:
            dashboard_figure(results).savefig(root / name, dpi=110, metadata={KEY: source_of(results["monitoring"])})
        else:
            (root / name).write_text(SVGS[name](results))


def outdated(root: Path, results: Results) -> Iterator[str]:
    """The pictures that are missing or do not show the results."""
    for name, picture in SVGS.items():
        if not (root / name).exists() or text_of((root / name).read_text()) != text_of(picture(results)):
            yield name
    if not (root / DASHBOARD).exists() or _source_in(root / DASHBOARD) != source_of(results["monitoring"]):
        yield DASHBOARD


def _source_in(path: Path) -> object:
    with Image.open(path) as image:
        return image.info.get(KEY)


def source_of(result: dict[str, Any]) -> str:
    """The command and the hash of a result."""
    digest = hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()
    return f"{result['run']['command']}, {result['run']['date']}, {digest[:16]}"


def text_of(picture: str) -> list[str]:
    """The words of an SVG picture; the rest depends on the version of rich."""
    return unescape(" ".join(re.findall(r">([^<>]+)</text>", picture))).split()
