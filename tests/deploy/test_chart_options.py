"""What the Helm chart adds when asked: TLS, tokens, autoscalers, monitors, the gateway."""

import json
import re
import shutil
from pathlib import Path

import jsonschema
import pytest
import yaml
from chart_kinds import CUSTOM
from deployment import COMPONENTS, WORKERS
from helm_chart import (
    CHART,
    DEFAULTS,
    EXAMPLES,
    container_of,
    of_kind,
    pod_template,
    render,
    run_helm,
    template,
    values_of,
)
from pod_settings import mounted, pod_settings

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


# --- TLS and tokens


@pytest.mark.parametrize("clients", ["mutual", "server", "none"])
def test_tls_lets_only_coordinators_call_the_workers(clients: str) -> None:
    manifests = template("--set", f"tls.enabled=true,tls.clients={clients}")
    coordinator = pod_settings(manifests, "coordinator")
    assert {"tls_ca", "tls_cert", "tls_key"} <= coordinator.worker_security.keys()
    assert (coordinator.tls_files is not None) == (clients != "none")
    assert (coordinator.tls_ca is not None) == (clients == "mutual")
    services = of_kind(manifests, "Service")
    for worker in WORKERS:
        settings = pod_settings(manifests, worker)
        assert settings.tls_files is not None
        assert settings.tls_ca is not None
        assert settings.allowed_names == ("specpool-coordinator",)
        assert mounted(manifests, worker)["/tls"]["secret"]["secretName"] == f"specpool-{worker}-tls"
        assert services[f"specpool-{worker}"]["spec"]["ports"][0]["appProtocol"] == "https"
    plain = "https" if clients != "none" else "kubernetes.io/h2c"
    assert {services[name]["spec"]["ports"][0]["appProtocol"] for name in ("specpool", "specpool-coordinator")} == {
        plain
    }


@pytest.mark.parametrize("example", ["production", "tls-cert-manager"])
def test_certificates_have_the_names_and_secrets_that_pods_use(example: str) -> None:
    certificates = of_kind(render(example), "Certificate")
    for component in COMPONENTS:
        spec = certificates[f"specpool-{component}"]["spec"]
        assert mounted(render(example), component)["/tls"]["secret"]["secretName"] == spec["secretName"]
        assert {"server auth", "client auth"} <= set(spec["usages"])
    [allowed] = pod_settings(render("tls-cert-manager"), "target-worker").allowed_names
    assert allowed in certificates["specpool-coordinator"]["spec"]["dnsNames"]
    assert ("specpool-client" in certificates) == (example == "production")


def test_tokens_are_read_from_secrets() -> None:
    manifests = render("tls-cert-manager")
    coordinator = pod_settings(manifests, "coordinator")
    assert coordinator.api_tokens is not None
    assert coordinator.worker_token is not None
    for worker in WORKERS:
        assert pod_settings(manifests, worker).api_tokens is not None
        assert "/api-tokens" not in mounted(manifests, worker)
        # The line with its name is for the workers, the token alone for coordinators.
        assert [item["key"] for item in mounted(manifests, worker)["/worker-token"]["secret"]["items"]] == ["tokens"]


@pytest.mark.parametrize("example", [DEFAULTS, "production", "tls-cert-manager"])
def test_test_pod_may_call(example: str) -> None:
    made = pod_template(render(example), "test")
    assert made["metadata"]["annotations"]["helm.sh/hook"] == "test"
    secrets = {volume["name"]: volume["secret"] for volume in made["spec"]["volumes"] if "secret" in volume}
    tls = {"production": "specpool-client-tls", "tls-cert-manager": "specpool-coordinator-tls"}.get(example)
    assert secrets.get("tls", {}).get("secretName") == tls
    assert ("token" in secrets) == (example != DEFAULTS)


# --- Scaling


