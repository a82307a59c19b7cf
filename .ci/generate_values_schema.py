"""Write all settings into the chart's `values.schema.json`: `python .ci/generate_values_schema.py [FILE]`."""

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from coordinator.config.settings import CoordinatorSettings
from draft_worker.server import DraftWorkerSettings
from specpool.openai.settings import OpenAISettings
from specpool.rpc.config.help import name_of
from target_worker.server import TargetWorkerSettings

SCHEMA = Path(__file__).parents[1] / "deploy/helm/specpool/values.schema.json"
PROCESSES: dict[str, type[BaseModel]] = {
    "coordinator": CoordinatorSettings,
    "draft": DraftWorkerSettings,
    "target": TargetWorkerSettings,
    "http": OpenAISettings,
}
START = '    "coordinatorSettings": {'
"""First generated line. The generated definitions are the last ones in the file."""
KEPT = ("type", "enum", "const", "pattern", "minimum", "maximum", "exclusiveMinimum", "minLength", "maxLength")


def schema() -> str:
    """Return the file with the present settings."""
    by_hand = SCHEMA.read_text().partition(START)[0]
    definitions = (_definition(role, settings) for role, settings in PROCESSES.items())
    return by_hand + ",\n".join(definitions) + "\n  }\n}\n"


def _definition(role: str, settings: type[BaseModel]) -> str:
    """Return the definition of a role's settings, with one setting on each line."""
    described = settings.model_json_schema(by_alias=False)
    lines = []
    for name, field in settings.model_fields.items():
        value = _value(described["properties"][name], described.get("$defs", {}))
        setting = json.dumps(value | {"description": field.description or ""})
        lines.append(f'        "{name_of(name, field)}": {setting}')
    return "\n".join([
        f'    "{role}Settings": {{',
        '      "type": "object",',
        '      "description": "Settings of the process; separate several values with commas.",',
        '      "additionalProperties": false,',
        '      "properties": {',
        ",\n".join(lines),
        "      }",
        "    }",
    ])  # fmt: skip


def _value(property_: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a setting as the chart takes it: a string, number or boolean."""
    if reference := property_.get("$ref"):
        return _value(definitions[reference.rpartition("/")[2]], definitions)
    options = [option for option in property_.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        return _value(options[0], definitions)
    if options:  # only sizes have two types: 1024 and "1KiB"
        return {"$ref": "#/$defs/size"}
    if property_.get("type") == "array":  # one item, or several in a string
        return {"type": list(dict.fromkeys(["string", property_["items"]["type"]]))}
    return {key: property_[key] for key in KEPT if key in property_}


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else SCHEMA).write_text(schema())
