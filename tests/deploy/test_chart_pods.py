"""Pods and services of the Helm chart, with the defaults and with every example, against the code that they start."""

import functools
import re
from typing import Any

import pytest
from deployment import COMPONENTS, WORKERS, image_environment, project
from helm_chart import (
    COMPONENT,
    DEFAULTS,
    EXAMPLES,
    Manifest,
    container_of,
    hook_seconds,
    of_kind,
    pod_template,
    pod_templates,
    render,
)
from pod_settings import mounted, pod_settings

from specpool.rpc.server.server import LIVE

GPU = "nvidia.com/gpu"
COMMIT = re.compile(r"[0-9a-f]{40}")
EVERY_EXAMPLE = pytest.mark.parametrize("example", [DEFAULTS, *EXAMPLES])
EVERY_COMPONENT = pytest.mark.parametrize("component", COMPONENTS)
BOTH_WORKERS = pytest.mark.parametrize("component", WORKERS)


@functools.cache
def settings_in(example: str, component: str, cell: int = 0) -> Any:
    """The settings of a component's process with the values of an example."""
    return pod_settings(render(example), component, cell)


def port_number(server: Manifest, port: int | str) -> int:
    """A container's port by its name or number."""
    [number] = [item["containerPort"] for item in server["ports"] if port in (item["name"], item["containerPort"])]
    assert isinstance(number, int)
    return number


def set_of(example: str, component: str) -> Manifest:
    """The spec of a component's StatefulSet."""
    found: Manifest = of_kind(render(example), "StatefulSet")[f"specpool-{component}"]["spec"]
    return found


@EVERY_COMPONENT
@EVERY_EXAMPLE
def test_pod_starts_its_process_with_settings_that_it_accepts(example: str, component: str) -> None:
    server = container_of(render(example), component)
    settings = settings_in(example, component)
    assert server["command"] == [f"specpool-{component}"]
    assert settings.host == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert (ports["grpc"], ports["health"]) == (settings.port, settings.health_port)
    assert ports.get("metrics") == getattr(settings, "metrics_port", None)


@EVERY_COMPONENT
@EVERY_EXAMPLE
def test_image_is_one_that_the_dockerfile_makes_of_this_version(example: str, component: str) -> None:
    name, tag = container_of(render(example), component)["image"].rpartition("/")[2].split(":")
    assert name == ("specpool-coordinator" if component == "coordinator" else "specpool-worker")
    cpu = "-cpu" if example == "cpu-kind" and component != "coordinator" else ""
    assert tag == project()["project"]["version"] + cpu


