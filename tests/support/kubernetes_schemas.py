"""Validates manifests against the schemas of Kubernetes and of the custom resources that the chart and examples use."""

import functools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import kubernetes_validate
import yaml
from helm_chart import Manifest, pod_templates

CUSTOM_RESOURCES = Path(__file__).parents[1] / "deploy/custom_resources.yaml"
SUPPORTED = [version for version in kubernetes_validate.utils.all_versions() if int(version.split(".")[1]) >= 30]
# Megabytes of definitions, read once per version instead of once per manifest.
_SCHEMAS = functools.cache(kubernetes_validate.utils.schema_contents)


@functools.cache
def custom_resources() -> dict[str, Any]:
    """Return a JSON Schema of every custom resource, by kind."""

    def closed(schema: Any) -> Any:
        """Reject properties that a schema does not list."""
        if isinstance(schema, list):
            return [closed(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        inner = {key: closed(value) for key, value in schema.items()}
        is_object = isinstance(schema.get("properties"), dict) and "type" not in schema
        return inner | ({"type": "object", "additionalProperties": False} if is_object else {})

    kinds = yaml.safe_load(CUSTOM_RESOURCES.read_text())
    labels = kinds.pop("definitions")["labels"]
    metadata = {"properties": {"name": {"type": "string"}, "labels": labels}, "required": ["name", "labels"]}
    return {
        kind: closed({"properties": {"apiVersion": {"const": resource["apiVersion"]}, "kind": {"const": kind},
                                     "metadata": metadata, "spec": resource["spec"]}})
        for kind, resource in kinds.items()
    }  # fmt: skip


@functools.cache
def problem(manifest: str, version: str) -> str | None:
    """Return why Kubernetes of this version would reject a manifest, given as JSON."""
    loaded = json.loads(manifest)
    try:
        if (schema := custom_resources().get(loaded["kind"])) is not None:
            jsonschema.validate(loaded, schema)
        else:
            with mock.patch.object(kubernetes_validate.utils, "schema_contents", _SCHEMAS):
                kubernetes_validate.validate(loaded, version, strict=True)
    except jsonschema.ValidationError as error:
        return f"{loaded['kind']} {error.json_path}: {error.message}"
    return None


def problems(manifests: list[Manifest], version: str) -> list[str]:
    """Return why Kubernetes of this version would reject manifests, including pods inside custom resources."""
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}, "template": pod}
        for name, pod in pod_templates([item for item in manifests if item["kind"] in custom_resources()])
    ]
    messages = (problem(json.dumps(item, sort_keys=True), version) for item in (*manifests, *pods))
    return [message for message in messages if message is not None]
