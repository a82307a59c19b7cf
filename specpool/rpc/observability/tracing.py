"""OpenTelemetry traces, exported to an OTLP collector. Imports OpenTelemetry only on demand.

A process without traces has no `Tracer`. A round serves many requests, so there is no current span and parents are
explicit. Attribute names follow OpenTelemetry's semantic conventions where they exist.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field

from specpool.environment.process import package_version
from specpool.rpc.observability.otlp import OtlpEndpoint, configure_library_logs, flush, refusing_variables, resource_of
from specpool.rpc.status import error_type

Kind: TypeAlias = Literal["internal", "server", "client"]
Attributes: TypeAlias = Mapping[str, str | bool | int | float | list[str]]

_PARENT_HEADERS = ("traceparent", "tracestate")
_SAMPLED = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]")


class TraceSettings(BaseModel, frozen=True):
    """Where traces go, and how many."""

    otlp_traces_endpoint: OtlpEndpoint | None = Field(
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
        configure_library_logs()
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_rate)), resource=resource_of(service), shutdown_on_exit=False
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
        await flush(self._provider, self._exporter)


def tracer_of(settings: TraceSettings, service: str) -> Tracer | None:
    """The tracer of a process; None without traces. Raises OSError if OpenTelemetry rejects its variables."""
    if settings.otlp_traces_endpoint is None:
        return None
    with refusing_variables("otlp_traces_endpoint"):
        return Tracer(service, settings.otlp_traces_endpoint, settings.trace_sample_rate)