@EVERY_COMPONENT
@EVERY_EXAMPLE
def test_probes_ask_the_port_where_there_is_only_health(example: str, component: str) -> None:
    server, port = container_of(render(example), component), settings_in(example, component).health_port
    probes = {name: server[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {port_number(server, probe["grpc"]["port"]) for probe in probes.values()} == {port}
    assert "service" not in probes["readiness"]["grpc"]
    assert probes["liveness"]["grpc"]["service"] == LIVE
    # A coordinator holds the waiting requests, and is not restarted because its target is away.
    assert probes["startup"]["grpc"].get("service") == (LIVE if component == "coordinator" else None)


@BOTH_WORKERS
@EVERY_EXAMPLE
def test_worker_has_time_to_load_and_is_restarted_before_it_ends_itself(example: str, component: str) -> None:
    server = container_of(render(example), component)
    startup, liveness = server["startupProbe"], server["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    watchdog = settings_in(example, component).watchdog_seconds
    assert liveness["periodSeconds"] * liveness["failureThreshold"] < watchdog


@BOTH_WORKERS
@EVERY_EXAMPLE
def test_model_is_pinned(example: str, component: str) -> None:
    settings = settings_in(example, component)
    if (volume := mounted(render(example), component).get("/model")) is not None:
        assert volume["image"]["reference"]
        assert (settings.model, settings.revision) == ("/model", None)
    else:
        assert COMMIT.fullmatch(settings.revision)


@EVERY_COMPONENT
@EVERY_EXAMPLE
def test_pod_is_killed_only_after_its_drain(example: str, component: str) -> None:
    hook = hook_seconds(container_of(render(example), component))
    drain = settings_in(example, component).drain_seconds
    assert pod_template(render(example), component)["spec"]["terminationGracePeriodSeconds"] > hook + drain


@BOTH_WORKERS
@EVERY_EXAMPLE
def test_worker_outlasts_the_drain_of_its_coordinator(example: str, component: str) -> None:
    coordinator, worker = (hook_seconds(container_of(render(example), name)) for name in ("coordinator", component))
    assert worker > coordinator + settings_in(example, "coordinator").drain_seconds


@pytest.mark.parametrize("example", ["cells", "openai", "production"])
def test_update_goes_on_only_when_the_old_target_of_a_cell_is_gone(example: str) -> None:
    hook = hook_seconds(container_of(render(example), "target-worker"))
    [ready] = {item["spec"]["minReadySeconds"] for item in of_kind(render(example), "StatefulSet").values()}
    assert ready > hook
    assert "minReadySeconds" not in set_of(DEFAULTS, "coordinator")


@EVERY_COMPONENT
@EVERY_EXAMPLE
def test_pod_can_write_where_its_process_does(example: str, component: str) -> None:
    volumes = mounted(render(example), component)
    # The folder of a volume in memory is sticky, and what workers compile is loaded only from there.
    assert volumes["/tmp"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
    if component in WORKERS:
        models = volumes[image_environment("worker")["HF_HOME"]]
        claimed = "spec" in models or "persistentVolumeClaim" in models
        assert claimed == (
            example in ("two-gpus", "production", "disaggregated-set", "one-node-four-gpus", "two-nodes")
        )


@BOTH_WORKERS
@EVERY_EXAMPLE
def test_worker_asks_for_its_gpus_and_uses_them(example: str, component: str) -> None:
    limits = container_of(render(example), component)["resources"]["limits"]
    resource = "nvidia.com/mig-3g.20gb" if (example, component) == ("mixed-gpus", "draft-worker") else GPU
    gpus = {name: count for name, count in limits.items() if "/" in name}
    ranks = settings_in(example, component).tensor_parallel
    nodes = 2 if (example, component) == ("two-nodes", "target-worker") else 1
    assert gpus == ({} if example == "cpu-kind" else {resource: ranks / nodes})
    assert settings_in(example, component).device == ("cuda" if gpus else "cpu")


# --- Cells and the services between them


@EVERY_COMPONENT
@EVERY_EXAMPLE
def test_service_leads_to_the_pods_of_its_component(example: str, component: str) -> None:
    service = of_kind(render(example), "Service")[f"specpool-{component}"]["spec"]
    chosen = [
        name
        for name, made in pod_templates(render(example))
        if service["selector"].items() <= made["metadata"]["labels"].items()
    ]
    [port] = service["ports"]
    assert chosen == [component]
    assert port["port"] == settings_in(example, component).port
    assert port["port"] == port_number(container_of(render(example), component), port["targetPort"])
    assert service["clusterIP"] == "None"
    assert service.get("publishNotReadyAddresses", False) == (component in WORKERS)


@EVERY_EXAMPLE
def test_clients_find_every_coordinator_behind_one_service(example: str) -> None:
    service = of_kind(render(example), "Service")["specpool"]["spec"]
    assert service["selector"].items() <= pod_template(render(example), "coordinator")["metadata"]["labels"].items()
    assert service["selector"][COMPONENT] == "coordinator"
    assert service["ports"][0]["targetPort"] == "grpc"


@pytest.mark.parametrize("cell", [0, 2])
@BOTH_WORKERS
@EVERY_EXAMPLE
def test_coordinator_is_told_the_workers_of_its_own_cell(example: str, component: str, cell: int) -> None:
    settings = settings_in(example, "coordinator", cell)
    host, _, port = getattr(settings, component.replace("-worker", "_address")).rpartition(":")
    service, *rest = host.removeprefix(f"specpool-{component}-{cell}.").split(".")
    assert (service, rest) == (f"specpool-{component}", ["default", "svc"])
    assert of_kind(render(example), "Service")[service]["spec"]["ports"][0]["port"] == int(port)
    if example != "disaggregated-set":
        assert host.startswith(f"specpool-{component}-{cell}.")
    if (example, component) == ("two-nodes", "target-worker"):  # its leaders have the names of a StatefulSet's pods
        [group] = of_kind(render(example), "LeaderWorkerSet").values()
        assert (group["metadata"]["name"], group["spec"]["networkConfig"]) == (service, {"subdomainPolicy": "Shared"})
    elif example != "disaggregated-set":
        assert set_of(example, component)["serviceName"] == service


@EVERY_COMPONENT
@EVERY_EXAMPLE
def test_pods_of_a_cell_are_never_doubled(example: str, component: str) -> None:
    sets = of_kind(render(example), "StatefulSet")
    if example == "disaggregated-set" and component in WORKERS:  # its rollouts start a pair on further GPUs
        assert [*sets] == ["specpool-coordinator"]
        return
    if f"specpool-{component}" in of_kind(render(example), "LeaderWorkerSet"):
        spec = of_kind(render(example), "LeaderWorkerSet")[f"specpool-{component}"]["spec"]
        assert spec["replicas"] == 1
        assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}
        return
    spec = sets[f"specpool-{component}"]["spec"]
    assert spec["podManagementPolicy"] == "Parallel"  # else a failed rollout blocks the one that mends it
    assert spec["updateStrategy"] == {"type": "RollingUpdate"}
    scaled = {"cells": 3, "openai": 2, "production": None}
    assert spec.get("replicas") == scaled.get(example, 1)


def test_budgets_exist_only_where_another_cell_serves() -> None:
    found = {example for example in (DEFAULTS, *EXAMPLES) if of_kind(render(example), "PodDisruptionBudget")}
    assert found == {"cells", "openai", "production"}
    for name, budget in of_kind(render("cells"), "PodDisruptionBudget").items():
        labels = pod_template(render("cells"), name.removeprefix("specpool-"))["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert budget["spec"]["maxUnavailable"] == 1


@EVERY_EXAMPLE
def test_only_coordinators_may_reach_the_workers(example: str) -> None:
    policy: Any = of_kind(render(example), "NetworkPolicy")["specpool-workers"]["spec"]
    [guarded] = policy["podSelector"]["matchExpressions"]
    rule, *metrics = policy["ingress"]
    [source] = rule["from"]
    labels = pod_template(render(example), "coordinator")["metadata"]["labels"]
    assert (guarded["key"], guarded["operator"], sorted(guarded["values"])) == (COMPONENT, "In", sorted(WORKERS))
    assert source["podSelector"]["matchLabels"].items() <= labels.items()
    assert rule["ports"] == [{"port": "grpc"}]
    assert [item["ports"] for item in metrics] == [[{"port": "metrics"}]] * (example == "production")
