"""Values of the Helm chart: what they set, and which ones are refused."""

import json
import re

import jsonschema
import pytest
import yaml
from deployment import COMPONENTS, DEPLOY
from helm_chart import (
    CHART,
    DEFAULTS,
    EXAMPLES,
    of_kind,
    pod_template,
    refusal,
    render,
    template,
    values_of,
)
from pod_settings import pod_environment, pod_settings

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


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
        ("coordinator.preStopSeconds=null", "missing property 'preStopSeconds'"),
        ("tls.certManager.enabled=true", "tls.certManager.enabled: needs tls.enabled"),
        ("metrics.compat=vllm", "metrics.compat: needs metrics.enabled"),
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
        ("tls.certManager.duration=90 days", "at '/tls/certManager/duration': '90 days' does not match"),
        ("metrics.enabled=true,metrics.port=50051", "at '/metrics/port': 'not' failed"),
        ("metrics.podMonitor.enabled=true", "metrics.podMonitor.enabled: needs metrics.enabled"),
        ("metrics.dashboard.enabled=true", "metrics.dashboard.enabled: needs metrics.enabled"),
        ("metrics.annotations=true", "metrics.annotations: needs metrics.enabled"),
        ("tracing.endpoint=collector:4317", "at '/tracing/endpoint': 'collector:4317' does not match"),
        ("tracing.endpoint=http://collector:4318/v1/traces", "at '/tracing/endpoint'"),
        ("tracing.prompts=true", "tracing.prompts: needs tracing.endpoint"),
        ("target.model=null", "at '/target': missing property 'model'"),
        ("cells=null", "missing property 'cells'"),
        ("coordinator=null", "missing property 'coordinator'"),
        ("target.resources.limits.memory=32GB", "at '/target/resources/limits/memory': '32GB' does not match"),
        ("target.modelCache.size=big", "at '/target/modelCache/size': 'big' does not match"),
        ("coordinator.podDisruptionBudget.maxUnavailable=few", "at '/coordinator/podDisruptionBudget/maxUnavailable'"),
        ("nameOverride=Spec Pool", "at '/nameOverride': 'Spec Pool' does not match"),
        ("commonLabels.app\\.kubernetes\\.io/name=x", "invalid propertyName 'app.kubernetes.io/name'"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(values: str, said: str) -> None:
    assert said in refusal("--set", values)


def test_old_clusters_are_refused() -> None:
    assert "incompatible" in refusal("--kube-version", "1.29.0")
    assert "needs Kubernetes 1.33" in refusal(*values_of("mixed-gpus"), "--kube-version", "1.32.0")


def test_any_setting_can_be_given() -> None:
    manifests = template(
        "--set", "coordinator.settings.queue_tokens=5000000,coordinator.settings.prefix_caching=false",
        "--set-json", 'target={"settings": {"kv_memory": "8GiB"}, "extraArgs": ["--max-sequences", "8"]}',
    )  # fmt: skip
    coordinator, target = (pod_settings(manifests, name) for name in ("coordinator", "target-worker"))
    assert (coordinator.queue_tokens, coordinator.prefix_caching) == (5_000_000, False)
    assert (target.kv_memory, target.max_sequences) == (8 * 2**30, 8)


def test_changed_settings_restart_the_pods_that_they_concern_and_reach_no_others() -> None:
    changed = template("--set", "target.settings.max_sequences=8")
    before = {name: pod_template(render(DEFAULTS), name) for name in COMPONENTS}
    assert {name for name in COMPONENTS if pod_template(changed, name) != before[name]} == {"target-worker"}
    # What pods of an earlier version would read at their next restart.
    assert [item for item in changed if item["kind"] == "ConfigMap"] == []


def test_settings_are_passed_on_as_they_are() -> None:
    manifests = template("--set-json", 'target={"settings": {"model_alias": "$(HOME) $$ \\"x\\""}}')
    assert pod_environment(manifests, "target-worker")["SPECPOOL_MODEL_ALIAS"] == '$(HOME) $$ "x"'


def test_coordinator_without_draft_workers() -> None:
    manifests = template("--set", "draft.enabled=false")
    assert pod_settings(manifests, "coordinator").draft_address is None
    assert not [item for item in manifests if "draft" in item["metadata"]["name"]]


def test_models_stay_when_a_cell_is_removed() -> None:
    spec = of_kind(render("two-gpus"), "StatefulSet")["specpool-target-worker"]["spec"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    [claim] = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "80Gi"
