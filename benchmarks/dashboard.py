"""The panels of the Grafana dashboard, and a Prometheus server for their queries."""

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specpool.rpc.ports import free_port

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "deploy/helm/specpool/monitoring/dashboard.json"
ALERTS = DASHBOARD.with_name("alerts.yaml")
CONFIGURATION = ROOT / "deploy/monitoring/prometheus.yml"


@dataclass(frozen=True)
class Query:
    """A query of a panel, and Grafana's template for the names of its series."""

    expression: str
    legend: str

    def with_values(self, interval: str) -> str:
        """Return the expression for all jobs and instances, with rates over this interval, as Grafana sends it."""
        return re.sub(r"\$(job|instance)\b", ".*", self.expression).replace("$__rate_interval", interval)


@dataclass(frozen=True)
class Panel:
    """A panel and its place in a grid of 24 columns."""

    number: int
    title: str
    unit: str
    x: int
    y: int
    width: int
    height: int
    queries: tuple[Query, ...]


def read_panels() -> list[Panel]:
    """Return all panels in order. Headings are panels without queries."""
    return [_panel(panel) for panel in json.loads(DASHBOARD.read_text())["panels"]]


def _panel(panel: dict[str, Any]) -> Panel:
    place = panel["gridPos"]
    return Panel(
        number=panel["id"],
        title=panel["title"],
        unit=panel.get("fieldConfig", {}).get("defaults", {}).get("unit", ""),
        x=place["x"],
        y=place["y"],
        width=place["w"],
        height=place["h"],
        queries=tuple(Query(target["expr"], target["legendFormat"]) for target in panel.get("targets", ())),
    )


def ask(prometheus: str, path: str, **parameters: str) -> Any:
    """Query Prometheus and return the data. Raises OSError."""
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{query}", timeout=30) as response:
        return json.load(response)["data"]


@contextmanager
def prometheus(folder: Path, metrics_port: int) -> Iterator[str]:
    """Run Prometheus with our configuration, but these ports and a scrape interval of 1 s; yield its URL.

    `folder`: for its configuration and data. `metrics_port`: the first of `specpool up`. Raises OSError if Prometheus
    is not installed.
    """
    config = yaml.safe_load(CONFIGURATION.read_text())
    config["global"] = dict.fromkeys(config["global"], "1s")
    config["rule_files"] = [str(ALERTS)]
    text = re.sub(r"127\.0\.0\.1:910(\d)", lambda match: f"127.0.0.1:{metrics_port + int(match[1])}", yaml.dump(config))
    (folder / "prometheus.yml").write_text(text)
    address = f"127.0.0.1:{free_port()}"
    flags = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data",
             "web.listen-address": address, "log.level": "warn"}  # fmt: skip
    process = subprocess.Popen(["prometheus", *(f"--{name}={value}" for name, value in flags.items())])
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)