def test_keda_scales_coordinators_by_their_queues_and_workers_by_coordinators() -> None:
    objects = of_kind(render("production"), "ScaledObject")
    assert {*objects} == {f"specpool-{component}" for component in COMPONENTS}
    for name, item in objects.items():
        assert item["spec"]["scaleTargetRef"]["name"] in of_kind(render("production"), "StatefulSet")
        assert item["spec"]["scaleTargetRef"]["name"] == name
    queries = [trigger["metadata"]["query"] for trigger in objects["specpool-coordinator"]["spec"]["triggers"]]
    assert [re.findall(r"specpool:(\w+)", query) for query in queries] == [
        ["num_requests_waiting"], ["num_requests_running"],
    ]  # fmt: skip
    labels = pod_template(render("production"), "coordinator")["metadata"]["labels"]
    for worker in WORKERS:
        [trigger] = objects[f"specpool-{worker}"]["spec"]["triggers"]
        selector = dict(part.split("=") for part in trigger["metadata"]["podSelector"].split(","))
        assert selector.items() <= labels.items()
        assert trigger["metadata"]["value"] == "1"


def test_hpa_does_the_same_by_an_adapter() -> None:
    scalers = of_kind(template("--set", "autoscaling.kind=hpa,metrics.enabled=true"), "HorizontalPodAutoscaler")
    first, second = scalers["specpool-coordinator"]["spec"]["metrics"]
    names = [item["pods"]["metric"]["name"] for item in (first, second)]
    assert names == ["specpool_num_requests_waiting", "specpool_num_requests_running"]
    for worker in WORKERS:
        [followed] = scalers[f"specpool-{worker}"]["spec"]["metrics"]
        assert followed["external"]["metric"]["selector"] == {"matchLabels": {"statefulset": "specpool-coordinator"}}
        assert followed["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_spread_is_over_the_pods_of_the_role() -> None:
    for component in ("coordinator", "target-worker"):
        [constraint] = pod_template(render("cells"), component)["spec"]["topologySpreadConstraints"]
        labels = pod_template(render("cells"), component)["metadata"]["labels"]
        assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


# --- Monitoring


def test_monitors_read_every_process() -> None:
    manifests = render("production")
    selector = of_kind(manifests, "PodMonitor")["specpool"]["spec"]["selector"]
    [among] = selector["matchExpressions"]
    assert among["values"] == [*COMPONENTS, "smg"]
    for component in COMPONENTS:
        assert selector["matchLabels"].items() <= pod_template(manifests, component)["metadata"]["labels"].items()
        assert "metrics" in {port["name"] for port in container_of(manifests, component)["ports"]}


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_job_has_the_name_that_alerts_look_for_whatever_the_release_is_called(kind: str) -> None:
    monitor = f"metrics.enabled=true,metrics.{kind[0].lower()}{kind[1:]}.enabled=true,fullnameOverride=llm"
    [found] = of_kind(template("--set", monitor, "--namespace", "ai", release="llm"), kind).values()
    jsonschema.validate(found, CUSTOM[kind])
    [endpoint] = found["spec"].get("endpoints") or found["spec"]["podMetricsEndpoints"]
    [relabeling] = endpoint["relabelings"]
    assert relabeling == {"targetLabel": "job", "replacement": "specpool/ai/llm"}
    jobs = re.findall(r'job=~"(.*?)"', (CHART / "monitoring/alerts.yaml").read_text())
    assert jobs
    assert all(re.fullmatch(job, relabeling["replacement"]) for job in jobs)


def test_service_monitor_finds_a_service_of_every_process() -> None:
    manifests = template("--set", "metrics.enabled=true,metrics.serviceMonitor.enabled=true,metrics.annotations=true")
    [monitor] = of_kind(manifests, "ServiceMonitor").values()
    jsonschema.validate(monitor, CUSTOM["ServiceMonitor"])
    service = of_kind(manifests, "Service")["specpool-metrics"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    for component in COMPONENTS:
        made = pod_template(manifests, component)["metadata"]
        assert service["spec"]["selector"].items() <= made["labels"].items()
        assert made["annotations"]["prometheus.io/port"] == "9090"


def test_dashboard_and_alerts_are_those_of_the_chart(tmp_path: Path) -> None:
    chart = tmp_path / "specpool"
    shutil.copytree(CHART, chart)
    (chart / "monitoring").mkdir(exist_ok=True)
    dashboard = {"title": "Specpool", "panels": [{"title": "{{ not a template }}"}]}
    alert = {"alert": "Slow", "expr": "up == 0", "annotations": {"summary": "{{ $labels.pod }}: slow"}}
    groups = {"groups": [{"name": "specpool", "rules": [alert]}]}
    (chart / "monitoring/dashboard.json").write_text(json.dumps(dashboard, indent=2))
    (chart / "monitoring/alerts.yaml").write_text(yaml.safe_dump(groups))
    manifests = template(*values_of("production"), chart=chart)
    [rule] = of_kind(manifests, "PrometheusRule").values()
    jsonschema.validate(rule, CUSTOM["PrometheusRule"])
    assert rule["spec"] == groups
    found = of_kind(manifests, "ConfigMap")["specpool-dashboard"]
    assert json.loads(found["data"]["specpool.json"]) == dashboard
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


# --- The gateway, and text


def test_gateway_is_given_every_coordinator() -> None:
    gateway = container_of(render("openai"), "smg")
    urls = [item for item in gateway["args"] if item.startswith("grpc://")]
    names = [f"specpool-coordinator-{cell}.specpool-coordinator" for cell in range(2)]
    assert urls == [f"grpc://{name}.default.svc:50050" for name in names]
    assert gateway["args"][gateway["args"].index("--worker-urls") + 1 :] == urls  # it takes all that follow
    policy = of_kind(render("openai"), "NetworkPolicy")["specpool-coordinators"]["spec"]
    assert {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "smg"}}} in policy["ingress"][0]["from"]
    port = {port["name"]: port["containerPort"] for port in gateway["ports"]}["http"]
    assert of_kind(render("openai"), "Service")["specpool-smg"]["spec"]["ports"][0]["port"] == port


