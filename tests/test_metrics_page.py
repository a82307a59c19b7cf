"""docs/metrics.md has every metric that is served, with its type, labels and meaning, and no other."""

import re
from collections.abc import Iterable
from pathlib import Path

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from scraping import Scrape, free_port, scrape
from serving import make_request, serving
from tiny_models import described_as_divided, load_engine
from worker_service import TARGET
from worker_service import serving as serving_worker

from specpool.worker.metrics import WorkerMetrics

PAGE = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
ROW = re.compile(r"^\| `([\w:]+)` \| (\w+) \| (.*?) \| (.*) \|$", re.MULTILINE)
EXPRESSIONS = re.findall(r"^\| [^|`]+ \| `(.*)` \|$", PAGE, re.MULTILINE)
Rows = dict[str, tuple[str, frozenset[str], str]]


def documented() -> Rows:
    """Type, labels and meaning of each metric on the page. Footnotes of a meaning stand behind its first sentence."""
    rows = ROW.findall(PAGE)
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: (kind, frozenset(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows}


def served(scrapes: Iterable[Scrape]) -> Rows:
    found: Rows = {}
    for seen in scrapes:
        for family in seen.families.values():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, frozenset(labels), family.documentation)
    return {name: row for name, row in found.items() if name.startswith(("specpool:", "vllm:"))}


@pytest.fixture
async def scrapes(tiny_pair: tuple[Path, Path]) -> list[Scrape]:
    """Scrapes of a coordinator, after a request, and of a worker that is divided."""
    async with serving(metrics_port=free_port(), metrics_compat="vllm") as service:
        await service.expect(make_request(k=2))
        coordinator = await scrape(service.process.coordinator.settings.metrics_port or 0)
    async with serving_worker(TARGET, described_as_divided(load_engine(tiny_pair[0]))) as worker:
        registry = CollectorRegistry()
        registry.register(WorkerMetrics("target", worker.host))
        return [coordinator, Scrape.of(generate_latest(registry).decode())]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_expressions_are_promql_about_metrics_of_the_page(expression: str) -> None:
    promql_parser.parse(expression)
    assert set(re.findall(r"specpool:\w+", expression)) <= documented().keys()


def test_the_page_and_the_metrics_agree(scrapes: list[Scrape]) -> None:
    found = served(scrapes)
    own = {name: row for name, row in found.items() if name.startswith("specpool:")}
    assert documented() == own
    theirs = {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")}
    as_vllm = set(re.findall(r"`specpool:(\w+)`", PAGE.partition("## As vLLM has them")[2].partition("\n## ")[0]))
    renamed = {"gpu_cache_usage_perc", "gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total"}
    assert theirs == as_vllm | renamed
    assert all(f"`vllm:{name}`" in PAGE for name in renamed)
