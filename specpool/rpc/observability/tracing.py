"""Traces by OpenTelemetry, sent to an OTLP collector. Only this module imports OpenTelemetry, and only when asked.

A process without traces has no `Tracer`. Spans have explicit parents, since a round serves many requests at a
time, so there is no current span. Attributes are named by OpenTelemetry's semantic conventions where they have a name.
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
from typing import Any, Literal, TypeAlias

from specpool.rpc.observability.trace_settings import TraceSettings
from specpool.rpc.status import error_type
from specpool.rpc.version import package_version

Kind: TypeAlias = Literal["internal", "server", "client"]
Attributes: TypeAlias = Mapping[str, str | bool | int | float | list[str]]

FLUSH_SECONDS = 2.0
"""Time that the last spans have to reach the collector when the process ends."""
LOG_SECONDS = 60.0
_PARENT_HEADERS = ("traceparent", "tracestate")
_SAMPLED = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]")


class Span:
    """A recorded span; the code that begins it also ends it."""

    def __init__(self, tracer: "Tracer", span: Any) -> None:
        self._tracer, self.recorded = tracer, span
        """OpenTelemetry's own span."""

    @property
    def trace_id(self) -> str:
        """Id of its trace, in hexadecimal digits."""
        return f"{self.recorded.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The W3C header that makes a span elsewhere its child."""
        context = self.recorded.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def child(
        self, name: str, kind: Kind = "internal", began_ns: int | None = None, links: Iterable["Span"] = ()
    ) -> "Span":
        """Begins a child span. `began_ns`: nanoseconds since the epoch; None: now. `links`: other spans that the
        child belongs to."""
        return self._tracer.child_of(self, name, kind, began_ns, links)

    def note(self, attributes: Attributes) -> None:
        """Adds attributes."""
        self.recorded.set_attributes(attributes)

    def failed(self, error: BaseException) -> None:
        """Notes the error in which the span ended, without its message, which may quote a client."""
        name, is_fault = error_type(error)
        self.recorded.set_attribute("error.type", name)
        if is_fault:
            self.recorded.set_status(self._tracer.error_status)

    def end(self, ended_ns: int | None = None) -> None:
        """Ends the span. `ended_ns`: nanoseconds since the epoch; None: now."""
        self.recorded.end(ended_ns)

    @contextmanager
    def ending(self) -> Iterator["Span"]:
        """A context that ends the span when it ends, with the error of the context if there is one."""
        try:
            yield self
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            self.end()


class Tracer:
    """Begins the spans of a process, and sends those that have ended to the collector in the background.

    If the collector does not keep up or cannot be reached, spans are lost, and nothing else happens.
    """

    def __init__(self, service: str, endpoint: str, sample_rate: float) -> None:
        """`service`: the name of the process, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another.
        `sample_rate`: share of the requests that are traced, of those whose caller brings no trace.

        Any error of OpenTelemetry's if it does not understand its own variables."""
        for name in _ERROR_LOGGERS:
            logging.getLogger(name).addFilter(_in_one_line)
        logging.getLogger(_HEADERS_LOGGER).addFilter(_without_headers)
        for name, once_in_a_while in _EXPORT_LOGGERS.items():
            logging.getLogger(name).addFilter(once_in_a_while)
        for name in _REQUEST_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
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
        self._tracer = self._provider.get_tracer("specpool", package_version())
        self._api, self._propagator = trace, TraceContextTextMapPropagator()
        self._kinds = {
            "internal": trace.SpanKind.INTERNAL,
            "server": trace.SpanKind.SERVER,
            "client": trace.SpanKind.CLIENT,
        }
        self.error_status = trace.Status(trace.StatusCode.ERROR)

    def request(self, name: str, metadata: Iterable[tuple[str, Any]], began_ns: int) -> Span | None:
        """Begins the span of a request, as a part of its caller's trace if the call's metadata names one. None if it is
        not sampled."""
        headers = {key: value for key, value in metadata if key in _PARENT_HEADERS and isinstance(value, str)}
        return self._serving(name, headers, began_ns)

    def round(self, name: str, traceparent: str) -> Span | None:
        """Begins the span of a call that is part of a round. None if the caller's `traceparent` does not say that the
        round is traced."""
        if not _SAMPLED.fullmatch(traceparent):
            return None
        return self._serving(name, {"traceparent": traceparent}, None)

    def _serving(self, name: str, headers: dict[str, str], began_ns: int | None) -> Span | None:
        parent = self._propagator.extract(headers)
        span = self._tracer.start_span(name, parent, self._kinds["server"], start_time=began_ns)
        return Span(self, span) if span.is_recording() else None

    def child_of(self, parent: Span, name: str, kind: Kind, began_ns: int | None, links: Iterable[Span]) -> Span:
        """See `Span.child`."""
        context = self._api.set_span_in_context(parent.recorded)
        linked = [self._api.Link(span.recorded.get_span_context()) for span in links]
        span = self._tracer.start_span(name, context, self._kinds[kind], links=linked, start_time=began_ns)
        return Span(self, span)

    async def close(self) -> None:
        """Sends the last spans, for a few seconds at most."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        # In a daemon thread, which need not be awaited: the library gives a hanging collector half a minute.
        flushing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            self._exporter.shutdown()


def tracer_of(settings: TraceSettings, service: str) -> Tracer | None:
    """The tracer of a process; None if its settings ask for no traces.

    OSError if OpenTelemetry refuses the values of its own variables.
    """
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        return Tracer(service, settings.otlp_traces_endpoint, settings.trace_sample_rate)
    except Exception as error:  # of whatever type: the library has none of its own for this
        variables = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
        raise OSError(f"otlp_traces_endpoint: OpenTelemetry refuses its variables ({variables}): {error}") from None


def _resource(service: str) -> Any:
    from opentelemetry.sdk.resources import Resource

    found = Resource.create({"service.version": package_version()})
    named = not str(found.attributes.get("service.name", "")).startswith("unknown_service")
    defaults: dict[str, str | int] = {"host.name": socket.gethostname(), "process.pid": os.getpid()}
    return Resource(defaults).merge(found if named else found.merge(Resource({"service.name": service})))


class _OnceInAWhile(logging.Filter):
    """Lets an error pass once a minute, and nothing less severe: each failed export is reported many times."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at = -LOG_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.levelno < logging.ERROR and "dropping" not in record.msg:
            return False
        if time.monotonic() < self._passed_at + LOG_SECONDS:
            return False
        self._passed_at = time.monotonic()
        return True


def _in_one_line(record: logging.LogRecord) -> bool:
    """Puts an error that the library has survived behind its message, instead of the stack."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg = f"{record.getMessage()}: {record.exc_info[1]!r}"
        record.args, record.exc_info = (), None
    return True


def _without_headers(record: logging.LogRecord) -> bool:
    """Names the variable instead of quoting it: what is not a header may still be a password."""
    record.args = ("OTEL_EXPORTER_OTLP_HEADERS",)
    return True


_EXPORT_LOGGERS = {
    name: _OnceInAWhile()
    for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")
}
"""Loggers that report a collector that does not answer."""
_ERROR_LOGGERS = (
    *_EXPORT_LOGGERS,
    "opentelemetry.context",
    "opentelemetry.sdk.resources",
    "opentelemetry.sdk.trace.export",
)
"""Loggers that report wrong variables, and all else that need not end the process."""
_HEADERS_LOGGER = "opentelemetry.util.re"
_REQUEST_LOGGERS = (
    "opentelemetry.attributes",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
)
"""Loggers that warn of each request whose texts are cut, or whose headers cannot be read, in its caller's words."""
