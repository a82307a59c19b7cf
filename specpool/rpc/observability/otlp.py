"""OTLP export for traces and metrics: endpoints, resources, shutdown, and OpenTelemetry's log lines."""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator

from specpool.environment.extras import explain_missing
from specpool.environment.process import package_version

_SCHEMES = ("http", "https", "grpc")
FLUSH_SECONDS = 2.0
"""Maximum time to export the last spans or metrics at shutdown."""
LOG_SECONDS = 60.0
# Loggers that report an unreachable collector.
_EXPORT_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
# Loggers that report invalid variables and other non-fatal errors.
_ERROR_LOGGERS = (
    *_EXPORT_LOGGERS,
    "opentelemetry.context",
    "opentelemetry.sdk.resources",
    "opentelemetry.sdk.trace.export",
)
_HEADERS_LOGGER = "opentelemetry.util.re"
# Loggers that quote long texts or invalid headers of callers.
_REQUEST_LOGGERS = (
    "opentelemetry.attributes",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
)


def _check_endpoint(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        known = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # invalid port
        known = False
    if not known or endpoint.split() != [endpoint]:
        raise ValueError("must be a URL of a collector, such as http://localhost:4317")
    if parts.path.strip("/") or parts.query or parts.fragment:  # probably OTLP over HTTP
        raise ValueError("must end with the port of a collector, since OTLP goes over gRPC: http://localhost:4317")
    if (problem := explain_missing("otel")) is not None:
        raise ValueError(problem)
    return endpoint


OtlpEndpoint: TypeAlias = Annotated[str, AfterValidator(_check_endpoint)]


@contextmanager
def refusing_variables(setting: str) -> Iterator[None]:
    """Context manager that raises OSError, naming the setting, if OpenTelemetry rejects its environment variables."""
    try:
        yield
    except Exception as error:  # the library has no error type for this
        variables = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
        raise OSError(f"{setting}: OpenTelemetry rejects its environment variables ({variables}): {error}") from None


async def flush(provider: Any, exporter: Any) -> None:
    """Export pending data and shut down a provider, within `FLUSH_SECONDS`."""
    await asyncio.to_thread(_flush, provider, exporter)


def _flush(provider: Any, exporter: Any) -> None:
    # In a daemon thread, because the library waits half a minute for a hanging collector.
    flushing = threading.Thread(target=provider.shutdown, name="last export", daemon=True)
    flushing.start()
    flushing.join(FLUSH_SECONDS)
    if flushing.is_alive():
        exporter.shutdown()


def resource_of(service: str) -> Any:
    """Return the resource of a process: its service name, version, host and id."""
    from opentelemetry.sdk.resources import Resource

    detected = Resource.create({"service.version": package_version()})
    named = not str(detected.attributes.get("service.name", "")).startswith("unknown_service")
    defaults: dict[str, str | int] = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    return Resource(defaults).merge(detected if named else detected.merge(Resource({"service.name": service})))


class _OnceAMinute(logging.Filter):
    """Passes one error per minute, and nothing less severe: the library reports each failed export many times."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at = -LOG_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR and "dropping" not in record.msg:
            return False
        if time.monotonic() < self._passed_at + LOG_SECONDS:
            return False
        self._passed_at = time.monotonic()
        return True


def _in_one_line(record: logging.LogRecord) -> bool:
    """Log handled errors of the library in one line, without a traceback."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg = f"{record.getMessage()}: {record.exc_info[1]!r}"
        record.args, record.exc_info = (), None
    return True


def _without_headers(record: logging.LogRecord) -> bool:
    """Name the variable instead of quoting it, because it may hold a password."""
    record.args = ("OTEL_EXPORTER_OTLP_HEADERS",)
    return True


_ONCE_A_MINUTE = {name: _OnceAMinute() for name in _EXPORT_LOGGERS}


def configure_library_logs() -> None:
    for name in _ERROR_LOGGERS:
        logging.getLogger(name).addFilter(_in_one_line)
    logging.getLogger(_HEADERS_LOGGER).addFilter(_without_headers)
    for name, once_a_minute in _ONCE_A_MINUTE.items():
        logging.getLogger(name).addFilter(once_a_minute)
    for name in _REQUEST_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
