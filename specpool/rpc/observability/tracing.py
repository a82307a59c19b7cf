"""OpenTelemetry traces, exported to an OTLP collector. Only this module imports OpenTelemetry, and only on demand.

A process without traces has no `Tracer`. A round serves many requests, so there is no current span and parents are
explicit. Attribute names follow OpenTelemetry's semantic conventions where they exist.
"""

import asyncio
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field

from specpool.environment.extras import explain_missing
from specpool.environment.process import package_version
from specpool.rpc.status import error_type

_SCHEMES = ("http", "https", "grpc")

Kind: TypeAlias = Literal["internal", "server", "client"]
Attributes: TypeAlias = Mapping[str, str | bool | int | float | list[str]]

FLUSH_SECONDS = 2.0
"""Maximum time to export the last spans at shutdown."""
LOG_SECONDS = 60.0
_PARENT_HEADERS = ("traceparent", "tracestate")
_SAMPLED = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]")
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
        1.0, ge=0, le=1, description="share of requests to trace; the trace context of a caller takes precedence"
    )


class Span:
    """A recording span. The caller that begins it must end it."""

    def __init__(self, tracer: "Tracer", span: Any) -> None:
        """`span`: OpenTelemetry's own."""
        self._tracer, self._span = tracer, span
        self.context = span.get_span_context()

    @property
    def trace_id(self) -> str:
        """Id of the trace, in hexadecimal digits."""
        return f"{self.context.trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The W3C header that makes a remote span a child of this one."""
        return f"00-{self.trace_id}-{self.context.span_id:016x}-01"

    def child(
        self, name: str, kind: Kind = "internal", began_ns: int | None = None, links: Iterable["Span"] = ()
    ) -> "Span":
        """Begin a child span. `began_ns`: nanoseconds since the epoch; None: now. `links`: related spans."""
        api, tracer = self._tracer.api, self._tracer.sdk_tracer
        context, linked = api.set_span_in_context(self._span), [api.Link(span.context) for span in links]
        child = tracer.start_span(name, context, api.SpanKind[kind.upper()], links=linked, start_time=began_ns)
        return Span(self._tracer, child)

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def failed(self, error: BaseException) -> None:
        """Record an error without its message, which may quote a client."""
        name, is_fault = error_type(error)
        self._span.set_attribute("error.type", name)
        if is_fault:
            self._span.set_status(self._tracer.error_status)

    def end(self, ended_ns: int | None = None) -> None:
        """End the span. `ended_ns`: nanoseconds since the epoch; None: now."""
        self._span.end(ended_ns)

    @contextmanager
    def ending(self) -> Iterator["Span"]:
        """Context manager that ends the span and records an exception."""
        try:
            yield self
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.end()


class Tracer:
    """Begins the spans of a process, and exports finished ones in the background.

    Spans are lost if the collector is slow or unreachable; nothing else happens.
    """

    def __init__(self, service: str, endpoint: str, sample_rate: float) -> None:
        """`service`: name of the process, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES sets another.
        `sample_rate`: share of requests to trace, among those without a trace context.

        OpenTelemetry raises errors of any type for invalid variables."""
        _configure_library_logs()
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_rate)), resource=_resource(service), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.sdk_tracer = self._provider.get_tracer("specpool", package_version())
        self.api, self._propagator = trace, TraceContextTextMapPropagator()
        self.error_status = trace.Status(trace.StatusCode.ERROR)

    def request(self, name: str, metadata: Iterable[tuple[str, Any]], began_ns: int) -> Span | None:
        """Begin the span of a request, in the trace of its caller if the metadata has one. None if not sampled."""
        headers = {key: value for key, value in metadata if key in _PARENT_HEADERS and isinstance(value, str)}
        return self._begin_server_span(name, headers, began_ns)

    def round(self, name: str, traceparent: str) -> Span | None:
        """Begin the span of a worker's part in a round. None if the caller does not trace the round."""
        if not _SAMPLED.fullmatch(traceparent):
            return None
        return self._begin_server_span(name, {"traceparent": traceparent}, None)

    def _begin_server_span(self, name: str, headers: dict[str, str], began_ns: int | None) -> Span | None:
        parent = self._propagator.extract(headers)
        span = self.sdk_tracer.start_span(name, parent, self.api.SpanKind.SERVER, start_time=began_ns)
        return Span(self, span) if span.is_recording() else None

    async def close(self) -> None:
        """Export the last spans, within `FLUSH_SECONDS`."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        # In a daemon thread, because the library waits half a minute for a hanging collector.
        flushing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            self._exporter.shutdown()


def tracer_of(settings: TraceSettings, service: str) -> Tracer | None:
    """The tracer of a process; None without traces. Raises OSError if OpenTelemetry rejects its variables."""
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        return Tracer(service, settings.otlp_traces_endpoint, settings.trace_sample_rate)
    except Exception as error:  # the library has no error type for this
        variables = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
        raise OSError(f"otlp_traces_endpoint: OpenTelemetry refuses its variables ({variables}): {error}") from None


def _resource(service: str) -> Any:
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


def _configure_library_logs() -> None:
    for name in _ERROR_LOGGERS:
        logging.getLogger(name).addFilter(_in_one_line)
    logging.getLogger(_HEADERS_LOGGER).addFilter(_without_headers)
    for name, once_a_minute in _ONCE_A_MINUTE.items():
        logging.getLogger(name).addFilter(once_a_minute)
    for name in _REQUEST_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
