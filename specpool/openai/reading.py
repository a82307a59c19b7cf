"""Read requests: size and time limits, JSON, and the caller's credentials."""

import asyncio
import json
import re
from collections import Counter
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request

from specpool.openai.bodies import GenerationBody, explain
from specpool.openai.coordinators import Metadata
from specpool.openai.errors import INVALID, ApiError, too_large
from specpool.rpc.security.tokens import HEADER

B = TypeVar("B", bound=GenerationBody)

# Headers to pass on to coordinators as metadata.
PASSED = (HEADER, "traceparent", "tracestate")
JSON_TYPE = "application/json"
SHORT_BYTES = 64 * 2**10
"""Maximum size of a body that is read before the caller is authenticated."""
_PLAIN = re.compile(r"[\x20-\x7e]{1,4096}")


def check_type(request: Request) -> None:
    """Raise ApiError unless the body is JSON. Pages of other sites cannot send that type without CORS."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
        raise ApiError(415, f"content-type: must be {JSON_TYPE}", code="unsupported_media_type")


def is_short(request: Request) -> bool:
    """Return whether Content-Length announces at most `SHORT_BYTES`."""
    length = request.headers.get("content-length", "")
    is_announced = length.isdecimal() and "transfer-encoding" not in request.headers
    return is_announced and int(length) <= SHORT_BYTES


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return the body. Raises ApiError if it is too large or too slow, and ClientDisconnect."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large(f"the body has more than {max_bytes} bytes (--max-body-bytes)")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise too_large(f"the body has more than {max_bytes} bytes (--max-body-bytes)")
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s (--receive-seconds)"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    return bytes(body)


def parse(kind: type[B], body: bytes) -> B:
    """Parse a body. Raises ApiError."""
    try:
        values = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
        if b"\\u" in body:  # may be a lone surrogate, which UTF-8 cannot encode
            json.dumps(values, ensure_ascii=False).encode()
    except RecursionError:
        raise _malformed("is nested too deeply") from None
    except ValueError as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError | _InvalidJsonError) else "is not UTF-8 text"
        raise _malformed(f"is not JSON: {reason}") from None
    if not isinstance(values, dict):
        raise _malformed("must be a JSON object")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise explain(error) from None


def metadata_of(request: Request) -> Metadata:
    """Return the metadata for gRPC calls: the caller's token and trace context. Raises ApiError."""
    metadata = [(name, value) for name in PASSED for value in request.headers.getlist(name)]
    if any(name == HEADER and not _PLAIN.fullmatch(value) for name, value in metadata):
        message = "Authorization: must be Bearer and an ASCII token"
        raise ApiError(401, message, "authentication_error", code="invalid_api_key")
    return [(name, value) for name, value in metadata if _PLAIN.fullmatch(value)]


class _InvalidJsonError(ValueError):
    """JSON that Python accepts but this server refuses."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise _InvalidJsonError(f"an object has the key {key[:40]!r} twice")
    return values


def _refuse_constant(name: str) -> None:
    raise _InvalidJsonError(f"{name} is not allowed")


def _malformed(reason: str) -> ApiError:
    return ApiError(400, f"the body {reason}", INVALID, code="invalid_json")
