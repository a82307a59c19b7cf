"""Checks pods of the Helm chart against the code they run: settings, ports, probes, drains, addresses, secrets."""

import json
import re
import subprocess
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from deployment import WORKERS, image_environment, project, settings_of
from helm_chart import (
    ALL_VALUES,
    COMPONENT,
    DEFAULTS,
    Manifest,
    container_of,
    of_kind,
    pod_template,
    pod_templates,
    pre_stop_seconds,
    render,
    template,
    values_of,
)
from pod_settings import mounted, pod_environment, pod_settings

from specpool.rpc.server.server import LIVE

EVERY_CASE = pytest.mark.parametrize("name", ALL_VALUES)
TARGET = "target-worker"
PROGRAMS = {"standby": TARGET, "draft-canary": "draft-worker"}
REPLICATED = ("many-workers", "hpa-workers", "replicas")
"""Cases with several targets and drafts behind one coordinator."""
DNS_SECONDS = 30
"""Maximum time for which a cluster's DNS servers cache an address."""


@cache
def processes(name: str) -> list[tuple[str, Manifest, Manifest, Any]]:
    """Return component, pod spec, container and settings of every process of a case; of a group, its leader."""
    manifests = render(name)
    components = dict.fromkeys(component for component, _ in pod_templates(manifests))
    return [
        (component, pod_template(manifests, component)["spec"], container_of(manifests, component),
         pod_settings(manifests, component))
        for component in components if component not in ("http", "smg", "test")
    ]  # fmt: skip


@EVERY_CASE
def test_processes_accept_their_settings_and_serve_the_declared_ports(name: str) -> None:
    for component, _, server, settings in processes(name):
        assert server["command"] == [f"specpool-{PROGRAMS.get(component, component)}"]
        assert (settings.monitoring_host or settings.host) == "0.0.0.0"
        ports = {port["name"]: port["containerPort"] for port in server["ports"]}
        assert (ports["grpc"], ports["health"]) == (settings.port, settings.health_port)
        assert ports.get("metrics") == settings.metrics_port
        image, tag = server["image"].rpartition("/")[2].split(":")
        assert image == ("specpool-coordinator" if component == "coordinator" else "specpool-worker")
        assert tag.removesuffix("-cpu") == project()["project"]["version"]


