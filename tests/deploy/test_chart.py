"""What Kubernetes is sent by the Helm chart, with the defaults and with every example: is it valid, and harmless."""

import functools
import json
import re
from collections.abc import Iterator
from unittest import mock

import jsonschema
import kubernetes_validate
import pytest
import yaml
from chart_kinds import CUSTOM
from deployment import arguments_of, project
from helm_chart import (
    CHART,
    DEFAULTS,
    EXAMPLES,
    WORKER_INDEX,
    Manifest,
    of_kind,
    pod_templates,
    render,
    run_helm,
    template,
    values_of,
)

SUPPORTED = [version for version in kubernetes_validate.utils.all_versions() if int(version.split(".")[1]) >= 30]
SCHEMA_CONTENTS = kubernetes_validate.utils.schema_contents
EVERY_EXAMPLE = pytest.mark.parametrize("example", [DEFAULTS, *EXAMPLES])


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    """Definitions of a version of Kubernetes are megabytes, and read anew for every manifest."""
    with mock.patch.object(kubernetes_validate.utils, "schema_contents", functools.cache(SCHEMA_CONTENTS)):
        yield


@functools.cache
def problem(manifest: str, version: str) -> str | None:
    """What is wrong with a manifest, as JSON, for a version of Kubernetes."""
    loaded = json.loads(manifest)
    try:
        if loaded["kind"] in CUSTOM:
            jsonschema.validate(loaded, CUSTOM[loaded["kind"]])
        else:
            kubernetes_validate.validate(loaded, version, strict=True)
    except jsonschema.ValidationError as error:
        return f"{loaded['kind']} {error.json_path}: {error.message}"
    return None


def problems(manifests: list[Manifest], version: str) -> list[str]:
    """What is wrong with the manifests, and with the pods in manifests of other APIs."""
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": made}
        for name, made in pod_templates([item for item in manifests if item["kind"] in CUSTOM])
    ]
    found = (problem(json.dumps(item, sort_keys=True), version) for item in (*manifests, *pods))
    return [what for what in found if what is not None]


# --- What Kubernetes is sent


@EVERY_EXAMPLE
def test_helm_finds_no_fault(example: str) -> None:
    done = run_helm("lint", str(CHART), "--strict", "--quiet", *values_of(example))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@EVERY_EXAMPLE
def test_manifests_are_valid_in_the_newest_version(example: str) -> None:
    assert problems(render(example), SUPPORTED[-1]) == []


@EVERY_EXAMPLE
def test_manifests_are_valid_in_the_oldest_version(example: str) -> None:
    oldest = "1.33.0" if example == "mixed-gpus" else SUPPORTED[0]  # a model from an OCI image
    assert problems(render(example), oldest) == []


@pytest.mark.parametrize("version", SUPPORTED[1:-1])
def test_defaults_are_valid_in_every_version_between(version: str) -> None:
    assert problems(render(DEFAULTS), version) == []


def test_supported_versions_are_those_that_the_chart_names() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={SUPPORTED[0]}-0"
    assert chart["version"] == chart["appVersion"] == project()["project"]["version"]


@EVERY_EXAMPLE
def test_names_are_unique_and_the_namespace_is_left_open(example: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in render(example)]
    assert len(names) == len(set(names))
    assert [item for item in render(example) if "namespace" in item["metadata"]] == []


def test_releases_share_nothing() -> None:
    names = [{(item["kind"], item["metadata"]["name"]) for item in render(DEFAULTS)}]
    names += [{(item["kind"], item["metadata"]["name"]) for item in template(release="other")}]
    assert names[0].isdisjoint(names[1])


@pytest.mark.parametrize("release", ["x" * 53, f"{'x' * 36}.{'y' * 16}", "llm"])
def test_any_release_has_names_that_kubernetes_accepts(release: str) -> None:
    gateway = "cells=2,smg.enabled=true,smg.image.repository=smg"
    nodes = "target.nodes=2,target.tensorParallel=2"
    tls = "tls.enabled=true,tls.clients=none,tls.certManager.enabled=true,tls.certManager.issuerRef.name=ca"
    metrics = "metrics.enabled=true,metrics.serviceMonitor.enabled=true,metrics.dashboard.enabled=true"
    grouped = template("--set", gateway, "--set", nodes, release=release)
    for item in template("--set", gateway, "--set", tls, "--set", metrics, release=release) + grouped:
        name = item["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name
        if item["kind"] == "StatefulSet":  # the label controller-revision-hash of its pods, and their own names
            assert len(f"{name}-0123456789") <= 63
        if item["kind"] == "LeaderWorkerSet":  # it has a StatefulSet for the other nodes of each group
            assert len(f"{name}-99-0123456789") <= 63
        assert max(map(len, item["metadata"]["labels"].values())) <= 63


# --- Policies that every container keeps


@EVERY_EXAMPLE
def test_pods_may_do_little(example: str) -> None:
    user = int(arguments_of("worker", "USER")[-1].split(":")[0])
    for component, made in pod_templates(render(example)):
        spec = made["spec"]
        assert spec["securityContext"]["runAsNonRoot"], component
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == user, component
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, component
        assert spec["automountServiceAccountToken"] is False, component
        assert spec["enableServiceLinks"] is False, component  # processes refuse unknown SPECPOOL_* variables
        assert spec["serviceAccountName"] in of_kind(render(example), "ServiceAccount"), component
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), component
        assert not any("hostPath" in volume for volume in spec["volumes"]), component


@EVERY_EXAMPLE
def test_containers_may_do_little(example: str) -> None:
    for component, made in pod_templates(render(example)):
        for server in [*made["spec"]["containers"], *made["spec"].get("initContainers", [])]:
            security = server["securityContext"]
            assert security["readOnlyRootFilesystem"], component
            assert security["capabilities"] == {"drop": ["ALL"]}, component
            assert security["allowPrivilegeEscalation"] is False, component
            assert {"cpu", "memory"} <= server["resources"]["requests"].keys(), component
            assert "memory" in server["resources"]["limits"], component
            assert re.fullmatch(r".+:(?!latest$)[\w.-]+|.+@sha256:[0-9a-f]{64}", server["image"]), component
            once = made["spec"].get("restartPolicy") == "Never"
            if not once and made["metadata"]["labels"].get(WORKER_INDEX, "0") == "0":  # others of a group serve nothing
                assert {"startupProbe", "readinessProbe", "livenessProbe"} <= server.keys(), component
