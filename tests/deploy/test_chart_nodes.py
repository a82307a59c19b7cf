"""Target workers on several nodes in the Helm chart: a LeaderWorkerSet of groups of pods, one group for each cell."""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from chart_kinds import CUSTOM
from deployment import ROOT
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from helm_chart import (
    GROUP_INDEX,
    WORKER_INDEX,
    Manifest,
    container_of,
    hook_seconds,
    of_kind,
    pod_template,
    template,
    values_of,
)
from pod_settings import mounted, pod_settings
from serving import free_address

NODES = pytest.mark.parametrize("node", [0, 1])
TARGET = "target-worker"
METRICS = "metrics.enabled=true"


@functools.cache
def two_nodes(*values: str) -> list[Manifest]:
    """The example of that name with some values changed."""
    return template(*values_of("two-nodes"), *(word for value in values for word in ("--set", value)))


def group(manifests: list[Manifest]) -> Any:
    """The spec of the one LeaderWorkerSet."""
    [found] = of_kind(manifests, "LeaderWorkerSet").values()
    jsonschema.validate(found, CUSTOM["LeaderWorkerSet"])
    return found["spec"]


@NODES
def test_every_node_runs_the_same_command_with_its_number(node: int) -> None:
    manifests = two_nodes()
    server, leader = container_of(manifests, TARGET, node), container_of(manifests, TARGET)
    assert (server["command"], server["args"]) == (leader["command"], leader["args"])
    assert server["resources"] == leader["resources"]
    settings, own = pod_settings(manifests, TARGET, node=node), {"node_rank", "health_port"}
    assert (settings.tensor_parallel, settings.nnodes, settings.node_rank) == (8, 2, node)
    assert settings.model_dump(exclude=own) == pod_settings(manifests, TARGET).model_dump(exclude=own)


@pytest.mark.parametrize("cell", [0, 2])
def test_leader_is_called_by_the_name_under_which_its_group_meets(cell: int) -> None:
    manifests = two_nodes("cells=3")
    target = pod_settings(manifests, "coordinator", cell).target_address
    assert target == f"{pod_settings(manifests, TARGET, cell, node=1).master_addr}.svc:50051"
    service = of_kind(manifests, "Service")["specpool-target-worker"]["spec"]
    assert service["publishNotReadyAddresses"]  # the group meets before its leader is ready
    assert service["selector"].items() <= pod_template(manifests, TARGET)["metadata"]["labels"].items()
    assert service["selector"][WORKER_INDEX] == "0"


def test_group_starts_and_ends_as_one() -> None:
    spec = group(two_nodes())
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (1, 2)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert spec["startupPolicy"] == "LeaderCreated"  # a leader is not ready without the other nodes
    assert "specpool-target-worker" not in of_kind(two_nodes(), "StatefulSet")


