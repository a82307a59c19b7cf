"""What values change in the Helm chart, and what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from chart_kinds import CUSTOM
from deployment import COMPONENTS, DEPLOY, WORKERS
from helm_chart import (
    CHART,
    DEFAULTS,
    EXAMPLES,
    container_of,
    of_kind,
    pod_template,
    refusal,
    render,
    run_helm,
    template,
    values_of,
)
from pod_settings import mounted, pod_settings

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


# --- Values


def test_schema_describes_every_value() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)

    def resolved(schema: dict) -> dict:  # type: ignore[type-arg]
        name = schema.get("$ref", "").rpartition("/")[2]
        return {**SCHEMA["$defs"][name], **schema} if name else schema

    def missing(schema: dict, path: str) -> list[str]:  # type: ignore[type-arg]
        schema = resolved(schema)
        named = [path] if path and "description" not in schema and not path.startswith("resources") else []
        inner = (missing(part, f"{path}.{name}") for name, part in schema.get("properties", {}).items())
        return [name for name in [*named, *(name for names in inner for name in names)] if name.count(".") < 3]

    assert missing(SCHEMA, "") == []
    assert SCHEMA["properties"].keys() - {"global"} == VALUES.keys()


def test_pages_name_every_value_and_every_example() -> None:
    listed = re.findall(r"^\| (`.*?`) \|", (CHART / "README.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(listed))) == sorted(VALUES)
    page = (DEPLOY / "README.md").read_text()
    assert [example for example in EXAMPLES if f"| `{example}` |" not in page] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("targt.gpus=2", "additional properties 'targt' not allowed"),
        ("target.gpu=2", "at '/target': additional properties 'gpu' not allowed"),
        ("target.gpus=two", "at '/target/gpus': got string, want integer"),
        ("cells=0", "at '/cells': minimum: got 0, want 1"),
        ("coordinator.probes.startup.periodSecond=2", "additional properties 'periodSecond' not allowed"),
        ("target.image.tag=latest", "at '/target/image/tag'"),
        ("target.settings.Port=1", "invalid propertyName 'Port'"),
        ("target.settings.port=1", "target.settings.port: the chart sets it from other values"),
        ("coordinator.settings.target_address=x", "coordinator.settings.target_address: the chart sets it"),
        ("target.modelCache.type=existingClaim", "target.modelCache.existingClaim: needed by type existingClaim"),
        ("target.modelCache.type=image", "target.modelCache.image.reference: needed by type image"),
        ("smg.enabled=true", "smg.image.repository: no public image is known"),
        ("smg.enabled=true,tls.enabled=true", "smg calls engines without TLS and tokens"),
        ("smg.enabled=true,auth.apiTokens.existingSecret=x,tests.tokenSecret=x", "smg calls engines without TLS"),
        ("auth.apiTokens.existingSecret=users", "tests.tokenSecret: needed with auth.apiTokens"),
        ("autoscaling.kind=keda", "autoscaling.kind: needs metrics.enabled"),
        ("autoscaling.kind=hpa,metrics.enabled=true,autoscaling.minCells=5", "must not exceed autoscaling.maxCells"),
        ("autoscaling.maxCells=10", "at '/autoscaling/maxCells': maximum: got 10, want 9"),
        ("disaggregatedSet.enabled=true,cells=2", "cells: must be 1 with disaggregatedSet.enabled"),
        ("disaggregatedSet.enabled=true,draft.enabled=false", "draft.enabled: must be true with disaggregatedSet"),
        ("tls.enabled=true,tls.certManager.enabled=true", "tls.certManager.issuerRef.name: needed"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(values: str, said: str) -> None:
    assert said in refusal("--set", values)


def test_old_clusters_are_refused() -> None:
    assert "incompatible" in refusal("--kube-version", "1.29.0")
    assert "needs Kubernetes 1.33" in refusal(*values_of("mixed-gpus"), "--kube-version", "1.32.0")


def test_any_setting_can_be_given() -> None:
    manifests = template(
        "--set", "coordinator.settings.queue_tokens=5000000,coordinator.settings.prefix_reuse=false",
        "--set-json", 'target={"settings": {"kv_memory": "8GiB"}, "extraArgs": ["--max-sequences", "8"]}',
    )  # fmt: skip
    coordinator, target = (pod_settings(manifests, name) for name in ("coordinator", "target-worker"))
    assert (coordinator.queue_tokens, coordinator.prefix_reuse) == (5_000_000, False)
    assert (target.kv_memory, target.max_sequences) == (8 * 2**30, 8)


def test_changed_settings_restart_the_pods_that_they_concern() -> None:
    def sums(*arguments: str) -> dict[str, str]:
        made = template(*arguments) if arguments else render(DEFAULTS)
        return {name: pod_template(made, name)["metadata"]["annotations"]["checksum/settings"] for name in COMPONENTS}

    changed = sums("--set", "target.settings.max_sequences=8")
    assert {name for name in COMPONENTS if changed[name] != sums()[name]} == {"target-worker"}


def test_several_gpus_are_asked_for() -> None:
    target = container_of(template("--set", "target.gpus=4"), "target-worker")
    assert target["resources"]["limits"]["nvidia.com/gpu"] == 4


def test_coordinator_without_draft_workers() -> None:
    manifests = template("--set", "draft.enabled=false")
    assert pod_settings(manifests, "coordinator").draft_address is None
    assert not [item for item in manifests if "draft" in item["metadata"]["name"]]


def test_models_stay_when_a_cell_is_removed() -> None:
    spec = of_kind(render("two-gpus"), "StatefulSet")["specpool-target-worker"]["spec"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    [claim] = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "80Gi"


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
    assert among["values"] == [*COMPONENTS]
    for component in COMPONENTS:
        assert selector["matchLabels"].items() <= pod_template(manifests, component)["metadata"]["labels"].items()
        assert "metrics" in {port["name"] for port in container_of(manifests, component)["ports"]}


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


def test_gateway_knows_its_arguments() -> None:
    smg = Path(sys.executable).parent / "smg"
    if not smg.exists():
        pytest.skip("smg is not installed")
    shown = subprocess.run([str(smg), "launch", "--help"], capture_output=True, text=True, check=True).stdout
    options = [item.partition("=")[0] for item in container_of(render("openai"), "smg")["args"] if item[:2] == "--"]
    assert [option for option in options if option not in shown] == []


@pytest.mark.parametrize("example", [DEFAULTS, *EXAMPLES])
def test_notes_are_shown_after_an_installation(example: str) -> None:
    done = run_helm("install", "specpool", str(CHART), "--dry-run=client", *values_of(example))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "rollout status statefulset/specpool-coordinator" in notes
    assert ("TLS" in notes) == (example not in ("production", "tls-cert-manager"))
