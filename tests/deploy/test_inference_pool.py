"""deploy/gateway/inference-pool.yaml fits the chart's example of the same name and the metrics of coordinators."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import DEPLOY
from helm_chart import of_kind, pod_template, render
from kubernetes_schemas import SUPPORTED, problem
from served_metrics import scrape_coordinator_and_worker

from coordinator.smg.service import SERVICE

MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "gateway/inference-pool.yaml").read_text()))
PICKER = yaml.safe_load(of_kind(MANIFESTS, "ConfigMap")["specpool-picker"]["data"]["config.yaml"])
PARAMETERS = {plugin["type"]: plugin.get("parameters", {}) for plugin in PICKER["plugins"]}
# The defaults of llm-d's endpoint picker for vLLM, in its documentation of `core-metrics-extractor`.
PUBLISHED = {
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "cacheInfoSpec": "vllm:cache_config_info",
}


@pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])
def test_manifests_are_valid(version: str) -> None:
    assert [found for item in MANIFESTS if (found := problem(json.dumps(item), version)) is not None] == []


def test_the_pool_selects_the_coordinators_and_their_ports() -> None:
    pool = of_kind(MANIFESTS, "InferencePool")["specpool"]["spec"]
    coordinator = pod_template(render("inference-pool"), "coordinator")
    assert pool["selector"]["matchLabels"].items() <= coordinator["metadata"]["labels"].items()
    [server] = coordinator["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert pool["targetPorts"] == [{"number": ports["grpc"]}]
    [picker] = pod_template_of("specpool-picker")["spec"]["containers"]
    assert f"--model-server-metrics-port={ports['metrics']}" in picker["args"]
    values = {each["name"]: each.get("value") for each in server["env"]}
    assert (values["SPECPOOL_SMG"], values["SPECPOOL_METRICS_COMPAT"]) == ("true", "vllm")


def pod_template_of(deployment: str) -> dict[str, Any]:
    template: dict[str, Any] = of_kind(MANIFESTS, "Deployment")[deployment]["spec"]["template"]
    return template


def test_the_route_and_the_picker_take_calls_of_the_engine_service() -> None:
    [rule] = of_kind(MANIFESTS, "HTTPRoute")["specpool"]["spec"]["rules"]
    assert [match["path"]["value"] for match in rule["matches"]] == [f"/{SERVICE}"]
    assert PICKER["requestHandler"] == {"parsers": [{"pluginRef": "vllmgrpc-parser"}]}
    scheduled = {each["pluginRef"] for profile in PICKER["schedulingProfiles"] for each in profile["plugins"]}
    assert scheduled <= PARAMETERS.keys()


def test_coordinators_serve_the_metrics_that_the_picker_reads(tiny_pair: tuple[Path, Path]) -> None:
    [engine] = PARAMETERS["core-metrics-extractor"]["engineConfigs"]
    assert PUBLISHED.items() <= engine.items()
    assert set(PARAMETERS["metrics-data-source"]["families"]) == {*PUBLISHED.values()}
    coordinator, _ = asyncio.run(scrape_coordinator_and_worker(tiny_pair[0]))
    for name in PUBLISHED.values():
        [sample] = coordinator.families[name].samples
        assert coordinator.families[name].type == "gauge"
        if name == PUBLISHED["cacheInfoSpec"]:
            assert all(sample.labels[label].isdecimal() for label in ("block_size", "num_gpu_blocks"))