@EVERY_CASE
def test_probes_use_the_health_port_and_restart_only_dead_processes(name: str) -> None:
    for component, _, server, settings in processes(name):
        probes = {name: server[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
        assert {probe["grpc"]["port"] for probe in probes.values()} == {settings.health_port}
        assert "service" not in probes["readiness"]["grpc"]
        assert probes["liveness"]["grpc"]["service"] == LIVE
        # A restart would lose waiting requests, so a coordinator without its target is not restarted.
        assert probes["startup"]["grpc"].get("service") == (LIVE if component == "coordinator" else None)
        if component in WORKERS:  # allow a download; restart before the watchdog exits
            assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 1800
            seconds = probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"]
            assert seconds < settings.watchdog_seconds


@EVERY_CASE
def test_workers_outlast_the_drain_of_their_coordinator(name: str) -> None:
    seconds = {}
    for component, spec, server, settings in processes(name):
        seconds[component] = pre_stop_seconds(server) + settings.drain_seconds
        assert spec["terminationGracePeriodSeconds"] > seconds[component]
    assert all(seconds[worker] > seconds["coordinator"] for worker in seconds.keys() & WORKERS)
    hook = pre_stop_seconds(container_of(render(name), TARGET))
    for item in of_kind(render(name), "StatefulSet").values():  # updates wait until the old worker is gone
        assert item["spec"].get("minReadySeconds", hook + 1) > hook


@pytest.mark.parametrize("name", ["two-nodes", "two-nodes-secured"])
def test_pods_of_a_group_share_settings_and_outlast_their_leader(name: str) -> None:
    leader, follower = (pod_settings(render(name), TARGET, node=node) for node in (0, 1))
    own = {"node_rank", "port", "health_port", "drain_seconds", "metrics_port", "tls_cert", "tls_key", "tls_ca",
           "allowed_names", "api_tokens", "otlp_traces_endpoint"}  # fmt: skip
    assert (leader.tensor_parallel, leader.nnodes, leader.node_rank, follower.node_rank) == (8, 2, 0, 1)
    assert follower.model_dump(exclude=own) == leader.model_dump(exclude=own)
    address = pod_environment(render(name), "coordinator")["SPECPOOL_TARGET_ADDRESS"]
    assert address == f"{follower.master_addr}.svc:{leader.port}"
    for unset in ("health_port", "metrics_port", "tls_files", "tls_ca", "api_tokens", "otlp_traces_endpoint"):
        assert getattr(follower, unset) is None, unset
    secrets = {"/tls", "/worker-token"} if name == "two-nodes-secured" else set()
    assert mounted(render(name), TARGET).keys() - mounted(render(name), TARGET, node=1).keys() == secrets
    servers = [container_of(render(name), TARGET, node) for node in (0, 1)]
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & servers[1].keys()
    seconds = [pre_stop_seconds(server) for server in servers]
    assert seconds[1] > seconds[0] + leader.drain_seconds
    if name == "two-nodes-secured":  # readiness stands in for minReadySeconds
        probe = servers[0]["readinessProbe"]
        coordinators = of_kind(render(name), "StatefulSet")["specpool-coordinator"]["spec"]
        assert (probe["successThreshold"] - 1) * probe["periodSeconds"] >= coordinators["minReadySeconds"]


@EVERY_CASE
def test_workers_use_pinned_models_their_gpus_and_a_writable_cache(name: str) -> None:
    for component, _, server, settings in processes(name):
        volumes = mounted(render(name), component)
        # A tmpfs is sticky: workers load compiled code only from folders where others cannot replace it.
        assert volumes["/tmp"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "256Mi"}
        if component == "coordinator":
            continue
        assert image_environment("worker")["HF_HOME"] in volumes
        if "/model" in volumes:
            assert (settings.model, settings.revision) == ("/model", None)
        else:
            assert re.fullmatch(r"[0-9a-f]{40}", settings.revision)
        gpus = [count for resource, count in server["resources"]["limits"].items() if "/" in resource]
        nodes = getattr(settings, "nnodes", 1)
        assert settings.device == ("cuda" if gpus else "cpu")
        assert gpus == ([settings.tensor_parallel // nodes] if gpus else [])
        assert ("/dev/shm" in volumes) == (settings.tensor_parallel > 1)


@EVERY_CASE
def test_services_lead_to_the_worker_of_the_same_cell(name: str) -> None:
    manifests = render(name)
    services = of_kind(manifests, "Service")
    for component, _, server, settings in processes(name):
        spec = services[f"specpool-{component}"]["spec"]
        labels = pod_template(manifests, component)["metadata"]["labels"] | {
            "leaderworkerset.sigs.k8s.io/worker-index": "0"
        }
        assert spec["selector"].items() <= labels.items()
        assert spec["selector"][COMPONENT] == component
        served = (settings.port, server["ports"][0]["name"])
        if (name, component) == ("edge", "coordinator"):
            served = (50050, 50050)
        assert (spec["ports"][0]["port"], spec["ports"][0]["targetPort"]) == served
    for worker in [component for component, *_ in processes(name) if component in WORKERS]:
        for cell in (0, 2):
            pod = "" if name == "disaggregated-set" else f"specpool-{worker}-{cell}."
            pod = "dns:///" if name in REPLICATED else pod
            address = f"{pod}specpool-{worker}.default.svc:{services[f'specpool-{worker}']['spec']['ports'][0]['port']}"
            variable = f"SPECPOOL_{worker.removesuffix('-worker').upper()}_ADDRESS"
            entries = pod_environment(manifests, "coordinator", cell)[variable].split(",")
            assert entries[0].removeprefix("current=") == address


def test_settings_reach_the_process_as_given() -> None:
    coordinator, target = (pod_settings(render("target-only"), name) for name in ("coordinator", TARGET))
    assert (coordinator.queue_tokens, coordinator.prefix_caching) == (5_000_000, False)
    assert coordinator.draft_address is None
    assert (target.kv_memory, target.max_sequences) == (8 * 2**30, 8)
    assert (target.device, target.tensor_parallel) == ("cpu", 3)
    escaped = template("--set-json", 'target={"settings": {"log_name": "$(HOME) $$ \\"x\\""}}')
    assert pod_environment(escaped, TARGET)["SPECPOOL_LOG_NAME"] == '$(HOME) $$ "x"'


# --- TLS and tokens


@pytest.mark.parametrize("clients", ["mutual", "server", "none"])
def test_tls_admits_only_coordinators_to_the_workers(clients: str) -> None:
    manifests = template("--set", f"tls.enabled=true,tls.clients={clients}")
    coordinator = pod_settings(manifests, "coordinator")
    assert {"tls_ca", "tls_cert", "tls_key"} <= coordinator.worker_security.keys()
    assert (coordinator.tls_files is not None) == (clients != "none")
    assert (coordinator.tls_ca is not None) == (clients == "mutual")
    protocols = {name: item["spec"]["ports"][0]["appProtocol"] for name, item in of_kind(manifests, "Service").items()}
    for worker in WORKERS:
        settings = pod_settings(manifests, worker)
        assert settings.tls_files is not None
        assert settings.tls_ca is not None
        assert settings.allowed_names == ("specpool-coordinator",)
        assert protocols[f"specpool-{worker}"] == "https"
    assert protocols["specpool"] == ("https" if clients != "none" else "kubernetes.io/h2c")


@pytest.mark.parametrize("name", ["production", "tls-cert-manager"])
def test_pods_mount_their_certificates_and_tokens(name: str) -> None:
    certificates = of_kind(render(name), "Certificate")
    for component, _, _, settings in processes(name):
        spec = certificates[f"specpool-{component}"]["spec"]
        assert mounted(render(name), component)["/tls"]["secret"]["secretName"] == spec["secretName"]
        assert settings.api_tokens is not None
        if component == "coordinator":
            assert settings.worker_token is not None
        else:  # coordinators get the bare token, workers the line with its name
            assert set(settings.allowed_names) <= set(certificates["specpool-coordinator"]["spec"]["dnsNames"])
            assert [item["key"] for item in mounted(render(name), component)["/worker-token"]["secret"]["items"]] == [
                "tokens"
            ]
            assert "/api-tokens" not in mounted(render(name), component)


@pytest.mark.parametrize("name", [name for name in ALL_VALUES if name != "target-only"])  # has no test pod
def test_helm_test_pod_has_the_required_credentials(name: str) -> None:
    settings = settings_of("specpool generate", ["hello"], pod_environment(render(name), "test"))
    coordinator = pod_settings(render(name), "coordinator")
    assert (settings.token_file is None) == (coordinator.api_tokens is None)
    assert (settings.tls_ca is None) == (coordinator.tls_files is None and name != "edge")
    assert (settings.tls_cert is None) == (coordinator.tls_ca is None)


# --- The edge


def test_only_the_edge_reaches_a_coordinator() -> None:
    manifests = render("edge")
    coordinator = pod_settings(manifests, "coordinator")
    [sidecar] = pod_template(manifests, "coordinator")["spec"]["initContainers"]
    variables = {item["name"]: item["value"] for item in sidecar["env"]}
    assert coordinator.host == "127.0.0.1"
    assert variables["EDGE_COORDINATOR"] == f"127.0.0.1:{coordinator.port}"
    assert int(variables["EDGE_DRAIN_SECONDS"]) > coordinator.drain_seconds
    assert variables["EDGE_HEALTH_PORT"] == str(coordinator.health_port)
    assert (variables["EDGE_TLS"], coordinator.tls_cert) == ("server", None)
    assert coordinator.worker_tls_cert is not None
    policy = of_kind(manifests, "NetworkPolicy")["specpool-coordinators"]["spec"]
    assert policy["ingress"] == [{"ports": [{"port": sidecar["ports"][0]["containerPort"]}]}]


@pytest.mark.parametrize(("has_ipv6", "bind"), [(True, "default"), (False, ":50050")])
def test_the_edge_listens_where_the_kernel_lacks_ipv6(has_ipv6: bool, bind: str, tmp_path: Path) -> None:
    manifests = template(*values_of("edge"), "--set", "tls.clients=none")
    [sidecar] = pod_template(manifests, "coordinator")["spec"]["initContainers"]
    *shell, script = sidecar["command"]
    haproxy, addresses = tmp_path / "haproxy", tmp_path / "if_inet6"
    haproxy.write_text("#!/bin/sh\necho ${EDGE_BIND-default}\n")
    haproxy.chmod(0o755)
    if has_ipv6:
        addresses.touch()
    script = script.replace("/proc/net/if_inet6", str(addresses))
    assert subprocess.check_output([*shell, script], env={"PATH": f"{tmp_path}:/bin"}, text=True) == f"{bind}\n"


def test_monitoring_behind_an_edge_may_use_ipv6() -> None:
    arguments = values_of("edge")
    assert pod_settings(template(*arguments), "coordinator").monitoring_host == "0.0.0.0"
    arguments += ["--set-string", "coordinator.settings.monitoring_host=::"]
    assert pod_settings(template(*arguments), "coordinator").monitoring_host == "::"


# --- The gateway


@pytest.mark.parametrize("metrics", [True, False])
def test_gateway_accepts_its_arguments(metrics: bool) -> None:
    launch = pytest.importorskip("smg.launch_router")
    values = f"metrics.enabled={json.dumps(metrics)},coordinator.drainSeconds=100"
    manifests = template(*values_of("smg"), "--set", values)
    gateway, spec = container_of(manifests, "smg"), pod_template(manifests, "smg")["spec"]
    router = launch.parse_router_args(gateway["args"][1:])
    expected = {"http": router.port, "health": router.health_check_port} | (
        {"metrics": router.prometheus_port} if metrics else {}
    )
    assert {port["name"]: port["containerPort"] for port in gateway["ports"]} == expected
    assert (router.host, router.prometheus_host) == ("0.0.0.0", "0.0.0.0" if metrics else "127.0.0.1")
    cells = [f"grpc://specpool-coordinator-{cell}.specpool-coordinator.default.svc:50050" for cell in range(2)]
    assert gateway["args"][gateway["args"].index("--worker-urls") + 1 :] == cells
    assert router.policy == "power_of_two"
    assert router.api_key is None  # users could open the control plane with it
    assert router.tenant_api_keys
    assert spec["terminationGracePeriodSeconds"] > pre_stop_seconds(gateway) + router.shutdown_grace_period_secs
    assert router.shutdown_grace_period_secs == 100


def test_only_serving_targets_carry_a_colocated_draft() -> None:
    assert pod_settings(render("colocated"), "coordinator").draft_address is None
    values = [*values_of("two-nodes"), "--set", "draft.colocated=true,target.settings.draft_kv_memory=2GiB"]
    manifests = template(*values)
    leader, follower = (pod_settings(manifests, TARGET, node=node) for node in (0, 1))
    own = pod_settings(render("two-nodes"), "draft-worker")
    assert (leader.draft, leader.draft_revision) == (own.model, own.revision)
    assert follower.draft is None
    objects = [item["metadata"]["labels"].get(COMPONENT) for item in manifests]
    assert "draft-worker" not in objects


def test_a_standby_is_a_second_target_of_each_cell() -> None:
    manifests = render("standby")
    settings = {component: each for component, *_, each in processes("standby")}
    mounted_files = {"tls_cert", "tls_key", "tls_ca", "api_tokens"}
    target, standby = (settings[each].model_dump(exclude=mounted_files) for each in (TARGET, "standby"))
    assert target == standby
    coordinator = pod_environment(manifests, "coordinator")
    host = "specpool-standby-0.specpool-standby.default.svc"
    assert coordinator["SPECPOOL_TARGET_STANDBY_ADDRESS"] == f"{host}:{settings['standby'].port}"
    pods = [deepcopy(pod_template(manifests, component)["spec"]) for component in (TARGET, "standby")]
    assert "affinity" not in pods[0]
    [rule] = pods[1]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert rule["podAffinityTerm"]["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == TARGET
    for pod in pods:
        del pod["containers"][0]["env"]
        pod.pop("affinity", None)
    secrets = [next(each for each in pod["volumes"] if each["name"] == "tls") for pod in pods]
    assert [secret["secret"]["secretName"] for secret in secrets] == [
        "specpool-target-worker-tls",
        "specpool-standby-tls",
    ]
    assert pods[0]["containers"] == pods[1]["containers"]


def test_a_drain_never_ends_a_target_and_its_standby() -> None:
    budgets = [each for each in render("standby") if each["kind"] == "PodDisruptionBudget"]
    [shared] = [each["spec"] for each in budgets if "matchExpressions" in each["spec"]["selector"]]
    assert shared["maxUnavailable"] == 1
    assert sorted(shared["selector"]["matchExpressions"][0]["values"]) == ["standby", TARGET]


# --- Sharing a GPU


def test_a_carried_draft_needs_no_further_gpu() -> None:
    assert gpus_of("one-gpu") == {TARGET: {"nvidia.com/gpu": 1}}
    assert pod_settings(render("one-gpu"), TARGET).draft == pod_settings(render(DEFAULTS), "draft-worker").model


def test_workers_use_slices_of_a_gpu() -> None:
    assert gpus_of("mig") == {TARGET: {"nvidia.com/mig-4g.40gb": 1}, "draft-worker": {"nvidia.com/mig-1g.10gb": 1}}
    assert gpus_of("time-slicing") == {worker: {"nvidia.com/gpu.shared": 1} for worker in WORKERS}
    limits = [pod_settings(render("time-slicing"), worker).memory_limit for worker in WORKERS]
    assert sum(limits) < 80e9  # nothing else separates their memory


def gpus_of(name: str) -> dict[str, dict[str, int]]:
    """Return the GPUs that the pods of each component request, by resource."""
    limits = {component: server["resources"]["limits"] for component, _, server, _ in processes(name)}
    gpus = {name: {key: count for key, count in given.items() if "/" in key} for name, given in limits.items()}
    return {component: given for component, given in gpus.items() if given}


# --- Several workers of one coordinator


@pytest.mark.parametrize("name", REPLICATED)
def test_replicas_are_drained_one_at_a_time(name: str) -> None:
    manifests = render(name)
    budgets = of_kind(manifests, "PodDisruptionBudget")
    assert budgets.keys() == {f"specpool-{worker}" for worker in WORKERS}
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets.values())
    for item in of_kind(manifests, "LeaderWorkerSet").values():
        rollout = item["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert (rollout["maxUnavailable"], rollout["maxSurge"]) == (1, 0)
    sets = of_kind(manifests, "StatefulSet")
    for worker in [worker for worker in WORKERS if f"specpool-{worker}" in sets]:
        assert sets[f"specpool-{worker}"]["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
        # A pod that ends leaves the addresses at once, and serves until the coordinator has noticed.
        assert "publishNotReadyAddresses" not in of_kind(manifests, "Service")[f"specpool-{worker}"]["spec"]
        assert pre_stop_seconds(container_of(manifests, worker)) > DNS_SECONDS
    assert "minReadySeconds" not in sets["specpool-coordinator"]["spec"]
    assert sets["specpool-coordinator"]["spec"]["replicas"] == 1


def test_fixed_replicas_and_their_certificates() -> None:
    manifests = render("replicas")
    [targets] = of_kind(manifests, "LeaderWorkerSet").values()
    drafts = of_kind(manifests, "StatefulSet")["specpool-draft-worker"]
    assert (targets["spec"]["replicas"], drafts["spec"]["replicas"]) == (2, 3)
    groups = [policy for policy in of_kind(manifests, "NetworkPolicy") if "target-group" in policy]
    assert len(groups) == 2
    for worker in WORKERS:  # the coordinator verifies the name of the Service
        names = of_kind(manifests, "Certificate")[f"specpool-{worker}"]["spec"]["dnsNames"]
        assert f"specpool-{worker}.default.svc" in names


SCALED = [("many-workers", "ScaledObject"), ("hpa-workers", "HorizontalPodAutoscaler")]


@pytest.mark.parametrize(("name", "kind"), SCALED)
def test_each_role_scales_by_its_own_load(name: str, kind: str) -> None:
    manifests = render(name)
    scalers = {full_name: item["spec"] for full_name, item in of_kind(manifests, kind).items()}
    assert scalers.keys() == {f"specpool-{worker}" for worker in WORKERS}
    for full_name, spec in scalers.items():
        assert spec["scaleTargetRef"]["name"] == full_name
        assert "replicas" not in of_kind(manifests, "StatefulSet")[full_name]["spec"]
    text = {full_name: json.dumps(spec) for full_name, spec in scalers.items()}
    assert all(f"num_requests_{state}" in text["specpool-target-worker"] for state in ("waiting", "running"))
    assert "worker_" in text["specpool-draft-worker"]
    assert "num_requests" not in text["specpool-draft-worker"]
    assert all('"policies": [{"type": "Pods", "value": 1, "periodSeconds": 90}]' in each for each in text.values())
