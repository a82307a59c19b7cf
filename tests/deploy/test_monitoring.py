"""Dashboard and alert rules: what they ask for is served by the processes."""

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import promql_parser
import pytest
import yaml
from scraping import free_port, scrape
from serving import make_request, serving
from tiny_models import described_as_divided, forget_all, load_engine

from benchmarks.dashboard import DASHBOARD, dashboard_figure, read_panels
from specpool.cli.up import UpSettings, services_of
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.server import Server
from specpool.worker.host import WorkerHost
from specpool.worker.metrics import WorkerMetrics
from target_worker.verifier import Verifier

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy/helm/specpool/monitoring/alerts.yaml"
PROMETHEUS = ROOT / "deploy/monitoring/prometheus.yml"
OPERATIONS = ROOT / "docs/operations.md"
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to all samples."""

PANELS = read_panels()
QUERIES = [query for panel in PANELS for query in panel.queries]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
]


@dataclass(frozen=True)
class Question:
    """An expression, and the labels that its texts name."""

    expression: str
    labels: frozenset[str] = frozenset()

    def nodes(self) -> list[Any]:
        found: list[Any] = []
        promql_parser.walk(promql_parser.parse(self.expression), found.append)
        return found

    def selectors(self) -> list[Any]:
        return [node for node in self.nodes() if isinstance(node, promql_parser.VectorSelector)]

    def grouping_labels(self) -> set[str]:
        """Labels by which the expression aggregates and matches."""
        modifiers = [node.modifier for node in self.nodes() if getattr(node, "modifier", None) is not None]
        lists = [getattr(modifier, "matching", modifier) for modifier in modifiers]
        return {label for found in lists if found is not None for label in found.labels}


def questions() -> list[Question]:
    """Of all panels and rules."""
    asked = [Question(query.with_values("1m"), frozenset(re.findall(r"{{(\w+)}}", query.legend))) for query in QUERIES]
    return asked + [
        Question(rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))))
        for rule in RULES
    ]


@pytest.fixture(scope="module")
def served(tiny_pair: tuple[Path, Path]) -> dict[str, list[dict[str, str]]]:
    """Labels of the samples of each metric that a coordinator and a worker, whose model is divided, serve after calls
    that end in any way."""
    return asyncio.run(serve_and_scrape(tiny_pair[0]))


async def serve_and_scrape(model: Path) -> dict[str, list[dict[str, str]]]:
    samples: dict[str, list[dict[str, str]]] = {"up": [{}]}
    coordinator, worker = free_port(), free_port()
    async with serving(metrics_port=coordinator, with_target=False, max_num_seqs=1, queue_size=1) as service:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await service.stub.Generate(make_request())
        await service.target.start(service.target_address)
        await service.until_ready()
        answers = await asyncio.gather(
            *(service.stub.Generate(make_request()) for _ in range(9)), return_exceptions=True
        )
        assert any(isinstance(answer, grpc.aio.AioRpcError) for answer in answers)
        families = [*(await scrape(coordinator)).families.values()]
    engine = described_as_divided(load_engine(model))
    forget_all(engine, 1)
    host = WorkerHost(lambda: Verifier(engine))
    server = Server(ServerSettings(metrics_port=worker, drain_seconds=0), 2**20)
    server.registry.register(WorkerMetrics("target", host))
    await server.start()
    await host.load()
    families += (await scrape(worker)).families.values()
    server.stop()
    await server.wait_stopped()
    host.close()
    for sample in (sample for family in families for sample in family.samples):
        samples.setdefault(sample.name, []).append(sample.labels)
    return samples


def fits(matcher: Any, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.NotEqual):
        return (value == matcher.value) is (matcher.op == promql_parser.MatchOp.Equal)
    return bool(re.fullmatch(matcher.value, value)) is (matcher.op == promql_parser.MatchOp.Re)


def test_all_that_is_asked_for_is_served(served: dict[str, list[dict[str, str]]]) -> None:
    for question in questions():
        known = set(OF_PROMETHEUS)
        for selector in question.selectors():
            matchers = [matcher for matcher in selector.matchers.matchers if matcher.name not in OF_PROMETHEUS]
            fitting = [labels for labels in served[selector.name] if all(fits(matcher, labels) for matcher in matchers)]
            assert fitting, selector.prettify()
            assert {matcher.name for matcher in matchers} <= fitting[0].keys(), selector.prettify()
            known |= fitting[0].keys()
        assert question.grouping_labels() | question.labels <= known, question.expression


def test_the_check_reads_expressions() -> None:
    question = Question('sum by (a) (rate(x{b="c"}[5m])) / on (d) group_left () sum without (e) (y)')
    assert [selector.name for selector in question.selectors()] == ["x", "y"]
    assert question.grouping_labels() == {"a", "d", "e"}


def test_grafana_can_import_the_dashboard() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert dashboard["id"] is None
    assert variables["datasource"]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    sources = [variable["datasource"] for name, variable in variables.items() if name != "datasource"]
    sources += [panel["datasource"] for panel in panels]
    sources += [target["datasource"] for panel in panels for target in panel["targets"]]
    assert all(found == source for found in sources)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    used = {name for query in QUERIES for name in re.findall(r"\$(\w+)", query.expression)}
    assert used <= variables.keys() | {"__rate_interval"}


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in PANELS
        for x in range(panel.x, panel.x + panel.width)
        for y in range(panel.y, panel.y + panel.height)
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_alert_says_what_it_means_and_where_to_read_on() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    headings = re.findall(r"^#+ (.+)$", OPERATIONS.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"].removeprefix("docs/operations.md#") in anchors


def test_prometheus_on_a_laptop_reads_the_ports_of_specpool_up() -> None:
    config = yaml.safe_load(PROMETHEUS.read_text())
    assert [(PROMETHEUS.parent / path).resolve() for path in config["rule_files"]] == [ALERTS]
    (job,) = config["scrape_configs"]
    assert re.fullmatch(".*specpool.*", job["job_name"])
    read = [target for group in job["static_configs"] for target in group["targets"]]
    services = services_of(UpSettings(metrics_port=9100), "target", "draft")
    ports = {service.arguments[service.arguments.index("--metrics-port") + 1] for service in services}
    assert {f"127.0.0.1:{port}" for port in ports} == set(read)


def test_a_picture_of_the_dashboard_is_drawn_from_answers() -> None:
    times = [1.0, 1.1]
    figure = dashboard_figure(PANELS, lambda query: [(query.legend.replace("{{le}}", "1"), times, [0.0, 1.0])])
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [panel.title for panel in PANELS if panel.queries]
