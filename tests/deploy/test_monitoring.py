"""Checks that every metric, label and value in the dashboard and alert rules is served."""

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from deployment import ROOT
from served_metrics import scrape_coordinator_and_worker

from benchmarks.dashboard import ALERTS, CONFIGURATION, DASHBOARD, read_panels
from specpool.cli.up import services_of
from specpool.cli.up_settings import UpSettings
from specpool.openai.metrics import Metrics

ADDED_BY_PROMETHEUS = {"job", "instance"}
PANELS = read_panels()
QUERIES = [query for panel in PANELS for query in panel.queries]
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
Samples = dict[str, list[dict[str, str]]]


@dataclass(frozen=True)
class LabeledQuery:
    """A PromQL expression and the labels that its legend or annotations name."""

    expression: str
    labels: frozenset[str] = frozenset()

    def nodes(self) -> list[Any]:
        nodes: list[Any] = []
        promql_parser.walk(promql_parser.parse(self.expression), nodes.append)
        return nodes

    def selectors(self) -> list[Any]:
        return [node for node in self.nodes() if isinstance(node, promql_parser.VectorSelector)]

    def grouping_labels(self) -> set[str]:
        """Return the labels that the expression aggregates or matches by."""
        modifiers = [node.modifier for node in self.nodes() if getattr(node, "modifier", None) is not None]
        lists = [getattr(modifier, "matching", modifier) for modifier in modifiers]
        return {label for labels in lists if labels is not None for label in labels.labels}


LABELED_QUERIES = [
    *(LabeledQuery(query.with_values("1m"), frozenset(re.findall(r"{{(\w+)}}", query.legend))) for query in QUERIES),
    *(
        LabeledQuery(rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))))
        for rule in RULES
    ),
]


@pytest.fixture(scope="module")
def served(tiny_pair: tuple[Path, Path]) -> Samples:
    """Labels of all served samples by metric name."""
    samples: Samples = {"up": [{}]}
    for scrape in asyncio.run(scrape_coordinator_and_worker(tiny_pair[0])):
        for sample in (sample for family in scrape.families.values() for sample in family.samples):
            samples.setdefault(sample.name, []).append(sample.labels)
    http = Metrics()
    with http.request("/v1/completions") as observed:
        observed.status = 503
    for sample in (sample for family in http.registry.collect() for sample in family.samples):
        samples.setdefault(sample.name, []).append(sample.labels)
    return samples


def matches(matcher: Any, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.NotEqual):
        return (value == matcher.value) is (matcher.op == promql_parser.MatchOp.Equal)
    return bool(re.fullmatch(matcher.value, value)) is (matcher.op == promql_parser.MatchOp.Re)


def test_queries_select_served_samples(served: Samples) -> None:
    for labeled_query in LABELED_QUERIES:
        known = set(ADDED_BY_PROMETHEUS)
        for selector in labeled_query.selectors():
            matchers = [matcher for matcher in selector.matchers.matchers if matcher.name not in ADDED_BY_PROMETHEUS]
            selected = [labels for labels in served[selector.name] if all(matches(each, labels) for each in matchers)]
            assert selected, selector.prettify()
            assert {matcher.name for matcher in matchers} <= selected[0].keys(), selector.prettify()
            known |= selected[0].keys()
        assert labeled_query.grouping_labels() | labeled_query.labels <= known, labeled_query.expression


def test_parser_finds_selectors_and_grouping_labels() -> None:
    labeled_query = LabeledQuery('sum by (a) (rate(x{b="c"}[5m])) / on (d) group_left () sum without (e) (y)')
    assert [selector.name for selector in labeled_query.selectors()] == ["x", "y"]
    assert labeled_query.grouping_labels() == {"a", "d", "e"}


def test_the_memory_of_a_carried_draft_is_shown_beside_that_of_a_sharded_target() -> None:
    (query,) = (each for each in LABELED_QUERIES if "worker_rank_memory_bytes" in each.expression)
    assert query.grouping_labels() == {"job", "instance", "worker"}


def test_grafana_can_import_the_dashboard() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert dashboard["id"] is None
    assert variables.pop("datasource")["type"] == "datasource"
    owners = [*variables.values(), *panels, *(target for panel in panels for target in panel["targets"])]
    assert all(owner["datasource"] == {"type": "prometheus", "uid": "${datasource}"} for owner in owners)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    used = {name for query in QUERIES for name in re.findall(r"\$(\w+)", query.expression)}
    assert used <= variables.keys() | {"__rate_interval"}


def test_panels_do_not_overlap() -> None:
    cells = [(x, y) for panel in PANELS for x in range(panel.x, panel.x + panel.width)
             for y in range(panel.y, panel.y + panel.height)]  # fmt: skip
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_alerts_link_to_a_section_of_the_operations_page() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"].removeprefix("docs/operations.md#") in anchors


def test_local_prometheus_scrapes_the_ports_of_specpool_up() -> None:
    config = yaml.safe_load(CONFIGURATION.read_text())
    assert [(CONFIGURATION.parent / path).resolve() for path in config["rule_files"]] == [ALERTS]
    (job,) = config["scrape_configs"]
    assert re.fullmatch(".*specpool.*", job["job_name"])
    services = services_of(UpSettings(metrics_port=9100), "target", "draft")
    ports = {service.arguments[service.arguments.index("--metrics-port") + 1] for service in services}
    scraped = {target for group in job["static_configs"] for target in group["targets"]}
    assert scraped == {f"127.0.0.1:{port}" for port in ports}