def test_only_leaders_serve_and_hold_secrets() -> None:
    secured = "tls.enabled=true,auth.workerToken.existingSecret=workers,metrics.annotations=true"
    manifests = two_nodes(secured, METRICS, "tracing.endpoint=http://collector:4317")
    leader, follower = (container_of(manifests, TARGET, node) for node in (0, 1))
    assert {port["name"] for port in leader["ports"]} == {"grpc", "health", "metrics"}
    assert leader["readinessProbe"]["grpc"] == {"port": 50060}
    assert not follower.keys() & {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    assert {"/tls", "/worker-token"} <= mounted(manifests, TARGET).keys()
    assert mounted(manifests, TARGET, node=1).keys() == {"/tmp", "/models", "/dev/shm"}
    assert "annotations" not in pod_template(manifests, TARGET, node=1)["metadata"]
    settings = pod_settings(manifests, TARGET, node=1)
    unset = ("health_port", "metrics_port", "tls_files", "tls_ca", "api_tokens", "otlp_traces_endpoint")
    assert [name for name in unset if getattr(settings, name) is not None] == []


@NODES
def test_every_node_keeps_the_model(node: int) -> None:
    assert mounted(two_nodes(), TARGET, node)["/models"]["spec"]["resources"]["requests"]["storage"] == "200Gi"
    retention = group(two_nodes())["leaderWorkerTemplate"]["persistentVolumeClaimRetentionPolicy"]
    assert retention == {"whenDeleted": "Retain", "whenScaled": "Retain"}


# --- The network between the nodes


def admitted(manifests: list[Manifest], labels: Manifest) -> list[tuple[Any, Any]]:
    """Who may reach a pod with these labels, and on which ports; None: everyone, all."""
    policies = [item["spec"] for item in of_kind(manifests, "NetworkPolicy").values()]
    rules = [rule for spec in policies if selects(spec["podSelector"], labels) for rule in spec["ingress"]]
    return [(rule.get("from"), rule.get("ports")) for rule in rules]


def selects(selector: Manifest, labels: Manifest) -> bool:
    """Whether a selector of pods selects one."""
    among = all(labels.get(item["key"]) in item["values"] for item in selector.get("matchExpressions", []))
    return among and selector["matchLabels"].items() <= labels.items()


@NODES
def test_pods_of_a_group_reach_each_other_on_all_ports_and_nobody_else_does(node: int) -> None:
    manifests = two_nodes("cells=2", METRICS)
    mine = pod_template(manifests, TARGET, node)["metadata"]["labels"] | {GROUP_INDEX: "1"}
    others = [
        *(pod_template(manifests, component)["metadata"]["labels"] for component in ("coordinator", "draft-worker")),
        mine | {GROUP_INDEX: "0"},
    ]
    everywhere = [sources for sources, ports in admitted(manifests, mine) if ports is None]
    [[source]] = everywhere
    assert selects(source["podSelector"], mine)
    assert not any(selects(source["podSelector"], labels) for labels in others)
    # Other rules name ports, of which only a leader has any.
    named = [ports for _, ports in admitted(manifests, mine) if ports is not None]
    assert named == [[{"port": "grpc"}], [{"port": "metrics"}]]


def test_every_group_that_may_come_has_its_policy() -> None:
    manifests = two_nodes("autoscaling.kind=keda,autoscaling.maxCells=3", METRICS)
    names = {name for name in of_kind(manifests, "NetworkPolicy") if "group" in name}
    assert names == {f"specpool-target-group-{index}" for index in range(3)}
    assert not of_kind(two_nodes("networkPolicy.enabled=false"), "NetworkPolicy")


# --- Ends, updates and numbers


def test_leader_drains_before_its_group_ends() -> None:
    leader, follower = (pod_template(two_nodes(), TARGET, node)["spec"] for node in (0, 1))
    hooks = [hook_seconds(spec["containers"][0]) for spec in (leader, follower)]
    assert hooks[1] > hooks[0] + pod_settings(two_nodes(), TARGET).drain_seconds
    assert hooks[1] >= leader["terminationGracePeriodSeconds"]
    assert follower["terminationGracePeriodSeconds"] > hooks[1]


@pytest.mark.parametrize("serving", [True, False])
@NODES
def test_group_waits_only_while_it_serves(node: int, serving: bool, tmp_path: Path) -> None:
    slept = tmp_path / "slept"
    (tmp_path / "sleep").write_text(f"#!/bin/sh\necho $1 > {slept}\n")
    (tmp_path / "sleep").chmod(0o755)
    address = free_address()
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    servicer = health.HealthServicer()
    status = health_pb2.HealthCheckResponse
    servicer.set("", status.SERVING if serving else status.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()

    hook = container_of(two_nodes(), TARGET, node)["lifecycle"]["preStop"]["exec"]["command"]
    command = [word.replace(":50060", f":{address.rpartition(':')[2]}") for word in hook]
    environment = {
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "LWS_LEADER_ADDRESS": "127.0.0.1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    server.stop(None).wait()
    assert done.returncode == 0
    assert slept.exists() == serving
    assert not serving or int(slept.read_text()) == hook_seconds(container_of(two_nodes(), TARGET, node))


def test_update_goes_on_only_when_the_old_group_of_a_cell_is_gone() -> None:
    manifests = two_nodes("cells=3", "updateStrategy.rollingUpdate.partition=1")
    readiness = container_of(manifests, TARGET)["readinessProbe"]
    ready = (readiness["successThreshold"] - 1) * readiness["periodSeconds"]
    assert ready >= of_kind(manifests, "StatefulSet")["specpool-coordinator"]["spec"]["minReadySeconds"]
    rollout = group(manifests)["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert rollout == {"maxSurge": 0, "maxUnavailable": 1, "partition": 1}
    assert "successThreshold" not in container_of(two_nodes(), TARGET)["readinessProbe"]


def test_budget_counts_every_pod_whose_loss_ends_a_group() -> None:
    budget = of_kind(two_nodes("cells=2"), "PodDisruptionBudget")["specpool-target-worker"]["spec"]
    for node in (0, 1):
        assert selects(budget["selector"], pod_template(two_nodes("cells=2"), TARGET, node)["metadata"]["labels"])
    assert budget["maxUnavailable"] == 1


@pytest.mark.parametrize(("kind", "scaler"), [("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")])
def test_groups_are_scaled_with_their_coordinators(kind: str, scaler: str) -> None:
    manifests = two_nodes(f"autoscaling.kind={kind}", METRICS)
    target = of_kind(manifests, scaler)["specpool-target-worker"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "name": "specpool-target-worker",
    }  # fmt: skip
    assert "replicas" not in group(manifests)
    assert of_kind(manifests, scaler)["specpool-draft-worker"]["spec"]["scaleTargetRef"]["kind"] == "StatefulSet"
