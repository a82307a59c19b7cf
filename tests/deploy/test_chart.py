"""The manifests that the Helm chart renders: snapshots, schemas and policies for the defaults, examples and test cases.

`make snapshots` rewrites `snapshots/`; review the difference before committing it.
"""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from deployment import COMPONENTS, WORKERS, arguments_of, project
from helm_chart import (
    ALL_VALUES,
    CHART,
    COMPONENT,
    DEFAULTS,
    LOADER,
    Manifest,
    of_kind,
    pod_template,
    pod_templates,
    render,
    run_helm,
    template,
    values_of,
)
from kubernetes_schemas import SUPPORTED, problems

FOLDER = Path(__file__).parent
EVERY_CASE = pytest.mark.parametrize("name", ALL_VALUES)
UPDATES_SNAPSHOTS = "UPDATE_SNAPSHOTS" in os.environ
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
EDGE = CHART / "edge/haproxy.cfg"
ALERTS, DASHBOARD = CHART / "monitoring/alerts.yaml", CHART / "monitoring/dashboard.json"


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes multi-line text as a block."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else "")
)


# --- Snapshots


@EVERY_CASE
def test_manifests_match_the_snapshot(name: str) -> None:
    manifests = [_without_monitoring_files(item) for item in render(name)]
    rendered = yaml.dump_all(manifests, Dumper=_Dumper, default_flow_style=None, sort_keys=False, width=120)
    path = FOLDER / f"snapshots/{name}.yaml"
    if UPDATES_SNAPSHOTS:
        path.write_text(rendered)
    assert rendered == path.read_text(), "review the change, then run `make snapshots`"


def _without_monitoring_files(manifest: Manifest) -> Manifest:
    """Replace the alerts, the dashboard and the edge's configuration by the paths of their files in the chart."""
    if manifest["kind"] == "PrometheusRule":
        assert manifest["spec"] == yaml.load(ALERTS.read_text(), LOADER)
        return manifest | {"spec": "monitoring/alerts.yaml"}
    if manifest["metadata"]["name"].endswith("-edge"):
        assert manifest["data"]["haproxy.cfg"].rstrip() == EDGE.read_text().rstrip()
        return manifest | {"data": {"haproxy.cfg": "edge/haproxy.cfg"}}
    if manifest["kind"] == "ConfigMap":
        assert json.loads(manifest["data"]["specpool.json"]) == json.loads(DASHBOARD.read_text())
        return manifest | {"data": {"specpool.json": "monitoring/dashboard.json"}}
    return manifest


def test_every_snapshot_belongs_to_a_case() -> None:
    assert sorted(path.stem for path in (FOLDER / "snapshots").iterdir()) == sorted(ALL_VALUES)


# --- Schemas


@EVERY_CASE
def test_manifests_are_valid_in_the_oldest_and_newest_kubernetes(name: str) -> None:
    oldest = "1.33.0" if name == "mixed-gpus" else SUPPORTED[0]  # a model from an OCI image needs 1.33
    assert problems(render(name), SUPPORTED[-1]) == problems(render(name), oldest) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", SUPPORTED[1:-1])
def test_defaults_are_valid_in_versions_between(version: str) -> None:
    assert problems(render(DEFAULTS), version) == []


def test_chart_names_the_supported_versions() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={SUPPORTED[0]}-0"
    assert chart["version"] == chart["appVersion"] == project()["project"]["version"]


@EVERY_CASE
def test_helm_lint_passes(name: str) -> None:
    done = run_helm("lint", str(CHART), "--strict", "--quiet", *values_of(name))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "warnings"),
    [(DEFAULTS, {"no TLS", "Everyone who reaches the service", "Metrics are off"}), ("production", set()),
     ("smg", {"no TLS", "Everyone who reaches the service", "Metrics are off"})],
)  # fmt: skip
def test_notes_warn_about_open_services(name: str, warnings: set[str]) -> None:
    done = run_helm("install", "specpool", str(CHART), "--dry-run=client", *values_of(name))
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "rollout status statefulset/specpool-coordinator" in notes, done.stderr
    shown = {text for text in ("no TLS", "Everyone who reaches the service", "Metrics are off") if text in notes}
    assert shown == warnings


# --- Names


