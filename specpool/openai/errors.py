"""Errors in OpenAI's format, and the table that maps gRPC status codes to HTTP statuses."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import StatusCode
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specpool.rpc.status import ANSWERED, details_of

INVALID, MODEL_NOT_FOUND, UNKNOWN_PARAMETER = "invalid_request_error", "model_not_found", "unknown_parameter"
UNSUPPORTED_PARAMETER = "unsupported_parameter"
RETRY_SECONDS = 1.0
"""Retry delay to suggest if the coordinator suggests none."""

# HTTP status, type and code by status code.
_STATUSES: dict[StatusCode, tuple[int, str, str | None]] = {
    StatusCode.INVALID_ARGUMENT: (400, INVALID, "invalid_value"),
    StatusCode.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    StatusCode.PERMISSION_DENIED: (403, "permission_error", None),
    StatusCode.NOT_FOUND: (404, "not_found_error", None),
    StatusCode.ALREADY_EXISTS: (409, "conflict_error", None),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    StatusCode.UNIMPLEMENTED: (501, INVALID, "unsupported"),
    StatusCode.UNAVAILABLE: (503, "server_error", "unavailable"),
    StatusCode.CANCELLED: (503, "server_error", "unavailable"),
    StatusCode.DEADLINE_EXCEEDED: (504, "server_error", "timeout"),
}
_FAULT = (500, "server_error", None)
_RETRYABLE = (429, 503)

# Fields of the gRPC API that have other names in OpenAI's. `names` adds those of a request.
_PARTS = ("sampling_params.", "chat.")
_NAMES = {
    "text": "prompt",
    "tokenized.input_ids": "prompt",
    "speculative.prediction": "prediction",
    "speculative.prediction.text": "prediction.content",
}

# Union members that pydantic adds to paths. Others, such as "list[str]", cannot be field names.
_UNION_MEMBERS = {"str", "bool", "int"}


@dataclass
class ApiError(Exception):
    """A refused request."""

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    retry_seconds: float | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def all_headers(self) -> dict[str, str]:
        if self.retry_seconds is None:
            return self.headers
        return {**self.headers, "retry-after": str(max(1, math.ceil(self.retry_seconds)))}


def invalid(param: str | None, reason: str, code: str | None = "invalid_value") -> ApiError:
    """Return the error of an invalid field."""
    return ApiError(400, f"{param}: {reason}" if param else reason, param=param, code=code)


def unknown_model(model: str, served: str) -> ApiError:
    message = f"model: {model!r} does not exist; this server has {served!r}"
    return ApiError(404, message, "not_found_error", "model", MODEL_NOT_FOUND)


def too_large(reason: str) -> ApiError:
    return ApiError(413, reason, code="body_too_large")


def unavailable(reason: str) -> ApiError:
    return ApiError(503, reason, "server_error", code="unavailable", retry_seconds=RETRY_SECONDS)


def explain(error: ValidationError) -> ApiError:
    """Convert a validation error. It names the path of the first invalid field."""
    problems = error.errors(include_url=False, include_input=False)
    unknown = (each for each in problems if each["type"] == "extra_forbidden")
    problem = next(unknown, max(problems, key=lambda each: len(each["loc"])))  # the deepest union member
    param = _path(problem)
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code=UNKNOWN_PARAMETER)
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return invalid(param, "required", "missing_required_parameter")
    if problem["type"] == "model_type":
        reason = "must be an object"
    code = "invalid_type" if problem["type"].endswith("_type") else "invalid_value"
    return invalid(param, reason[:1].lower() + reason[1:], code)


def api_error(error: Any, names: Mapping[str, str] | None = None) -> ApiError:
    """Convert a `grpc.RpcError`. `names`: see `Work.names`."""
    status, kind, code = _STATUSES.get(error.code(), _FAULT)
    details, message, param = details_of(error), error.details() or "", None
    if details.field:
        param = _param(details.field, names or {})
        message = f"{param}: {details.rule}"
    elif status == 401:
        message = message.replace("authorization:", "Authorization:", 1)
    elif ANSWERED not in [*(error.trailing_metadata() or ())]:  # gRPC's own messages name internal addresses
        if error.code() == StatusCode.RESOURCE_EXHAUSTED:
            return too_large("the request is larger than the coordinator's limit")
        if error.code() == StatusCode.UNAVAILABLE:
            message = "no coordinator can be reached"
    retry = (details.retry_seconds or RETRY_SECONDS) if status in _RETRYABLE else None
    return ApiError(status, message, kind, param, code, retry)


def is_refused(error: grpc.RpcError) -> bool:
    """Return whether another coordinator may answer: this one is down, draining or without a target."""
    return bool(error.code() == StatusCode.UNAVAILABLE)


def _param(field_: str, names: Mapping[str, str]) -> str:
    for part in _PARTS:
        field_ = field_.removeprefix(part)
    known = {**_NAMES, **names}
    for name in sorted(known, key=len, reverse=True):
        if field_ == name or field_.startswith((f"{name}.", f"{name}[")):
            return known[name] + field_[len(name) :]
    return field_


def _path(problem: ErrorDetails) -> str:
    """Return the path of a field, such as `messages[0].content`."""
    path = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.replace("_", "").isalnum() and part not in _UNION_MEMBERS:
            path += f".{part}" if path else part
    return path
