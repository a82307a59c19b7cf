"""Trace settings."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field

from specpool.environment.extras import explain_missing

_SCHEMES = ("http", "https", "grpc")


def _check_endpoint(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # invalid port
        known = False
    if not known or endpoint.split() != [endpoint]:
        raise ValueError("must be a URL of a collector, such as http://localhost:4317")
    if parts.path.strip("/") or parts.query or parts.fragment:  # probably OTLP over HTTP
        raise ValueError("must end with the port of a collector, since traces go over gRPC: http://localhost:4317")
    if (problem := explain_missing("otel")) is not None:
        raise ValueError(problem)
    return endpoint


class TraceSettings(BaseModel, frozen=True):
    """Where traces go, and how many."""

    otlp_traces_endpoint: Annotated[str, AfterValidator(_check_endpoint)] | None = Field(
        None,
        description="send traces to this OTLP collector over gRPC: http://HOST:4317, or https:// for TLS; "
        "default: no traces",
    )
    trace_sample_rate: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests to trace; the trace context of a caller takes precedence",
    )
