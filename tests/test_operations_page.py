"""docs/operations.md names only existing values, settings and metrics."""

import inspect
import re
from typing import Any

import yaml
from deployment import COMPONENTS, ROOT, settings_class
from helm_chart import CHART

from specpool.client import Client

PAGE = (ROOT / "docs/operations.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", PAGE))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
METRICS = set(re.findall(r"^\| `specpool:(\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))


def has_value(path: str) -> bool:
    """Return whether the chart has the value at this dotted path."""
    value: Any = VALUES
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    return True


def test_values_settings_and_metrics_exist() -> None:
    paths = {code.partition(":")[0] for code in CODE if code.split(".")[0].split(":")[0] in VALUES}
    assert paths
    assert [path for path in paths if not has_value(path)] == []
    assert {name for code in CODE for name in re.findall(r"specpool:(\w+)", code)} <= METRICS
    settings = {key for component in COMPONENTS for key in settings_class(f"specpool-{component}").model_fields}
    known = METRICS | settings | {*inspect.signature(Client).parameters, "grpc_code", "max_tokens"}
    assert {code for code in CODE if re.fullmatch(r"[a-z]+(_[a-z]+)+", code)} <= known
