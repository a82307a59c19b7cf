"""The panels of the Grafana dashboard, and a client for Prometheus's HTTP API."""

import json
import re
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any

from deployment import ROOT

DASHBOARD = ROOT / "deploy/helm/specpool/monitoring/dashboard.json"


@dataclass(frozen=True)
class Query:
    """A query of a panel, and Grafana's template for the names of its series."""

    expression: str
    legend: str

    def with_values(self, interval: str) -> str:
        """The expression that Grafana sends for all jobs and instances, with rates over this interval."""
        return re.sub(r"\$(job|instance)\b", ".*", self.expression).replace("$__rate_interval", interval)


@dataclass(frozen=True)
class Panel:
    """A panel and its place in a grid of 24 columns."""

    x: int
    y: int
    width: int
    height: int
    queries: tuple[Query, ...]


def read_panels() -> list[Panel]:
    """All panels in order. Headings are panels without queries."""
    return [
        Panel(
            *(panel["gridPos"][side] for side in "xywh"),
            queries=tuple(Query(target["expr"], target["legendFormat"]) for target in panel.get("targets", ())),
        )
        for panel in json.loads(DASHBOARD.read_text())["panels"]
    ]


def ask(prometheus: str, path: str, **parameters: str) -> Any:
    """The data of Prometheus's answer. OSError."""
    query = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"{prometheus}/api/v1/{path}?{query}", timeout=30) as response:
        return json.load(response)["data"]
