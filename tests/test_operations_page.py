"""docs/operations.md names values, settings and metrics that exist, and its helm commands run."""

import inspect
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import COMPONENTS, ROOT, SETTINGS
from helm_chart import CHART, run_helm

from specpool.client import Client

PAGE = (ROOT / "docs/operations.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", PAGE))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
METRICS = set(re.findall(r"^\| `specpool:(\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
COMMANDS = re.findall(r"^    (helm (?:lint|template|upgrade) .*)$", PAGE, re.MULTILINE)


def has_value(path: str) -> bool:
    """Whether the chart has a value of this name, with its parents' names before it."""
    found: Any = VALUES
    for name in path.split("."):
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    return True


def known_words() -> set[str]:
    """Metrics, settings of any process, a label, a field of requests, and parameters of a client."""
    settings = {key for component in COMPONENTS for key in _settings(f"specpool-{component}").model_fields}
    return METRICS | settings | {"grpc_code", "max_tokens"} | {*inspect.signature(Client).parameters}


def _settings(command: str) -> Any:
    module, name = SETTINGS[command]
    return getattr(import_module(module), name)


def test_values_exist() -> None:
    paths = {code.partition(":")[0] for code in CODE if code.split(".")[0].split(":")[0] in VALUES}
    assert paths
    assert [path for path in paths if not has_value(path)] == []


def test_settings_and_metrics_exist() -> None:
    assert {name for code in CODE for name in re.findall(r"specpool:(\w+)", code)} <= METRICS
    words = {code for code in CODE if re.fullmatch(r"[a-z]+(_[a-z]+)+", code)}
    assert words
    assert words - known_words() == set()


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if re.match("helm (lint|template|upgrade)", command)]
)
def test_helm_takes_the_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(CHART / "examples/production.yaml", tmp_path / "values.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    _, *arguments = shlex.split(command.partition(" | ")[0])
    if arguments[0] == "upgrade":  # without a cluster
        arguments = ["install", *(word for word in arguments[1:] if word != "--install"), "--dry-run=client"]
    done = run_helm(*arguments)
    assert done.returncode == 0, done.stderr
    assert ("helm.sh/hook" in done.stdout) == (arguments[0] == "install")