@pytest.mark.parametrize("metrics", [True, False])
def test_gateway_is_started_as_its_pod_expects(metrics: bool) -> None:
    launch = pytest.importorskip("smg.launch_router")
    values = f"metrics.enabled={json.dumps(metrics)},coordinator.drainSeconds=100"
    manifests = template(*values_of("openai"), "--set", values)
    gateway, spec = container_of(manifests, "smg"), pod_template(manifests, "smg")["spec"]
    made = launch.parse_router_args(gateway["args"][1:])
    ports = {port["name"]: port["containerPort"] for port in gateway["ports"]}
    serving = {"http": made.port, "health": made.health_check_port} | (
        {"metrics": made.prometheus_port} if metrics else {}
    )
    assert ports == serving
    assert (made.host, made.prometheus_host) == ("0.0.0.0", "0.0.0.0" if metrics else "127.0.0.1")
    assert made.policy == "power_of_two"
    assert made.api_key is None  # it would open the control plane to users
    assert made.tenant_api_keys
    hook = gateway["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > hook + made.shutdown_grace_period_secs
    assert made.shutdown_grace_period_secs == 100
    assert {gateway[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "readiness", "liveness")} == {"health"}


def test_gateway_is_guarded_as_the_processes_are() -> None:
    manifests = template(*values_of("openai"), "--set", "metrics.enabled=true")
    labels = pod_template(manifests, "smg")["metadata"]["labels"]
    policy = of_kind(manifests, "NetworkPolicy")["specpool-smg"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": "http"}], [{"port": "metrics"}]]
    budget = of_kind(manifests, "PodDisruptionBudget")["specpool-smg"]["spec"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()
    alone = template(*values_of("openai"), "--set", "smg.replicas=1")
    assert "specpool-smg" not in of_kind(alone, "PodDisruptionBudget")


@pytest.mark.parametrize("example", [DEFAULTS, *EXAMPLES])
def test_notes_are_shown_after_an_installation(example: str) -> None:
    done = run_helm("install", "specpool", str(CHART), "--dry-run=client", *values_of(example))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "rollout status statefulset/specpool-coordinator" in notes
    assert ("TLS" in notes) == (example not in ("production", "tls-cert-manager"))
