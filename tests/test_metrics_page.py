"""docs/metrics.md lists exactly the metrics that are served, with type, labels and meaning."""

import asyncio
import re
from pathlib import Path

import promql_parser
from prometheus_client import generate_latest
from scraping import Scrape
from served_metrics import scrape_coordinator_and_worker

from specpool.openai.metrics import Metrics

PAGE = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
ROWS = re.findall(r"^\| `([\w:]+)` \| (\w+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)
DOCUMENTED = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in ROWS}
EXPRESSIONS = re.findall(r"^\| [^|`]+ \| `(.*)` \|$", PAGE, re.MULTILINE)
FORMER_NAMES = {"gpu_cache_usage_perc", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total"}


def scrape_of_openai_server() -> Scrape:
    metrics = Metrics()
    with metrics.request("/v1/completions") as observed:
        metrics.first_token("/v1/completions", observed)
    return Scrape.of(generate_latest(metrics.registry).decode())


def test_page_lists_the_served_metrics(tiny_pair: tuple[Path, Path]) -> None:
    served = {}
    for scrape in (*asyncio.run(scrape_coordinator_and_worker(tiny_pair[0])), scrape_of_openai_server()):
        for family in scrape.families.values():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            served[name] = (family.type, frozenset(labels), family.documentation)
    assert len(DOCUMENTED) == len(ROWS)
    assert {name: row for name, row in served.items() if name.startswith("specpool:")} == DOCUMENTED
    section = PAGE.partition("## As vLLM has them")[2].partition("\n## ")[0]
    renamed = {name.removeprefix("vllm:") for name in served if name.startswith("vllm:")}
    assert renamed == set(re.findall(r"`specpool:(\w+)`", section)) | FORMER_NAMES
    assert all(f"`vllm:{name}`" in PAGE for name in FORMER_NAMES)


def test_expressions_are_valid_promql_over_documented_metrics() -> None:
    assert EXPRESSIONS
    for expression in EXPRESSIONS:
        promql_parser.parse(expression)
        assert set(re.findall(r"specpool:\w+?(?=(?:_count)?\b)", expression)) <= DOCUMENTED.keys()
