"""Constraints of requests, and answers as pydantic objects. Does not import pydantic."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

from specpool.v1 import generation_pb2 as pb


class PydanticModel(Protocol):
    """The methods of a pydantic model that this module uses."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...
    @classmethod
    def model_validate_json(cls, json_data: str) -> Self: ...


Model = TypeVar("Model", bound=PydanticModel)
JsonSchema = Mapping[str, Any] | str | bool | type[PydanticModel]
"""A schema as a dict or as JSON text, or the class of a pydantic model."""

# Schema keywords whose values are not schemas, and keywords that map names to schemas.
VALUES, NAMED = {"const", "default", "enum", "examples"}, {"properties", "$defs"}
CONSTRAINTS = tuple(field.name for field in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields)


def parsed(response: pb.GenerateResponse, model: type[Model]) -> Model:
    """Return an answer as an instance of the pydantic model given as `json_schema`.

    ValueError, such as pydantic's ValidationError, if the answer is incomplete or invalid.
    """
    if response.finish_reason != "stop":
        tokens = f"{response.usage.completion_tokens} tokens"
        raise ValueError(f"the answer is incomplete: it ended after {tokens} with reason {response.finish_reason!r}")
    return model.model_validate_json(response.text)


def check_model(model: object, options: Mapping[str, object]) -> None:
    """Raise TypeError unless `model` is the class of a pydantic model, and ValueError for options that add text."""
    if not _is_model(model):
        raise TypeError(f"model: must be a pydantic model class, not {reprlib.repr(model)}")
    if options.get("constraint_after_reasoning"):
        raise ValueError("constraint_after_reasoning: the text would include the reasoning; use generate")


def read_constraint(given: dict[str, Any]) -> None:
    """Convert the constraint in these options to a protobuf field. TypeError and ValueError name the option."""
    names = [name for name in CONSTRAINTS if name in given]
    if len(names) > 1:
        raise ValueError(f"{names[0]}: cannot be combined with {', '.join(names[1:])}")
    if "choice" in given:
        given["choice"] = _choice(given["choice"])
    for name in ("json_schema", "structural_tag"):
        if name in given:
            given[name] = _json_text(name, given[name])


def _choice(choices: object) -> pb.ChoiceConstraint:
    if isinstance(choices, str):
        choices = [choices]
    if isinstance(choices, bytes) or not isinstance(choices, Sequence):
        raise TypeError(f"choice: must be a list of texts, not {type(choices).__name__}")
    for index, text in enumerate(choices):
        if not isinstance(text, str):
            raise TypeError(f"choice[{index}]: must be a string, not {type(text).__name__}")
    try:
        return pb.ChoiceConstraint(choices=choices)
    except ValueError as error:
        raise ValueError(f"choice: {error}") from None


def _is_model(value: object) -> bool:
    methods = ("model_json_schema", "model_validate_json")
    return isinstance(value, type) and all(hasattr(value, method) for method in methods)


def _closed(schema: Any) -> Any:
    """Forbid undeclared properties, which pydantic would ignore, unless the schema allows them."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {}
    for key, value in schema.items():
        if key in NAMED:
            closed[key] = {name: _closed(each) for name, each in value.items()}
        else:
            closed[key] = value if key in VALUES else _closed(value)
    return {"additionalProperties": False, **closed} if "properties" in closed else closed


def _json_text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if _is_model(value):
        value = _closed(value.model_json_schema())
    elif not isinstance(value, Mapping | bool):
        raise TypeError(f"{name}: must be a dict, JSON text or a pydantic model class, not {reprlib.repr(value)}")
    try:
        return json.dumps(value, default=_as_dict, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _as_dict(value: object) -> dict[Any, Any]:
    """Convert a mapping that `json` does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
