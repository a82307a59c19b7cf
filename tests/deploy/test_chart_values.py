"""Values of the Helm chart: schema, documentation and rejected combinations."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from deployment import DEPLOY, ROOT, settings_class
from helm_chart import CHART, EXAMPLES, run_helm, template, values_of
from pod_settings import pod_settings

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
REFUSALS = yaml.safe_load((Path(__file__).parent / "refusals.yaml").read_text())


@pytest.mark.parametrize(("values", "message"), REFUSALS)
def test_bad_values_are_rejected_by_name(values: str, message: str) -> None:
    assert message in refusal("--set", values)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_template_knows_the_commit_of_the_default_model(role: str) -> None:
    model, revision = VALUES[role]["model"], VALUES[role]["revision"]
    assert f"{revision} is a commit of {model}" in refusal("--set", f"{role}.model=org/other")
    for given in (f"{role}.revision=" + "f" * 40, f"{role}.revision=", f"{role}.revision=null"):
        settings = pod_settings(template("--set", f"{role}.model=org/other,{given}"), f"{role}-worker")
        assert (settings.model, settings.revision) == ("org/other", "f" * 40 if given.endswith("f") else None)


def test_old_clusters_are_rejected() -> None:
    assert "incompatible" in refusal("--kube-version", "1.29.0")
    assert "needs Kubernetes 1.33" in refusal(*values_of("mixed-gpus"), "--kube-version", "1.32.0")


def refusal(*arguments: str) -> str:
    """Return helm's error message."""
    done = run_helm("template", "specpool", str(CHART), *arguments)
    assert done.returncode != 0
    return done.stderr


def test_schema_describes_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)

    def undescribed(part: dict[str, Any], path: str) -> list[str]:
        if reference := part.get("$ref", "").rpartition("/")[2]:
            part = {**schema["$defs"][reference], **part}
        own = [path] if path and "description" not in part and not path.startswith("resources") else []
        inner = (undescribed(value, f"{path}.{name}") for name, value in part.get("properties", {}).items())
        return [name for names in (own, *inner) for name in names if name.count(".") < 3]

    assert undescribed(schema, "") == []
    assert schema["properties"].keys() - {"global"} == VALUES.keys()


def test_the_schema_lists_the_settings_of_every_process(tmp_path: Path) -> None:
    written = tmp_path / "schema.json"
    subprocess.run([sys.executable, ".ci/generate_values_schema.py", written], cwd=ROOT, check=True)
    assert written.read_text() == (CHART / "values.schema.json").read_text(), "run `make values-schema`"
    definitions = json.loads(written.read_text())["$defs"]
    commands = {"coordinator": "coordinator", "draft": "draft-worker", "target": "target-worker", "http": "openai"}
    for role, command in commands.items():
        assert definitions[f"{role}Settings"]["properties"].keys() == settings_class(f"specpool-{command}").keys()


def test_pages_name_every_value_and_every_example() -> None:
    listed = re.findall(r"^\| (`.*?`) \|", (CHART / "README.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(listed))) == sorted(VALUES)
    page = (DEPLOY / "README.md").read_text()
    assert [example for example in EXAMPLES if f"| `{example}` |" not in page] == []
