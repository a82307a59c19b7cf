"""An OTLP collector of traces and metrics in this process, behind a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Received:
    """A span and the service that sent it."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    links: list[str]
    """Ids of linked spans."""
    is_fault: bool


class Collector(pb_grpc.TraceServiceServicer):
    """Records requests; while `open` is clear, it delays its answers."""

    def __init__(self) -> None:
        self.requests: list[pb.ExportTraceServiceRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.open = asyncio.Event()
        self.open.set()

    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> pb.ExportTraceServiceResponse:
        self.requests.append(request)
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        await self.open.wait()
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Received]:
        """Return all spans so far, ordered by start time."""
        return sorted((span for request in self.requests for span in _received(request)), key=lambda s: s.began_ns)

    def named(self, name: str, service: str = "") -> list[Received]:
        return [span for span in self.spans if span.name == name and span.service.endswith(service)]

    def children(self, parent: Received) -> list[Received]:
        return [span for span in self.spans if span.parent_id == parent.span_id]

    def everything(self) -> str:
        """Return all requests as text to search."""
        return "".join(map(str, self.requests))


@dataclass(frozen=True)
class Distribution:
    """One series of a histogram."""

    service: str
    unit: str
    count: int
    total: float
    bounds: list[float]
    attributes: dict[str, Any]


class MetricsCollector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the last export of each histogram, by name."""

    def __init__(self) -> None:
        self.histograms: dict[str, list[Distribution]] = {}

    async def Export(
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        for resource in request.resource_metrics:
            service = _attributes(resource.resource.attributes)["service.name"]
            for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
                self.histograms[metric.name] = [
                    Distribution(
                        service,
                        metric.unit,
                        point.count,
                        point.sum,
                        [*point.explicit_bounds],
                        _attributes(point.attributes),
                    )
                    for point in metric.histogram.data_points
                ]
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def collecting_metrics() -> AsyncIterator[tuple[MetricsCollector, str]]:
    """Run a collector of metrics; yield it and its URL."""
    collector = MetricsCollector()
    async with _listening(
        lambda server: metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(collector, server)
    ) as url:
        yield collector, url


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Run a collector; yield it and its URL."""
    collector = Collector()
    async with _listening(lambda server: pb_grpc.add_TraceServiceServicer_to_server(collector, server)) as url:
        yield collector, url


@asynccontextmanager
async def _listening(add: Callable[[grpc.aio.Server], None]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


def _received(request: pb.ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        service = _attributes(resource.resource.attributes)["service.name"]
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield Received(
                service=service,
                name=span.name,
                kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                began_ns=span.start_time_unix_nano,
                ended_ns=span.end_time_unix_nano,
                attributes=_attributes(span.attributes),
                links=[link.span_id.hex() for link in span.links],
                is_fault=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
            )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