@EVERY_CASE
def test_names_are_unique_per_release_and_have_no_namespace(name: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in render(name)]
    assert len(names) == len(set(names))
    assert not [item for item in render(name) if "namespace" in item["metadata"] or not item["metadata"]["labels"]]
    assert all("specpool" in full_name for _, full_name in names)


@pytest.mark.parametrize("release", ["x" * 53, f"{'x' * 36}.{'y' * 16}", "llm"])
@pytest.mark.parametrize("name", ["two-nodes", "smg", "production"])
def test_long_release_names_are_shortened(name: str, release: str) -> None:
    for item in template(*values_of(name), release=release):
        full_name = item["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", full_name), full_name
        # Controllers append a pod index and a revision hash to these names.
        suffix = {"StatefulSet": "-0123456789", "LeaderWorkerSet": "-99-0123456789"}.get(item["kind"], "")
        assert len(full_name + suffix) <= 63
        assert max(map(len, item["metadata"]["labels"].values())) <= 63


# --- Security policies


@EVERY_CASE
def test_pods_and_containers_are_restricted(name: str) -> None:
    user = int(arguments_of("worker", "USER")[-1].split(":")[0])
    for component, pod in pod_templates(render(name)):
        spec, security = pod["spec"], pod["spec"]["securityContext"]
        assert security["runAsNonRoot"], component
        assert security["runAsUser"] == security["fsGroup"] == user, component
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, component
        assert spec["automountServiceAccountToken"] is False, component
        assert spec["enableServiceLinks"] is False, component  # processes reject unknown SPECPOOL_* variables
        assert spec["serviceAccountName"] in of_kind(render(name), "ServiceAccount"), component
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), component
        assert not any("hostPath" in volume for volume in spec["volumes"]), component
        sidecars = spec.get("initContainers", [])
        assert [each["name"] for each in sidecars] in ([], ["edge"]), component
        for server in (*spec["containers"], *sidecars):
            container = server["securityContext"]
            assert container["readOnlyRootFilesystem"], component
            assert container["capabilities"] == {"drop": ["ALL"]}, component
            assert container["allowPrivilegeEscalation"] is False, component
            assert {"cpu", "memory"} <= server["resources"]["requests"].keys(), component
            assert "memory" in server["resources"]["limits"], component
            assert re.fullmatch(r".+:(?!latest$)[\w.-]+|.+@sha256:[0-9a-f]{64}", server["image"]), component
            if (
                "ports" in server and server not in sidecars
            ):  # neither the test pod nor followers of a group serve anything
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= server.keys(), component


@EVERY_CASE
def test_only_coordinators_reach_the_workers(name: str) -> None:
    if name == "target-only":  # networkPolicy.enabled: false
        assert not of_kind(render(name), "NetworkPolicy")
        return
    policy = of_kind(render(name), "NetworkPolicy")["specpool-workers"]["spec"]
    [guarded] = policy["podSelector"]["matchExpressions"]
    workers = {component for component, _ in pod_templates(render(name))} - {"coordinator", "smg", "http", "test"}
    assert (guarded["key"], guarded["operator"], {*guarded["values"]}) == (COMPONENT, "In", workers | {*WORKERS})
    calls, *metrics = policy["ingress"]
    assert [source["podSelector"]["matchLabels"][COMPONENT] for source in calls["from"]] == ["coordinator"]
    assert calls["ports"] == [{"port": "grpc"}]
    assert all(rule["ports"] == [{"port": "metrics"}] for rule in metrics)


# --- Several renders


def test_changed_settings_restart_only_affected_pods() -> None:
    changed = template("--set", "target.settings.max_sequences=8")
    before = {name: pod_template(render(DEFAULTS), name) for name in COMPONENTS}
    assert {name for name in COMPONENTS if pod_template(changed, name) != before[name]} == {"target-worker"}
    # Pods of an earlier revision would read a changed ConfigMap when they restart.
    assert not of_kind(changed, "ConfigMap")


def test_alerts_match_the_monitored_job_of_any_release() -> None:
    values = ["--set", "fullnameOverride=llm", "--namespace", "ai"]
    monitors = of_kind(template(*values_of("production"), *values, release="llm"), "PodMonitor")
    assert monitors.keys() == {"llm", "llm-http"}
    job = "specpool/ai/llm"
    for monitor in monitors.values():
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": job}]
    patterns = re.findall(r'job=~"(.*?)"', ALERTS.read_text())
    assert patterns
    assert all(re.fullmatch(pattern, job) for pattern in patterns)
